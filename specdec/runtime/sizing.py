"""Sizes of the pools: the user's, else enough for a full batch within a share of the memory."""

import torch

from specdec.config import EngineConfig
from specdec.draft_models.base import Drafter
from specdec.errors import CapacityError
from specdec.gpu.memory import all_bytes, free_bytes
from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.cache import KVCache, KVOperations
from specdec.kvcache.index_spaces import PRIMARY
from specdec.kvcache.layout import CacheGroups
from specdec.kvcache.table import RequestTable, window_slots_held
from specdec.models.target import TargetModel
from specdec.runtime.prompt_shares import PromptRoom

MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.8}
"""Share of the memory that is free once the weights are loaded."""
WINDOW_SPARE = 512
"""Slots of a windowed group a request, or a chunk if that is shorter, beyond what it holds while it decodes: for
chunks in flight, and while there are fewer of those, for what the prefix cache keeps."""
FALLBACK_MODEL_LEN = 4096
"""For a model that states no limit."""


def make_cache(
    target: TargetModel, drafter: Drafter | None, config: EngineConfig, num_nodes: int, operations: KVOperations
) -> tuple[KVCache, int]:
    """Slots and request table for one engine, without stores yet, and the longest sequence they serve (tokens).

    num_nodes: verify width, the root included.
    """
    page_size, layouts = config.page_size, [target.stored_layout]
    if drafter is not None and drafter.kv_layout is not None:
        layouts.append(drafter.kv_layout)
    groups = CacheGroups.of_layouts(layouts)
    item = torch.empty((), dtype=target.dtype).element_size()
    slot_bytes = [sum(layout.numbers_per_slot(group.retention) for layout in layouts) * item for group in groups.groups]
    extra_keys = drafter.extra_keys if drafter is not None else 0
    if config.max_model_len is not None:
        target.context_length.require(config.max_model_len, target.name)
    max_len = config.max_model_len or target.context_length.default or FALLBACK_MODEL_LEN

    def whole_pages(slots: int) -> int:
        return -(-slots // page_size) * page_size

    batch, full_each = config.max_batch_size, whole_pages(max_len + num_nodes)
    held = [0] + [  # by one request while it decodes
        window_slots_held(window - 1 + extra_keys, num_nodes, page_size) for window in groups.windows
    ]
    share = config.memory_share or MEMORY_SHARE.get(target.device.type, 0.5)
    budget = int(min(map(free_bytes, target.devices)) * share)
    if target.ranks is not None and target.device.type == "cpu":
        budget //= len(target.devices)  # which are one
    room = PromptRoom.from_settings(config.max_prefill_tokens, config.prefill_chunk, target.device.type)
    most = budget // max(2 * sum(slot_bytes[1:]), 1)  # windowed pools take half of the memory at most
    slots = [0]
    for keys in held[1:]:
        each = min(whole_pages(keys + page_size), full_each)  # what it holds and the slack; besides, chunks in flight
        together = max(room.idle, batch * min(room.chunk, WINDOW_SPARE))  # a step reads `idle`; the rest keeps prefixes
        in_flight = min(batch * min(room.chunk, full_each - each), whole_pages(together))
        slots.append(min(each * batch + in_flight, most) if config.swa_slots is None else config.swa_slots)
    windowed_bytes = sum(count * size for count, size in zip(slots, slot_bytes, strict=True))
    if config.full_slots is None:
        slots[PRIMARY] = min(full_each * batch, max(budget - windowed_bytes, 0) // max(slot_bytes[PRIMARY], 1))
    else:
        slots[PRIMARY] = config.full_slots
    if config.max_model_len is None:
        max_len = max(min(max_len, slots[PRIMARY] - num_nodes), 1)
    pools = ", ".join(f"{count} {group.name}" for group, count in zip(groups.groups, slots, strict=True))
    if min(slots) < page_size:
        raise CapacityError(
            f"KV pools of {pools} slots hold no page of {page_size}; raise full_slots / swa_slots or lower page_size"
        )
    for group, there, keys in zip(groups.groups, slots, held, strict=True):
        needed = whole_pages(1 + num_nodes)
        if group.id != PRIMARY:
            needed = min(needed, whole_pages(keys))
        if there // page_size * page_size < needed:
            option = "full_slots" if group.id == PRIMARY else "swa_slots"
            raise CapacityError(
                f"{option}={there} can hold no request: a prompt of one token takes {needed} slots, with "
                f"{num_nodes} nodes a verify step and page size {page_size}; give {needed} or more, or leave it None, "
                f"which takes a share of the memory that is free ({budget / 1e9:,.2f} GB)"
            )
    needed = sum(count * size for count, size in zip(slots, slot_bytes, strict=True))
    if needed > all_bytes(target.device):
        raise CapacityError(
            f"KV pools of {pools} slots take {needed / 1e9:,.1f} GB, and {target.device} has "
            f"{all_bytes(target.device) / 1e9:,.1f} GB in all; lower full_slots / swa_slots, or leave them None"
        )
    pages = [count // page_size for count in slots]
    allocator = HybridAllocator(groups, pages, page_size=page_size, device=target.device)
    table = RequestTable(allocator, max_requests=batch, max_len=max_len, lookahead=num_nodes, extra_keys=extra_keys)
    return KVCache(allocator, table, operations), max_len
