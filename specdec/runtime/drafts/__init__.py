"""Drafts: which each round has, what is reported of them, and a watch over the conventions of MTP modules."""
