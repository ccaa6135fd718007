"""Code shared by EAGLE-3 heads, block drafters, MTP modules and language models that draft."""
