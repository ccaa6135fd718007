"""Foundations of kernels and captured programs: the Triton shim, launches, captures, mirrored arrays, memory."""
