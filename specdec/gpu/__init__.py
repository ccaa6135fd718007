"""GPU foundations: the Triton shim, launches, captures, mirrored arrays, memory."""
