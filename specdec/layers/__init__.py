"""Fused layers: kernels for few rows, the modules made of them, and the table of the modules that they replace."""
