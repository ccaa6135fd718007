"""Sizes of the pools: set by the user, or enough for a full batch within a share of the free memory."""

from typing import NamedTuple

import torch

from specdec.config import EngineConfig, SpecConfig
from specdec.draft_models.base import Drafter
from specdec.errors import CapacityError
from specdec.gpu.memory import all_bytes, free_bytes
from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.cache import KVCache, KVOperations, num_state_slots
from specdec.kvcache.layout import PRIMARY, ByGroup, KVLayout, Retention, cache_groups
from specdec.kvcache.recurrent_state import FOLD
from specdec.kvcache.table import RequestTable, window_slots_held
from specdec.models.described_model import ContextLength
from specdec.models.target import TargetModel
from specdec.runtime.prompts.prompt_budget import PromptBudget
from specdec.runtime.rounds.drafter_lag import MAX_LAG, lag_allowed

KV_SHARE = {"cpu": 0.25, "cuda": 0.8}
"""Share of the memory that is free after the weights are loaded."""
WINDOW_SPARE = 512
"""Extra slots per request in a windowed group, at most a chunk, beyond those that it holds while it decodes. Prompt
chunks in flight use them; cached prefixes use the rest."""
FALLBACK_MODEL_LEN = 4096
"""Maximum length for a model that states no limit."""


def unread_bound(*, lags: bool, recurrent: bool) -> int:
    """Upper bound on the newest committed tokens that a drafter may still have to read, each through its own window.
    lags: it may read tokens rounds after their commit. recurrent: the target has recurrent layers, so a match in the
    prefix cache ends at a copy of their states, up to FOLD - 1 tokens before the last committed one."""
    return MAX_LAG if lags else FOLD if recurrent else 0


class DraftNeeds(NamedTuple):
    """KV requirements of a drafter: see `Drafter.kv_layout`, `extra_keys` and `reread`. max_lag: `unread_bound`."""

    layout: KVLayout | None = None
    extra_keys: int = 0
    reread: int = 0
    max_lag: int = 0

    @classmethod
    def from_drafter(cls, drafter: Drafter | None, spec: SpecConfig, *, recurrent: bool = False) -> "DraftNeeds":
        """Returns the needs of this drafter. recurrent: see `unread_bound`."""
        if drafter is None:
            return cls()
        max_lag = unread_bound(lags=lag_allowed(drafter, spec.adaptive), recurrent=recurrent)
        return cls(drafter.kv_layout, drafter.extra_keys, drafter.reread, max_lag)

    @property
    def beyond_windows(self) -> int:
        """Committed keys to keep in every windowed group beyond its window, including those for tokens that are
        reread."""
        return max(self.extra_keys, self.reread)

    def max_lag_in(self, groups: ByGroup[Retention]) -> ByGroup[int]:
        """`max_lag` for the groups of the drafter's own layers, 0 for all others."""
        own = () if self.layout is None else {spec.retention for spec in self.layout.layers}
        return groups.map(lambda retention: self.max_lag if retention in own else 0)


class CacheNeeds:
    """Slots and bytes of K/V that a full batch of requests needs if memory is unlimited. Lists are by group.

    layouts: of the target, and of a drafter that keeps K/V.
    max_lag: see `RequestTable`.
    slot_bytes: bytes of one token in all layers of the group.
    held: slots of one request while it decodes.
    slots: slots of a full batch during prefill; between prefills, spare window slots hold cached prefixes.
    state_bytes: recurrent states of one request.
    """

    def __init__(
        self,
        layout: KVLayout,
        drafts: DraftNeeds,
        dtype: torch.dtype,
        config: EngineConfig,
        *,
        max_len: int,
        lookahead: int,
        device_type: str,
    ) -> None:
        """layout: the target's. max_len: tokens of each request. lookahead: see `lookahead_slots`."""
        layouts = [layout] if drafts.layout is None else [layout, drafts.layout]
        self.layouts = layouts if config.kv_dtype is None else [each.in_fp8() for each in layouts]
        self.groups = groups = cache_groups(self.layouts)
        self.page_size = page_size = config.page_size
        self.batch = batch = config.max_batch_size
        self.lookahead = lookahead
        self.max_lag = drafts.max_lag_in(groups)
        self.slot_bytes = [sum(each.slot_bytes(retention, dtype) for each in self.layouts) for retention in groups]
        self.state_bytes = sum(each.state_bytes(dtype) for each in self.layouts)
        budget = PromptBudget.from_config(config, device_type, recurrent=layout.recurrent)
        full_each = whole_pages(max_len + lookahead, page_size)
        self.held, self.slots = [full_each], [full_each * batch]
        for group, retention in groups.items():
            if (window := retention.num_kept(lookahead)) is None:
                continue
            kept = window - 1 + drafts.beyond_windows + self.max_lag[group]
            keys = window_slots_held(kept, lookahead, page_size)
            # of one request: its keys and the slack; chunks in flight are added below
            each = min(whole_pages(keys + page_size, page_size), full_each)
            # a step reads `while_idle`; prefixes use the rest
            together = max(budget.while_idle, batch * min(budget.chunk, WINDOW_SPARE))
            in_flight = min(batch * min(budget.chunk, full_each - each), whole_pages(together, page_size))
            self.held.append(whole_pages(keys, page_size))
            self.slots.append(each * batch + in_flight)

    @property
    def all_state_bytes(self) -> int:
        """Bytes of recurrent states: of a full batch, of padding, and of copies for cached prefixes."""
        return num_state_slots(self.batch) * self.state_bytes

    def slots_within(self, config: EngineConfig, budget: int) -> list[int]:
        """Slots of each group within a budget of bytes: as many as needed, or as the user set. Windowed groups take at
        most half of the budget, the primary group the rest."""
        max_slots = budget // max(2 * sum(self.slot_bytes[1:]), 1)
        windowed = [min(count, max_slots) if config.swa_slots is None else config.swa_slots for count in self.slots[1:]]
        if config.full_slots is not None:
            return [config.full_slots, *windowed]
        left = budget - sum(count * size for count, size in zip(windowed, self.slot_bytes[1:], strict=True))
        return [min(self.slots[PRIMARY], max(left, 0) // max(self.slot_bytes[PRIMARY], 1)), *windowed]

    def require_room(self, slots: list[int], budget: int, device: torch.device) -> None:
        """Raise CapacityError if these slots of each group can hold no request, or the device cannot hold them."""
        pools = ", ".join(f"{count} {retention.name}" for retention, count in zip(self.groups, slots, strict=True))
        if min(slots) < self.page_size and 0 < budget <= self.all_state_bytes:
            raise CapacityError(
                f"max_batch_size={self.batch}: states of recurrent layers, with copies for cached prefixes, take "
                f"{self.all_state_bytes / 1e9:,.2f} GB, and {budget / 1e9:,.2f} GB are there for them and for K/V; "
                "lower max_batch_size, or raise memory_share"
            )
        for (group, _), there, held in zip(self.groups.items(), slots, self.held, strict=True):
            needed = min(whole_pages(1 + self.lookahead, self.page_size), held)
            if there // self.page_size * self.page_size < needed:
                option = "full_slots" if group == PRIMARY else "swa_slots"
                raise CapacityError(
                    f"{option}={there} can hold no request: a prompt of one token takes {needed} slots, with "
                    f"{self.lookahead} lookahead slots and page size {self.page_size}; give {needed} or more, or leave "
                    f"it None, which takes a share of the memory that is free ({budget / 1e9:,.2f} GB)"
                )
        needed = sum(count * size for count, size in zip(slots, self.slot_bytes, strict=True)) + self.all_state_bytes
        if needed > all_bytes(device):
            raise CapacityError(
                f"KV pools of {pools} slots take {needed / 1e9:,.1f} GB, and {device} has "
                f"{all_bytes(device) / 1e9:,.1f} GB in all; lower full_slots / swa_slots, or leave them None"
            )


def whole_pages(slots: int, page_size: int) -> int:
    return -(-slots // page_size) * page_size


def lookahead_slots(spec: SpecConfig, *, drafts: bool, captured: bool) -> int:
    """Slots of a request for uncommitted tokens: those of one round, or of two if rounds are captured, since the next
    round is then launched before the previous one is settled."""
    return (2 if captured else 1) * (spec.num_nodes if drafts else 1)


def longest_sequence(config: EngineConfig, length: ContextLength, name: str) -> int:
    """Tokens of the longest sequence: as requested, or as the model (called `name` in errors) allows. Raises
    ConfigError."""
    if config.max_model_len is not None:
        length.require(config.max_model_len, name)
    return config.max_model_len or length.default or FALLBACK_MODEL_LEN


def make_cache(
    target: TargetModel,
    drafter: Drafter | None,
    spec: SpecConfig,
    config: EngineConfig,
    lookahead: int,
    operations: KVOperations,
) -> tuple[KVCache, int]:
    """Make the slots and request table of one engine, without stores yet. Also returns the longest sequence in tokens.

    lookahead: slots of a request for uncommitted tokens, see `lookahead_slots`.
    """
    page_size, drafts = config.page_size, DraftNeeds.from_drafter(drafter, spec, recurrent=target.recurrent)
    max_len, batch = longest_sequence(config, target.context_length, target.name), config.max_batch_size
    needs = CacheNeeds(
        target.stored_layout,
        drafts,
        target.dtype,
        config,
        max_len=max_len,
        lookahead=lookahead,
        device_type=target.device.type,
    )
    share = config.memory_share or KV_SHARE.get(target.device.type, 0.5)
    budget = int(min(map(free_bytes, target.devices)) * share)
    if target.ranks is not None and target.device.type == "cpu":
        budget //= len(target.devices)  # on a CPU they are one
    slots = needs.slots_within(config, max(budget - needs.all_state_bytes, 0))
    if config.max_model_len is None:
        max_len = max(min(max_len, slots[PRIMARY] - lookahead), 1)
    needs.require_room(slots, budget, target.device)
    pages = [count // page_size for count in slots]
    allocator = HybridAllocator(needs.groups, pages, page_size=page_size, device=target.device)
    table = RequestTable(
        allocator,
        max_requests=batch,
        max_len=max_len,
        lookahead=lookahead,
        extra_keys=drafts.beyond_windows,
        reread=drafts.reread,
        max_lag=needs.max_lag,
    )
    return KVCache(allocator, table, operations, fp8=config.kv_dtype is not None), max_len
