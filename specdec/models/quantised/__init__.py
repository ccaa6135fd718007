"""Quantised checkpoints, read into packed weights: formats, the places of their tensors, the quantiser that loads."""
