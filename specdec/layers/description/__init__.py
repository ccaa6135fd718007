"""Transformers' modules described for fused layers: families, what may be fused, merged weights, and the parts."""
