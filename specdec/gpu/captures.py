"""An engine's captures of rounds and prompts, by shape, kept within a budget of bytes by LRU eviction.

    a shape   met  ->  ran once, or 4 times if rare  ->  captured  ->  evicted
                                                     ->  refused: out of memory, over the budget, or an error

An evicted or refused shape is captured again after it has run uncaptured some times, twice as many each time: so a
budget that is too small does not make every round capture. If weights have moved, all shapes are captured again.

Captures of one pool share its memory, since they never run at the same time: a pool is as large as its largest capture
needs, and is freed with its last capture. If the device is out of memory, all other captures are evicted and the new
one is tried once more. Captures of SPARE_POOL are evicted first, and no other capture is evicted for them. Where
programs are captured, `stats()` counts all that have run uncaptured since the warm-up.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from specdec.errors import ConfigError, FrozenKVError, SpecDecError, first_line
from specdec.gpu.memory import all_bytes, free_bytes

logger = logging.getLogger(__name__)

Program = Callable[[], torch.Tensor]
Replay = Callable[[], None]
Capture = Callable[[Program], tuple[Replay, torch.Tensor]]
"""Records a program instead of running it -> (function that replays it, its result tensor, rewritten by each
replay)."""

SPARE_POOL = "long prompts"
"""Pool of long forwards. They lose least without a capture, since the device is busy in any case."""

POOLS = ("rounds", "rare rounds", "prompts", SPARE_POOL)
"""Names of pools: rounds that edit or report logits need several times the memory, and are temporary."""

CAPTURE_SHARE = 0.1
"""Upper bound on the default budget, as a share of all memory of the device."""

MAX_BACKOFF_RUNS = 1024
"""Upper bound on the runs of a shape between two attempts to capture it, after evictions or for lack of memory."""

FREE_SHARE = 0.5
"""Upper bound on the default budget, as a share of the memory that is free after the K/V pools are allocated."""


class CaptureRule(NamedTuple):
    """How a shape is captured. kind: "rounds" or "prompts". pool: name of its memory pool. warning: log text if that
    fails, with %s for the error; each text is logged once. patience: eager runs before its capture, at least 1."""

    kind: str
    pool: str
    warning: str
    patience: int = 1


class CaptureStats(NamedTuple):
    """Captures of an engine, and runs without a capture.

    captured: rounds and prompt forwards that can be replayed now.
    made, evicted, refused: captures made so far, evicted for others, and failed for any reason.
    bytes: memory of all captures and their results, on the device that holds most.
    budget_bytes: upper bound on `bytes`; None: no bound, or nothing is captured.
    uncaptured_rounds, uncaptured_prompts: rounds (and a drafter's catching up) and prompt forwards launched kernel by
        kernel.
    """

    captured: int = 0
    made: int = 0
    evicted: int = 0
    refused: int = 0
    bytes: int = 0
    budget_bytes: int | None = None
    uncaptured_rounds: int = 0
    uncaptured_prompts: int = 0


class CaptureMemory:
    """Reports the device memory that captures use. The base class reports 0.

    pool: captures made from now on take their memory from the pool of this name.
    """

    pool = ""

    def held_bytes(self) -> int:
        """Bytes that pools and captured programs hold now."""
        return 0

    def wait(self) -> None:
        """Wait until no captured program runs, so that any can be dropped."""

    def close(self, pool: str) -> None:
        """Free the memory of this pool, which has no captures left."""


def next_power_of_two(size: int) -> int:
    """A size that captured programs are padded to, so that few are captured."""
    return 1 << (size - 1).bit_length()


def default_budget(*devices: torch.device) -> int | None:
    """Default of `EngineConfig.max_capture_bytes` on these devices, as the fullest of them allows. None: nothing is
    captured on these devices."""
    if devices[0].type != "cuda":
        return None
    shares = [min(CAPTURE_SHARE * all_bytes(device), FREE_SHARE * free_bytes(device)) for device in devices]
    return int(min(shares))


def is_out_of_memory(error: BaseException) -> bool:
    """Was the device out of memory? Each library raises its own type of error."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in message or "ALLOC_FAILED" in message)


class OverBudget(SpecDecError):
    """Raised for a capture that exceeds the budget even alone."""


class CapturedProgram(NamedTuple):
    """A round or a prompt forward that can be replayed.

    programs: the recorded programs. replays: one per program, with the tensor that it writes. view_key: key of the K/V
    view that it was captured under; it is valid only under this view. pool: name of the pool that holds intermediate
    results of its programs. Other captures overwrite the pool between two rounds, so nothing in it outlives a round.
    """

    programs: Sequence[Program]
    replays: list[tuple[Replay, torch.Tensor]]
    view_key: Hashable
    pool: str


class CaptureStore:
    """All captures of one engine, by shape.

    If a capture fails, the program runs eagerly, is counted (`stats`), and its capture is tried again later.

    capture: None: all programs run eagerly, and none is counted.
    memory: sizes are known only if it is a `CaptureMemory`.
    budget_bytes: None: no bound.
    shared_bytes: bytes of the tensors that receive the results of captured programs.
    weights_generation: changes when weights have moved.
    view_key: key of the K/V view of programs that run now.
    strict: a failed capture is a ConfigError, unless memory or budget is too small for a long prompt.
    """

    def __init__(
        self,
        capture: Capture | None,
        memory: object,
        budget_bytes: int | None,
        weights_generation: Callable[[], int],
        view_key: Callable[[], Hashable],
        *,
        strict: bool,
    ) -> None:
        self._capture = capture
        self._memory = memory if isinstance(memory, CaptureMemory) else CaptureMemory()
        self._budget = budget_bytes
        self._weights_generation = weights_generation
        self._view_key = view_key
        self._strict = strict
        self._captured: dict[Hashable, CapturedProgram] = {}  # least recently used first
        self._waits: dict[Hashable, int] = {}  # shapes that ran and are not captured: runs until a capture is tried
        self._setbacks: Counter[Hashable] = Counter()  # evictions and failed captures since the weights moved
        self._warned: set[str] = set()
        self._made = self._evicted = self._refused = self._bytes = 0
        self.generation = weights_generation()
        self.shared_bytes = 0
        self.uncaptured = {"rounds": 0, "prompts": 0}

    @property
    def captures(self) -> bool:
        """Are programs captured?"""
        return self._capture is not None

    def stats(self) -> CaptureStats:
        counts = len(self._captured), self._made, self._evicted, self._refused
        return CaptureStats(*counts, self._bytes, self._budget, *self.uncaptured.values())

    def programs_to_run(self, shape: Hashable, programs: Sequence[Program], rule: CaptureRule) -> Sequence[Program]:
        """Replays of the captured programs of this shape, or `programs`, to be run eagerly."""
        if not self.captures:
            return programs
        if self.generation != (now := self._weights_generation()):
            self.generation = now
            self.clear()
        self.capture_next(shape, programs, rule)
        if shape not in self._captured:
            self._waits[shape] = max(0, self._waits.get(shape, rule.patience) - 1)
            self.uncaptured[rule.kind] += 1
            return programs
        self._captured[shape] = captured = self._captured.pop(shape)  # now the most recently used
        if captured.view_key != self._view_key():
            raise FrozenKVError("a captured round is replayed under another view than its own")
        return [partial(_replay, *each) for each in captured.replays]

    def capture_next(self, shape: Hashable, programs: Sequence[Program], rule: CaptureRule) -> None:
        """Capture the programs of a shape if it has run and need not wait, so that its next run is a replay."""
        if self._waits.get(shape) != 0:
            return
        try:
            self._make(shape, programs, rule.pool)
            del self._waits[shape]
        except Exception as error:  # of any kind: a model may do anything that a graph cannot record
            no_memory, reason = is_out_of_memory(error), first_line(_root(error))
            if self._strict and not (rule.pool == SPARE_POOL and (no_memory or isinstance(error, OverBudget))):
                raise ConfigError(
                    f"{rule.kind} cannot be captured in a CUDA graph ({reason}); use cuda_graphs='auto' or False"
                ) from error
            self._refused += 1
            self._back_off(shape, MAX_BACKOFF_RUNS if no_memory else None)
            level = logging.DEBUG if rule.warning in self._warned else logging.WARNING
            logger.log(level, rule.warning, reason)
            self._warned.add(rule.warning)

    def clear(self) -> None:
        """Drop all captures and their memory."""
        for shape in list(self._captured):
            self._drop(shape)
        self._waits.clear()
        self._setbacks.clear()

    def _make(self, shape: Hashable, programs: Sequence[Program], pool: str) -> None:
        """Capture these programs; evict the least recently used captures until they fit the budget.

        Raises any error of a program. Out of memory is raised only after all other captures were evicted and the
        capture was tried again (at once for SPARE_POOL). Raises OverBudget if the capture alone (for SPARE_POOL: next
        to those of other pools), even recorded again, exceeds the budget.
        """
        self._record(shape, programs, pool)
        while self._over() and (others := self._evictable(pool)):
            self._evict(others[0])
        if self._over():  # perhaps its pool grew for others: record it in a new one
            self._drop(shape)
            self._record(shape, programs, pool)
        if self._over():
            taken = self._bytes
            self._drop(shape)
            raise OverBudget(
                f"a capture takes {taken / 1e6:,.1f} MB, and max_capture_bytes is {self._budget:,}; raise that, or "
                "lower max_batch_size, max_prefill_tokens or the number of drafted nodes"
            )
        self._made += 1

    def _record(self, shape: Hashable, programs: Sequence[Program], pool: str) -> None:
        assert self._capture is not None, "nothing is captured"
        self._memory.pool = pool
        replays = []
        try:
            replays = [self._capture(program) for program in programs]
        except Exception as error:
            if not is_out_of_memory(error) or pool == SPARE_POOL:
                raise
        if not replays:  # outside the handler, since the error's frames hold memory
            self._release_all()
            replays = [self._capture(program) for program in programs]
        self._captured[shape] = CapturedProgram(programs, replays, self._view_key(), pool)
        self._measure()

    def _evictable(self, pool: str) -> list[Hashable]:
        """Shapes that may be evicted for a new one of this pool, the first to evict first."""
        *others, _ = self._captured
        spare = [shape for shape in others if self._captured[shape].pool == SPARE_POOL]
        return spare if spare or pool == SPARE_POOL else others

    def _over(self) -> bool:
        return self._budget is not None and self._bytes > self._budget

    def _measure(self) -> None:
        self._bytes = self._memory.held_bytes() + self.shared_bytes

    def _evict(self, shape: Hashable) -> None:
        self._evicted += 1
        self._drop(shape)
        self._back_off(shape, MAX_BACKOFF_RUNS)

    def _back_off(self, shape: Hashable, max_runs: int | None) -> None:
        """Try the next capture of this shape after some runs. Their number doubles each time."""
        self._setbacks[shape] += 1
        runs = 1 << self._setbacks[shape] - 1
        self._waits[shape] = runs if max_runs is None else min(runs, max_runs)

    def _release_all(self) -> None:
        for shape in list(self._captured):
            self._evict(shape)
        self._memory.wait()
        for pool in POOLS:  # including failed ones
            self._memory.close(pool)
        self._measure()

    def _drop(self, shape: Hashable) -> None:
        self._memory.wait()
        pool = self._captured.pop(shape).pool
        if all(kept.pool != pool for kept in self._captured.values()):
            self._memory.close(pool)
        self._measure()


def _replay(replay: Replay, out: torch.Tensor) -> torch.Tensor:
    replay()
    return out


def _root(error: BaseException) -> BaseException:
    """The first error of a chain: ending a failed capture raises another, less informative one."""
    while error.__context__ is not None:
        error = error.__context__
    return error
