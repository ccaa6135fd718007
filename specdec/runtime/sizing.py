"""Sizes of the pools: the user's, else enough for a full batch within a share of the memory."""

import torch

from specdec.config import EngineConfig
from specdec.draft_models.base import Drafter
from specdec.errors import CapacityError
from specdec.gpu.memory import all_bytes, free_bytes
from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.cache import KVCache, KVOperations
from specdec.kvcache.index_spaces import Space
from specdec.kvcache.table import RequestTable, swa_slots_held
from specdec.models.target import TargetModel
from specdec.runtime.prompt_shares import PromptRoom

MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.8}
"""Share of the memory that is free once the weights are loaded."""
SWA_SPARE = 512
"""Sliding slots a request, or a chunk if that is shorter, beyond what it holds while it decodes: for chunks in flight,
and while there are fewer of those, for what the prefix cache keeps."""
FALLBACK_MODEL_LEN = 4096
"""For a model that states no limit."""


def make_cache(
    target: TargetModel, drafter: Drafter | None, config: EngineConfig, num_nodes: int, operations: KVOperations
) -> tuple[KVCache, int]:
    """Slots and request table for one engine, without stores yet, and the longest sequence they serve (tokens).

    num_nodes: verify width, the root included.
    """
    layout, page_size = target.stored_layout, config.page_size
    item = torch.empty((), dtype=target.dtype).element_size()
    full_bytes, swa_bytes = (layout.numbers_per_slot(space) * item for space in (Space.FULL, Space.SWA))
    if drafter is not None and drafter.kv_layout is not None:
        full_bytes += drafter.kv_layout.numbers_per_slot(Space.FULL) * item
    extra_keys = drafter.extra_keys if drafter is not None else 0
    if config.max_model_len is not None:
        target.context_length.require(config.max_model_len, target.name)
    max_len = config.max_model_len or target.context_length.default or FALLBACK_MODEL_LEN

    def whole_pages(slots: int) -> int:
        return -(-slots // page_size) * page_size

    batch, window = config.max_batch_size, layout.window
    full_each = whole_pages(max_len + num_nodes)
    swa_each = 0
    swa_in_flight = 0
    if window is not None:  # what one request holds while it decodes and the slack; besides, chunks in flight
        held = swa_slots_held(window - 1 + extra_keys, num_nodes, page_size)
        swa_each = min(whole_pages(held + page_size), full_each)
        room = PromptRoom.from_settings(config.max_prefill_tokens, config.prefill_chunk, target.device.type)
        together = max(room.idle, batch * min(room.chunk, SWA_SPARE))  # a step reads `idle`; the rest keeps prefixes
        swa_in_flight = min(batch * min(room.chunk, full_each - swa_each), whole_pages(together))
    share = config.memory_share or MEMORY_SHARE.get(target.device.type, 0.5)
    budget = int(min(map(free_bytes, target.devices)) * share)
    if target.ranks is not None and target.device.type == "cpu":
        budget //= len(target.devices)  # which are one
    full_slots, swa_slots = config.full_slots, config.swa_slots
    if swa_slots is None:
        swa_slots = min(swa_each * batch + swa_in_flight, budget // max(2 * swa_bytes, 1))
    if full_slots is None:
        rest = max(budget - swa_slots * swa_bytes, 0)
        full_slots = min(full_each * batch, rest // max(full_bytes, 1))
    if config.max_model_len is None:
        max_len = max(min(max_len, full_slots - num_nodes), 1)
    if full_slots < page_size or (window is not None and swa_slots < page_size):
        raise CapacityError(
            f"KV pools of {full_slots} full and {swa_slots} SWA slots hold no page of {page_size}; "
            "raise full_slots / swa_slots or lower page_size"
        )
    least = {"full": (full_slots, whole_pages(1 + num_nodes))}
    if window is not None:
        least["swa"] = (swa_slots, min(whole_pages(1 + num_nodes), whole_pages(held)))
    for space, (there, needed) in least.items():
        if there // page_size * page_size < needed:
            raise CapacityError(
                f"{space}_slots={there} can hold no request: a prompt of one token takes {needed} slots, with "
                f"{num_nodes} nodes a verify step and page size {page_size}; give {needed} or more, or leave it None, "
                f"which takes a share of the memory that is free ({budget / 1e9:,.2f} GB)"
            )
    needed, there = full_slots * full_bytes + swa_slots * swa_bytes, all_bytes(target.device)
    if needed > there:
        raise CapacityError(
            f"KV pools of {full_slots} full and {swa_slots} SWA slots take {needed / 1e9:,.1f} GB, and {target.device} "
            f"has {there / 1e9:,.1f} GB in all; lower full_slots / swa_slots, or leave them None"
        )
    allocator = HybridAllocator(
        full_pages=full_slots // page_size,
        swa_pages=None if window is None else swa_slots // page_size,
        page_size=page_size,
        device=target.device,
    )
    table = RequestTable(
        allocator, max_requests=batch, max_len=max_len, lookahead=num_nodes, window=window, extra_keys=extra_keys
    )
    return KVCache(allocator, table, operations), max_len
