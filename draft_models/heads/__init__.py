"""Code shared by EAGLE-3 heads, block drafters, MTP modules, Gemma 4 assistants and language models that draft."""
