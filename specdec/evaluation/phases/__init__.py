"""Milliseconds of each phase of a round next to the memory floor: of a real pair, or of random weights at a shape."""
