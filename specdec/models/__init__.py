"""Target models: how they are loaded, proven and run over the paged KV cache."""
