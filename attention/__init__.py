"""Attention over a paged prefix and a draft tree: metadata, page tables, references and kernels."""

assert __name__ == "specdec.attention", "import specdec.attention, not attention"
