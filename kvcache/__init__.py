"""The KV cache: layouts, allocator, request table, prefix cache, stores, and the views through which models read."""

from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.cache import KVCache
from specdec.kvcache.frozen import frozen_kv, own_view
from specdec.kvcache.layout import PrimaryLoc, cache_groups, layout_from_config
from specdec.kvcache.table import RequestTable

assert __name__ == "specdec.kvcache", "import specdec.kvcache, not kvcache"

__all__ = [
    "HybridAllocator",
    "KVCache",
    "PrimaryLoc",
    "RequestTable",
    "cache_groups",
    "frozen_kv",
    "layout_from_config",
    "own_view",
]
