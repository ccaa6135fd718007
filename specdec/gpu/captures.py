"""An engine's captures of rounds and prompts, kept within a budget of bytes by LRU eviction.

    a shape   met  ->  ran once, or 4 times if rare  ->  captured  ->  evicted
                                                     ->  refused: out of memory, over the budget, or an error

An evicted or refused shape is captured again after it has run uncaptured some times, twice as many each time: so a
budget that is too small does not make every round capture.

Captures of one pool share its memory, since they never run at the same time: a pool is as large as its largest capture
needs, and is freed with its last capture. If the device is out of memory, all other captures are evicted and the new
one is tried once more. Captures of SPARE_POOL are evicted first, and no other capture is evicted for them. Invariant:
`stats()` is always correct; it counts everything that runs uncaptured.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import torch

from specdec.errors import SpecDecError
from specdec.gpu.memory import all_bytes, free_bytes

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

FREE_SHARE = 0.5
"""Upper bound on the default budget, as a share of the memory that is free after the K/V pools are allocated."""


class CaptureStats(NamedTuple):
    """Captures of an engine, and runs without a capture.

    captured: rounds and prompt forwards that can be replayed now. made, evicted, refused: captures made so far, evicted
    for others, and failed for any reason. bytes: memory of all captures and their results, on the device that holds
    most. budget_bytes: upper bound on `bytes`; None: nothing is captured. uncaptured_rounds, uncaptured_prompts: rounds
    and prompt forwards launched kernel by kernel, such as the first of a shape.
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
    """Default of `EngineConfig.max_capture_bytes` on these devices: what the fullest device can give. None: nothing is
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
    view_key: tuple[object, ...]
    pool: str


class CaptureOwner(Protocol):
    """An object that makes and replays captures."""

    def forget(self, shape: Hashable) -> None:
        """Drop the capture of this shape."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of the tensors that hold its captures' results."""


CaptureKey = tuple[CaptureOwner, Hashable]
"""A capture's owner and its shape."""


class CaptureStore:
    """All captures of one engine, of all owners.

    memory: sizes are known only if it is a `CaptureMemory`. budget_bytes: None: no bound.
    """

    def __init__(self, capture: Capture, memory: object, budget_bytes: int | None) -> None:
        self._capture = capture
        self._memory = memory if isinstance(memory, CaptureMemory) else CaptureMemory()
        self._budget = budget_bytes
        self._owners: list[CaptureOwner] = []
        self._kept: dict[CaptureKey, CapturedProgram] = {}  # least recently used first
        self._made = self._evicted = 0
        self._bytes = 0
        self.refused = 0
        self.uncaptured = {"rounds": 0, "prompts": 0}

    def join(self, owner: CaptureOwner) -> None:
        """Register an owner, whose `shared_bytes` count."""
        self._owners.append(owner)

    def stats(self) -> CaptureStats:
        counts = len(self._kept), self._made, self._evicted, self.refused
        return CaptureStats(*counts, self._bytes, self._budget, *self.uncaptured.values())

    def touch(self, owner: CaptureOwner, shape: Hashable) -> None:
        """Mark this capture as the most recently used."""
        self._kept[owner, shape] = self._kept.pop((owner, shape))

    def make(
        self, owner: CaptureOwner, shape: Hashable, pool: str, view_key: tuple[object, ...], programs: Sequence[Program]
    ) -> CapturedProgram:
        """Capture these programs; evict the least recently used captures until they fit the budget.

        Raises what a program raises. Out of memory is raised only after all other captures were evicted and the capture
        was tried again (at once for SPARE_POOL). Raises OverBudget when the capture does not fit the budget alone (for
        SPARE_POOL: next to those of other pools), recorded twice.
        """
        key, program = (owner, shape), CapturedProgram(programs, [], view_key, pool)
        self._record(key, program)
        while self._over() and (others := self._evictable(pool)):
            self._evict(others[0])
        if self._over():  # in a pool that has grown for others, perhaps
            self._drop(key)
            self._record(key, program)
        if self._over():
            taken = self._bytes
            self._drop(key)
            raise OverBudget(
                f"a capture takes {taken / 1e6:,.1f} MB, and max_capture_bytes is {self._budget:,}; raise that, or "
                "lower max_batch_size, max_prefill_tokens or the number of drafted nodes"
            )
        self._made += 1
        return self._kept[key]

    def discard(self, owner: CaptureOwner) -> None:
        """Drop all captures of this owner and their memory, since the tensors that they read have moved."""
        for key in list(self._kept):
            if key[0] is owner:
                self._drop(key)

    def _record(self, key: CaptureKey, new: CapturedProgram) -> None:
        self._memory.pool = new.pool
        replays = []
        try:
            replays = [self._capture(program) for program in new.programs]
        except Exception as error:
            if not is_out_of_memory(error) or new.pool == SPARE_POOL:
                raise
        if not replays:  # outside the handler, since the error's frames hold memory
            self._release_all()
            replays = [self._capture(program) for program in new.programs]
        self._kept[key] = new._replace(replays=replays)
        self._measure()

    def _evictable(self, pool: str) -> list[CaptureKey]:
        """Captures that may be evicted for a new one of this pool, the first to evict first."""
        *others, _ = self._kept
        spare = [key for key in others if self._kept[key].pool == SPARE_POOL]
        return spare if spare or pool == SPARE_POOL else others

    def _over(self) -> bool:
        return self._budget is not None and self._bytes > self._budget

    def _measure(self) -> None:
        self._bytes = self._memory.held_bytes() + sum(owner.shared_bytes for owner in self._owners)

    def _evict(self, key: CaptureKey) -> None:
        self._evicted += 1
        owner, shape = key
        owner.forget(shape)
        self._drop(key)

    def _release_all(self) -> None:
        for key in list(self._kept):
            self._evict(key)
        self._memory.wait()
        for pool in POOLS:  # including failed ones
            self._memory.close(pool)
        self._measure()

    def _drop(self, key: CaptureKey) -> None:
        self._memory.wait()
        pool = self._kept.pop(key).pool
        if all(kept.pool != pool for kept in self._kept.values()):
            self._memory.close(pool)
        self._measure()
