"""Recurrent layers: a state a request, records of its newest tokens, and what a path of tokens computes from both."""
