"""What every kernel and captured program stands on: the Triton shim, launches, captures, mirrored arrays, memory."""
