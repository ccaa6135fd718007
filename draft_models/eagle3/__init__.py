"""EAGLE-3 heads: checkpoints of four dialects, the head, its fused form, the drafter."""
