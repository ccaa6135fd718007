"""Captured rounds: the device side of a round is recorded once per shape, then replayed without Python.

    1st round of a shape   runs eagerly: compiles kernels, and lets libraries set up what they make lazily
    2nd                    is captured, then replayed; a rare shape first has RARE_RUNS_BEFORE_CAPTURE eager runs in all
    later                  replayed

Everything that differs from round to round is data in tensors that are never replaced: seats, slots, lengths, tokens,
sampling parameters, the drafter's state. Each replay computes page tables, slot translations and write slots from them,
so nothing outlives a round. A captured round is bound to the view of its capture and to a live cache; a replay with any
other view is an error. If weights have moved, all rounds are captured again.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch

from specdec.errors import ConfigError, FrozenKVError, first_line
from specdec.gpu.captures import (
    SPARE_POOL,
    Capture,
    CapturedProgram,
    CaptureStore,
    OverBudget,
    Program,
    Replay,
    is_out_of_memory,
)
from specdec.gpu.cuda_capture import CudaCapture
from specdec.runtime.rounds.decode_round import decode_programs
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.drafter_lag import MAX_LAG
from specdec.runtime.rounds.result import RoundShape
from specdec.runtime.rounds.round_shapes import is_rare

logger = logging.getLogger(__name__)

HostWorkBetween = Callable[[int, torch.Tensor], None]
"""Host work after each program of a round except the last: (number of the program, its result)."""

RARE_RUNS_BEFORE_CAPTURE = 4
"""Eager runs of a rare shape before it is captured: there are many such shapes, and a capture takes as long as a dozen
rounds."""

MAX_BACKOFF_RUNS = 1024
"""Upper bound on the runs of a shape between two attempts to capture it, after evictions or for lack of memory."""


class CaptureRule(NamedTuple):
    """How a shape is captured. pool: name of its memory pool. warning: log text if that fails, with %s for the error;
    each text is logged once. patience: eager runs before its capture, at least 1."""

    pool: str
    warning: str
    patience: int = 1


ROUNDS = CaptureRule("rounds", "rounds run without CUDA graphs: %s")
RARE_ROUNDS = CaptureRule("rare rounds", ROUNDS.warning, RARE_RUNS_BEFORE_CAPTURE)


class CaptureSet:
    """An engine's captured programs of one kind, by shape.

    If a capture fails, the program runs eagerly, is counted (`CaptureStore.stats`), and its capture is tried again
    later. strict: a failed capture is a ConfigError instead, unless memory or budget is too small for a long prompt.
    """

    kind: ClassVar[str]

    def __init__(self, state: DeviceState, store: CaptureStore, *, strict: bool) -> None:
        self.state = state
        self.store = store
        store.join(self)
        self._strict = strict
        self._captured: dict[Hashable, CapturedProgram] = {}
        self._waits: dict[Hashable, int] = {}  # shapes that ran and are not captured: runs until a capture is tried
        self._setbacks: Counter[Hashable] = Counter()  # evictions and failed captures since the weights moved
        self._generation = state.weights.generation()
        self._warned: set[str] = set()

    @property
    def shared_bytes(self) -> int:
        """Bytes of the tensors that receive the results of captured programs."""
        return 0

    def programs_to_run(self, shape: Hashable, programs: Sequence[Program], rule: CaptureRule) -> Sequence[Program]:
        """Replays of the captured programs of this shape, or `programs`, to be run eagerly."""
        if self._generation != (now := self.state.weights.generation()):
            self._generation = now
            self.clear()
        self.capture_next(shape, programs, rule)
        captured = self._captured.get(shape)
        if captured is None:
            self._waits[shape] = max(0, self._waits.get(shape, rule.patience) - 1)
            self.store.uncaptured[self.kind] += 1
            return programs
        if captured.view_key != self.state.view.key:
            raise FrozenKVError("a captured round is replayed under another view than its own")
        self.state.cache.allocator.require_unfrozen("a captured round")
        self.store.touch(self, shape)
        return [partial(_replay, *each) for each in captured.replays]

    def capture_next(self, shape: Hashable, programs: Sequence[Program], rule: CaptureRule) -> None:
        """Capture the programs of a shape if it has run and need not wait, so that its next run is a replay."""
        if self._waits.get(shape) != 0:
            return
        try:
            self._captured[shape] = self.store.make(self, shape, rule.pool, self.state.view.key, programs)
            del self._waits[shape]
        except Exception as error:  # of any kind: a model may do anything that a graph cannot record
            no_memory, reason = is_out_of_memory(error), first_line(_root(error))
            if self._strict and not (rule.pool == SPARE_POOL and (no_memory or isinstance(error, OverBudget))):
                raise ConfigError(
                    f"{self.kind} cannot be captured in a CUDA graph ({reason}); use cuda_graphs='auto' or False"
                ) from error
            self.store.refused += 1
            self._back_off(shape, MAX_BACKOFF_RUNS if no_memory else None)
            level = logging.DEBUG if rule.warning in self._warned else logging.WARNING
            logger.log(level, rule.warning, reason)
            self._warned.add(rule.warning)

    def clear(self) -> None:
        """Drop all captures and their memory."""
        for memory in (self._captured, self._waits, self._setbacks):
            memory.clear()
        self.store.discard(self)

    def forget(self, shape: Hashable) -> None:
        """Drop the capture of this shape, which is evicted."""
        self._captured.pop(shape, None)
        self._back_off(shape, MAX_BACKOFF_RUNS)

    def _back_off(self, shape: Hashable, max_runs: int | None) -> None:
        """Try the next capture of this shape after some runs. Their number doubles each time."""
        self._setbacks[shape] += 1
        runs = 1 << self._setbacks[shape] - 1
        self._waits[shape] = runs if max_runs is None else min(runs, max_runs)


def _replay(replay: Replay, out: torch.Tensor) -> torch.Tensor:
    replay()
    return out


def _root(error: BaseException) -> BaseException:
    """The first error of a chain: ending a failed capture raises another, less informative one."""
    while error.__context__ is not None:
        error = error.__context__
    return error


class CapturedRounds(CaptureSet):
    """The captured rounds of one engine."""

    kind = "rounds"

    def run(self, shape: RoundShape, between: HostWorkBetween | None = None) -> torch.Tensor:
        """Run a round of the seated rows. Returns its packed result, which the next round of this shape overwrites."""
        rule = RARE_ROUNDS if is_rare(shape) else ROUNDS
        return run_programs(self.programs_to_run(shape, decode_programs(self.state, shape), rule), between)

    def read_lag(self, shape: RoundShape) -> None:
        """Let the drafter read the lag of the rows seated for a round of this shape."""
        program = partial(self.state.read_lag, shape, MAX_LAG)
        run_programs(self.programs_to_run((shape.batch, shape.max_committed_len), [program], ROUNDS))


def run_programs(programs: Sequence[Program], between: HostWorkBetween | None = None) -> torch.Tensor:
    """Run these programs. Returns the result of the last."""
    for program_index, program in enumerate(programs):
        out = program()
        if between is not None and program_index + 1 < len(programs):
            between(program_index, out)
    return out


def capture_for(devices: Sequence[torch.device], setting: str | bool) -> Capture | None:
    """The capture for `EngineConfig.cuda_graphs` on these devices, the target's first; None: rounds run eagerly. Raises
    ConfigError if the setting is True and there is no GPU."""
    if devices[0].type != "cuda":
        if setting is True:
            raise ConfigError(
                f"cuda_graphs=True needs a CUDA device, and this model is on {devices[0]}; use 'auto' or False"
            )
        return None
    return None if setting is False else CudaCapture(*devices)
