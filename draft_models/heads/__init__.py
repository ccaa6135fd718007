"""What EAGLE-3 heads, block drafters and language models that draft have in common."""
