"""Code that EAGLE-3 heads, block drafters and language models as drafters share."""
