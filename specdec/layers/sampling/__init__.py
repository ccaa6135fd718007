"""Sampling over the vocabulary without sorting it: draws, log-probabilities, best tokens, and the centroid head."""
