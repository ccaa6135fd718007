"""Prompt chunks whose forward is in progress: the parts that a step runs next to its round, and when it is dropped.

    step        round | parts 0, 1    round | part 2    round | part 3, first token
    committed                                                     all its tokens, at once

Nothing of it is committed before the last part is launched. It is dropped, and its chunks read again, when one of its
requests loses its row, whose slots may be another's then, or when weights have moved.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.prompt_gap import Division, PromptGap, PromptLoad
from specdec.runtime.request import Request
from specdec.runtime.rounds.captured_prompts import SIZES_IN_PARTS
from specdec.runtime.rounds.prompt_parts import LAYERS_A_PART, PromptParts, part_ends, part_shares
from specdec.runtime.rounds.round import Round


@dataclass(slots=True)
class PromptReading:
    """The next `chunk_len` [B] tokens of these requests, after `done` [B]. earlier: nanoseconds of the device that
    parts before this step took; None: there were none. seconds: of the host."""

    requests: Sequence[Request]
    chunk_len: IntArray
    done: IntArray
    parts: PromptParts
    row_epochs: list[int]
    begun: int = 0  # parts that have run
    earlier: torch.Tensor | None = None
    seconds: float = 0.0

    @property
    def load(self) -> PromptLoad:
        return PromptLoad.from_runs(self.done, self.chunk_len)

    @property
    def is_through(self) -> bool:
        return self.begun == len(self.parts.programs)

    def is_valid(self, generation: int) -> bool:
        """May it go on? generation: of the weights."""
        epochs = [request.row_epoch for request in self.requests]
        return epochs == self.row_epochs and generation == self.parts.generation

    def add_device_time(self, stamps: torch.Tensor) -> None:
        """Add what the parts of this step take of the device. stamps [2]: when they begin and end, on the device."""
        spent = stamps[1] - stamps[0]
        self.earlier = spent if self.earlier is None else self.earlier + spent

    @torch.inference_mode()
    def advance(self, gap: PromptGap, budget: float | None, *, waits: bool) -> None:
        """Run the next part, and more while they are expected to end within `budget` seconds; None: all. waits: the
        host has waited for each when it returns, so that its clock tells what they took."""
        begin, spent = time.perf_counter(), 0.0
        while not self.is_through:
            share = self.parts.shares[self.begun]
            expected = 0.0 if budget is None else gap.part_seconds(self.load, share)
            if budget is not None and spent > 0.0 and spent + expected > budget:
                break
            self.parts.programs[self.begun]()
            self.begun += 1
            spent = time.perf_counter() - begin if waits else spent + expected
        self.seconds += time.perf_counter() - begin


def division_of(round: Round, *, captured: bool) -> Division | None:
    """How this round's target divides forwards over prompts, if it does. A GPU takes as long for one token as for 64,
    and is done with 256 in two or three steps; to a CPU every token is arithmetic."""
    if not round.target.can_pause or not (captured or round.device.type == "cpu"):
        return None
    states = round.final_states(scored=False, ends=False)
    ends = part_ends(round.target, round.aux_layers, states, LAYERS_A_PART if captured else 1)
    shares = part_shares(round.target, round.aux_layers, states, ends)
    return Division(shares, SIZES_IN_PARTS[-1], SIZES_IN_PARTS[0]) if captured else Division(shares, 32, 1)
