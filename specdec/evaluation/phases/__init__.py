"""Milliseconds of each phase of a round, and the memory floor: of a real pair, or of random weights at a shape."""
