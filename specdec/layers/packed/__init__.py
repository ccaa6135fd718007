"""Weights in 4 or 8 bits, packed into words that kernels unpack in registers."""
