"""Drafts: which each round has, what is reported of them, their dense reference, and a watch over MTP conventions."""
