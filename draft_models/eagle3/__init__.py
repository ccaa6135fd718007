"""EAGLE-3 heads: checkpoints in four formats, the head, its fused form, and the drafter."""
