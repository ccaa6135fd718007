"""Weights in 4 or 8 bits, in words that kernels unpack in registers."""
