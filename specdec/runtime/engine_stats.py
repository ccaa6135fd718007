"""Statistics of an engine: sums over ended requests, its rounds, its pools, and one warning.

No decision depends on them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from specdec.gpu.captures import CaptureStats
from specdec.gpu.memory import all_bytes, free_bytes
from specdec.kvcache.cache import KVCache
from specdec.kvcache.page_pool import PagePool
from specdec.models.target import TargetModel
from specdec.runtime.drafts.draft_reports import DraftStats
from specdec.runtime.request import Request
from specdec.runtime.request_output import RequestStats
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.scheduler import Scheduler

logger = logging.getLogger(__name__)

REQUEST_ROUNDS_PER_CHECK = 1000
"""Pairs of a round and a speculating request between two checks of the acceptance of drafts."""

MIN_DRAFTS_PER_CHECK = 16
"""Minimum number of drafts (one per request and round) for a check."""

MAX_ROUNDS_WITHOUT_CHECK = 8000
"""Rounds of the engine after which a check takes place even with fewer drafts. 128 requests reach
REQUEST_ROUNDS_PER_CHECK in 8 rounds, when few drafts were tried."""

MIN_ACCEPTED_SHARE = 0.02
"""Minimum share of drafts with a right first token: below it a pair of target and drafter counts as broken. A random
draft is right with a probability of 1 / vocabulary size. Prompt lookup in a text without repetitions is below this
bound too."""


class PoolStats(NamedTuple):
    """KV slots, summed over pools.

    held: slots of requests, now. peak: the most of each pool ever. cached: slots of the prefix cache alone. capacity:
    all slots.
    """

    held: int
    peak: int
    cached: int
    capacity: int

    @classmethod
    def from_pools(cls, pools: Sequence[PagePool], page_size: int) -> "PoolStats":
        """Sums over these pools."""
        each = [(pool.held_pages, pool.peak_pages, pool.evictable_pages, pool.capacity) for pool in pools]
        return cls(*(page_size * sum(pages) for pages in zip((0, 0, 0, 0), *each, strict=True)))


class DeviceStats(NamedTuple):
    """Memory of one device.

    kv_bytes: bytes of the engine's pools and states. free_bytes, total_bytes: memory of the device; for a CPU, of the
    machine.
    """

    device: str
    kv_bytes: int
    free_bytes: int
    total_bytes: int


def device_stats(target: TargetModel, cache: KVCache) -> tuple[DeviceStats, ...]:
    """Memory of each device, in the order of ranks; ranks on a CPU are one device each. Asks a GPU's driver."""
    held = [0] * len(target.devices)
    for store in cache.stores:
        held[store.rank] += sum(layer.nbytes for layer in store.layers.values())
    return tuple(
        DeviceStats(str(device), kv_bytes, free_bytes(device), all_bytes(device))
        for device, kv_bytes in zip(target.devices, held, strict=True)
    )


EMPTY_POOL_STATS = PoolStats(0, 0, 0, 0)
NO_CAPTURES = CaptureStats()
NO_DRAFT_STATS = DraftStats()


@dataclass(slots=True)
class EngineStats(RequestStats):
    """`RequestStats` summed over finished requests (not aborted ones), and the present state of the engine.

    finished, aborted: requests that ended; failed ones count as aborted.
    waiting, running: requests that have not ended.
    batches, batch_seconds: rounds of the engine, and their time (`rounds` counts a round once per decoding request).
    captures: captured rounds and prompts, and eager runs.
    drafts: which drafts rounds had, and why.
    prompt_gap_ms: the longest time between two tokens of a decoding request while one prompt of `max_model_len` tokens
        is read, from measured times; each further request that waits for its first token adds half a round. 0.0 until
        that is known.
    devices: memory of each device of the target, in the order of ranks.
    """

    finished: int = 0
    aborted: int = 0
    waiting: int = 0
    running: int = 0
    batches: int = 0
    batch_seconds: float = 0.0
    full_slots: PoolStats = EMPTY_POOL_STATS
    swa_slots: PoolStats = EMPTY_POOL_STATS
    captures: CaptureStats = NO_CAPTURES
    drafts: DraftStats = NO_DRAFT_STATS
    prompt_gap_ms: float = 0.0
    devices: tuple[DeviceStats, ...] = ()

    @property
    def batch_milliseconds(self) -> float:
        """Mean time of a round on the device."""
        return 1e3 * self.batch_seconds / self.batches if self.batches else 0.0

    @property
    def requests_per_batch(self) -> float:
        """Mean number of requests per round; only ended requests count."""
        return self.rounds / self.batches if self.batches else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens whose K/V came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_queue_seconds(self) -> float:
        """Mean time from when a request was submitted until it had a row."""
        return self.queue_seconds / self.finished if self.finished else 0.0

    @property
    def mean_first_token_seconds(self) -> float:
        """Mean time from when a request was submitted until its first token."""
        return self.first_token_seconds / self.finished if self.finished else 0.0

    def count(self, request: Request) -> None:
        """Count a request that has finished or was aborted."""
        if request.finish_reason in ("abort", "error"):
            self.aborted += 1
        else:
            self.finished += 1
            self.add(request.stats)


def stats_now(
    totals: EngineStats, scheduler: Scheduler, state: DeviceState, captures: CaptureStats, drafts: DraftStats
) -> EngineStats:
    """A copy of these totals, with the engine's present state."""
    allocator = scheduler.table.allocator
    return replace(
        totals,
        accepted_counts=list(totals.accepted_counts),
        drafted_counts=list(totals.drafted_counts),
        waiting=len(scheduler.waiting),
        running=len(scheduler.running),
        full_slots=PoolStats.from_pools([allocator.primary], allocator.page_size),
        swa_slots=PoolStats.from_pools(allocator.pools.values[1:], allocator.page_size),
        captures=captures,
        drafts=drafts,
        prompt_gap_ms=1e3 * scheduler.prompt_gap.longest_gap(scheduler.max_model_len),
        devices=device_stats(state.target, state.cache),
    )


BROKEN_ADVICE = (
    "see that it was made for this target and this chat template, in this dtype (docs/troubleshooting.md, 'Acceptance "
    "near zero')"
)
NO_DRAFT_SAID = (
    "none of the last %d rounds had a draft: the output is right, but the drafter saves no time; Engine.drafts_off and "
    "`specdec doctor` say why (docs/troubleshooting.md, 'Acceptance near zero'), or use drafter=None"
)
TOO_SELDOM = (
    "drafts are tried so rarely because they do not pay here: SpecConfig(adaptive=False) or `specdec doctor` tells "
    "whether the drafter's tokens or its time are at fault (docs/troubleshooting.md, 'Acceptance near zero')"
)


class DraftWatch:
    """Counts drafts of an engine, and warns once if hardly any has a right first token."""

    def __init__(self) -> None:
        self._sums = np.zeros(4, dtype=np.int64)  # since the last check: engine rounds, and what `count` is given
        self._warned = False

    def count(self, rounds: int, drafted: int, first_accepted: int) -> None:
        """Count a round of the engine: requests that speculate, those with a draft, and those whose first draft was
        accepted."""
        self._sums += rounds > 0, rounds, drafted, first_accepted
        batches, rounds, drafted, first_accepted = self._sums.tolist()
        seldom = drafted < MIN_DRAFTS_PER_CHECK
        if self._warned or (batches < MAX_ROUNDS_WITHOUT_CHECK if seldom else rounds < REQUEST_ROUNDS_PER_CHECK):
            return
        if not drafted:
            self._warned = True
            logger.warning(NO_DRAFT_SAID, batches)
        elif first_accepted < max(1, MIN_ACCEPTED_SHARE * drafted):
            self._warned = True
            said = "of the last %d drafts, in %d rounds, %d began with a token that was accepted: the output is right, "
            said += "but the drafter costs time and saves none; %s, or use drafter=None"
            logger.warning(said, drafted, rounds, first_accepted, TOO_SELDOM if seldom else BROKEN_ADVICE)
        self._sums[:] = 0  # judge the next drafts separately: a good start must not hide a bad end
