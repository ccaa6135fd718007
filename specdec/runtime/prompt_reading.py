"""A forward over prompt chunks that is divided among steps: each step runs a round and some layers of the forward.

    step        round | parts 0, 1    round | part 2    round | part 3, first token
    committed                                                     all its tokens, at once

No token of the forward is committed before its last part is launched. If one of its requests loses its row (its slots
may then belong to another request), or if weights have moved, the forward is dropped and its chunks are read again.
"""

import time
from dataclasses import dataclass

import torch

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.prompt_gap import Division, PromptGap, PromptLoad
from specdec.runtime.request_batch import RequestBatch
from specdec.runtime.rounds.captured_prompts import SIZES_IN_PARTS
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.prompt_parts import LAYERS_A_PART, PromptParts, divide


@dataclass(slots=True)
class PromptReading:
    """The forward over the next `chunk_len` [B] tokens of a batch of requests, after `done` [B] earlier ones.

    earlier: device nanoseconds of the parts run in earlier steps; None: there were none. seconds: host time so far.
    """

    batch: RequestBatch
    chunk_len: IntArray
    done: IntArray
    parts: PromptParts
    num_parts_run: int = 0  # parts that have run
    earlier: torch.Tensor | None = None
    seconds: float = 0.0

    @property
    def load(self) -> PromptLoad:
        return PromptLoad.from_runs(self.done, self.chunk_len)

    @property
    def is_complete(self) -> bool:
        return self.num_parts_run == len(self.parts.programs)

    @torch.inference_mode()
    def advance(self, gap: PromptGap, budget: float | None, *, waits: bool) -> None:
        """Run the next part, and further ones that are expected to end within `budget` seconds (None: all of them).

        waits: each call returns when its part has run, so the host's clock measures it.
        """
        begin, spent = time.perf_counter(), 0.0
        while not self.is_complete:
            share = self.parts.shares[self.num_parts_run]
            expected = 0.0 if budget is None else gap.part_seconds(self.load, share)
            if budget is not None and spent > 0.0 and spent + expected > budget:
                break
            self.parts.programs[self.num_parts_run]()
            self.num_parts_run += 1
            spent = time.perf_counter() - begin if waits else spent + expected
        self.seconds += time.perf_counter() - begin


def division_of(state: DeviceState, *, captured: bool) -> Division | None:
    """How forwards over prompts are divided among steps; None: they are not.

    A GPU takes as long for one token as for 64, and reads 256 in two or three steps; on a CPU each token takes time.
    """
    if not state.target.can_pause or not (captured or state.device.type == "cpu"):
        return None
    states = state.states_needed(scored=False, ends_prompt=False)
    _, shares = divide(state.target, state.aux_layers, states, LAYERS_A_PART if captured else 1)
    return Division(shares, SIZES_IN_PARTS[-1], SIZES_IN_PARTS[0]) if captured else Division(shares, 32, 1)
