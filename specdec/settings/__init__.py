"""Declarations of settings: shell options, numbers with bounds, and conversion of numpy and torch values."""
