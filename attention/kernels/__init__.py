"""Attention over paged K/V: page tables, and kernels for trees, packs and drafts."""
