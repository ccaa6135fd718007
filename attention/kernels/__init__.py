"""Attention over paged K/V: page tables, the prefix kernels, a request's own new rows."""
