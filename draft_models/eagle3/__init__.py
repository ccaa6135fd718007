"""EAGLE-3 heads: their checkpoints, the head with its fused form, and the drafter."""
