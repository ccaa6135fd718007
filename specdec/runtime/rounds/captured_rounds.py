"""Captured rounds: the device side of a round is recorded once per shape, then replayed without Python.

Everything that differs from round to round is data in tensors that are never replaced: seats, slots, lengths, tokens,
sampling parameters, the drafter's state. Each replay computes page tables, slot translations and write slots from them,
so nothing outlives a round. A captured round is bound to the view of its capture and to a live cache; a replay with any
other view is an error. `CaptureStore` says when a shape is captured. Its first round runs eagerly: it compiles kernels,
and libraries set up their lazy parts.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from specdec.errors import ConfigError
from specdec.gpu.captures import Capture, CaptureRule, CaptureStore, Program
from specdec.gpu.cuda_capture import CudaCapture
from specdec.runtime.rounds.decode_round import decode_programs
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.drafter_lag import MAX_LAG
from specdec.runtime.rounds.result import RoundShape
from specdec.runtime.rounds.round_shapes import is_rare

HostWorkBetween = Callable[[int, torch.Tensor], None]
"""Host work after each program of a round except the last: (number of the program, its result)."""

RARE_RUNS_BEFORE_CAPTURE = 4
"""Eager runs of a rare shape before it is captured: there are many such shapes, and a capture takes as long as a dozen
rounds."""

ROUNDS = CaptureRule("rounds", "rounds", "rounds run without CUDA graphs: %s")
RARE_ROUNDS = ROUNDS._replace(pool="rare rounds", patience=RARE_RUNS_BEFORE_CAPTURE)


class Rounds:
    """Runs the rounds of one engine. store: its captures."""

    def __init__(self, state: DeviceState, store: CaptureStore) -> None:
        self.state = state
        self._store = store

    def run(self, shape: RoundShape, between: HostWorkBetween | None = None) -> torch.Tensor:
        """Run a round of the seated rows. Returns its packed result, which the next captured round of this shape
        overwrites."""
        self.state.cache.allocator.require_unfrozen("a round")
        programs = decode_programs(self.state, shape)
        programs = self._store.programs_to_run(shape, programs, RARE_ROUNDS if is_rare(shape) else ROUNDS)
        return run_programs(programs, between)

    def read_lag(self, shape: RoundShape, max_tokens: int) -> None:
        """Let the drafter read the lag of the rows seated for a round of this shape, at most `max_tokens` of each, or
        MAX_LAG if it is captured."""
        program = partial(self.state.read_lag, shape, MAX_LAG if self._store.captures else max_tokens)
        run_programs(self._store.programs_to_run((shape.batch, shape.max_committed_len), [program], ROUNDS))


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
