"""Attention over paged K/V: page tables, kernels for trees, packs and drafts, and the keys of a draft in progress."""
