"""Index spaces, layout, hybrid allocator, request table, prefix cache, stores, the view a worker reads KV through."""

from specdec.errors import FrozenKVError, KVStateError, OutOfSlotsError, SpecDecError
from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.cache import KVCache
from specdec.kvcache.frozen import KVView, frozen_kv, own_view
from specdec.kvcache.index_spaces import FullLoc, Space, SwaLoc
from specdec.kvcache.layout import KVLayout, layout_from_config
from specdec.kvcache.prefix_cache import PrefixCache
from specdec.kvcache.store import KVStore
from specdec.kvcache.table import RequestTable, Rows

assert __name__ == "specdec.kvcache", "import specdec.kvcache, not kvcache"

__all__ = [
    "FrozenKVError",
    "FullLoc",
    "HybridAllocator",
    "KVCache",
    "KVLayout",
    "KVStateError",
    "KVStore",
    "KVView",
    "OutOfSlotsError",
    "PrefixCache",
    "RequestTable",
    "Rows",
    "Space",
    "SpecDecError",
    "SwaLoc",
    "frozen_kv",
    "layout_from_config",
    "own_view",
]
