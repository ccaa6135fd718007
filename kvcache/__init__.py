"""Index spaces, layout, hybrid allocator, request table, prefix cache, stores, the view a worker reads KV through."""

from specdec.errors import FrozenKVError, KVStateError, OutOfSlotsError, SpecDecError
from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.cache import KVCache
from specdec.kvcache.frozen import KVView, frozen_kv, own_view
from specdec.kvcache.index_spaces import ByGroup, GroupId, GroupLoc, PrimaryLoc
from specdec.kvcache.layout import KVLayout, cache_groups, layout_from_config
from specdec.kvcache.prefix_cache import PrefixCache
from specdec.kvcache.store import KVStore
from specdec.kvcache.table import RequestTable, Rows

assert __name__ == "specdec.kvcache", "import specdec.kvcache, not kvcache"

__all__ = [
    "ByGroup",
    "KVLayout",
    "FrozenKVError",
    "GroupId",
    "GroupLoc",
    "HybridAllocator",
    "KVCache",
    "KVStateError",
    "KVStore",
    "KVView",
    "OutOfSlotsError",
    "PrefixCache",
    "PrimaryLoc",
    "RequestTable",
    "Rows",
    "SpecDecError",
    "cache_groups",
    "frozen_kv",
    "layout_from_config",
    "own_view",
]
