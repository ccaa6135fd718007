"""Target models: how they are described, checked and run over the paged KV cache."""
