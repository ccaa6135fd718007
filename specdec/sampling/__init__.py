"""Sampling: parameters, noise, penalties, masks, the torch reference and the kernels."""
