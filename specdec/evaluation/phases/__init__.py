"""Milliseconds of each phase of a round beside the memory floor: of a pair, or of random weights at a published shape."""
