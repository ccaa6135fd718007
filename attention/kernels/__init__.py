"""Attention over paged K/V: page tables, and kernels for prefixes and for new rows."""
