"""Index spaces, layout, pools, the hybrid allocator and the view a worker reads KV through."""

assert __name__ == "specdec.kvcache", "import specdec.kvcache, not kvcache"
