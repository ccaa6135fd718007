"""Index spaces, layout, pools, the hybrid allocator and the view a worker reads KV through."""

from specdec.errors import FrozenKVError, KVStateError, OutOfSlotsError, SpecDecError
from specdec.kvcache.frozen import KVView, frozen_kv, target_view
from specdec.kvcache.hybrid import HybridAllocator
from specdec.kvcache.layout import KVLayout, layout_from_config
from specdec.kvcache.spaces import FullLoc, SlotTable, Space, SwaLoc
from specdec.kvcache.table import RequestTable

assert __name__ == "specdec.kvcache", "import specdec.kvcache, not kvcache"

__all__ = [
    "FrozenKVError",
    "FullLoc",
    "HybridAllocator",
    "KVLayout",
    "KVStateError",
    "KVView",
    "OutOfSlotsError",
    "SlotTable",
    "RequestTable",
    "Space",
    "SpecDecError",
    "SwaLoc",
    "frozen_kv",
    "layout_from_config",
    "target_view",
]
