"""Transformers' modules described for fused layers: families, merged weights, and the parts that these make."""
