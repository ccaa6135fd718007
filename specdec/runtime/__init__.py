"""A round from its requests to their tokens: scheduling, launching, settling."""
