"""Recurrent layers: one state per request, records of its newest tokens, and the computation of a path from both."""
