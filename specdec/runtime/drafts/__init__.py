"""Drafts: the choice of each round's draft, reports, a dense reference, and a watch over MTP conventions."""
