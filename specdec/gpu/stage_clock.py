"""Times the stages of a round without slowing it: the device records when each stage begins.

    clock.start("draft"); ...; clock.mark("verify"); ...; stamps = clock.stop()        [3] int64, nanoseconds
    seconds_by_stage(("draft", "verify"), stamps on the host)                          {"draft": s, "verify": s}

The stamps are part of the round's result; each replay of a captured round writes new ones.
"""

import time
from collections.abc import Sequence

import torch

from specdec.gpu.mirrored_array import IntArray
from specdec.gpu.triton_shim import pdl_options, tl, trigger_next, triton, wait_for_previous

MAX_MARKS = 8
STAMP = "_stamp_kernel"
"""The name of a mark in profilers."""


@triton.jit(do_not_specialize=["number"])
def _stamp_kernel(
    p_stamps: tl.tensor,  # [MOST]
    p_out: tl.tensor,  # [number + 1], or None
    number: tl.tensor,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    wait_for_previous(PDL)
    now = tl.extra.cuda.globaltimer()
    tl.store(p_stamps + number, now)
    if p_out is not None:
        o_mark = tl.arange(0, MOST)
        b_stamp = tl.load(p_stamps + o_mark, mask=o_mark < number, other=0)
        tl.store(p_out + o_mark, tl.where(o_mark == number, now, b_stamp), mask=o_mark <= number)


class StageClock:
    """Times consecutive stages."""

    def __init__(self, device: torch.device) -> None:
        self._stamps = torch.zeros(MAX_MARKS, dtype=torch.int64, device=device)
        self._on_device = device.type == "cuda" and torch.version.cuda is not None and bool(triton)
        self._options = pdl_options(device)
        self._marked = 0

    def start(self, stage: str) -> None:
        """Begin with this stage, dropping any marks of an interrupted round."""
        self._marked = 0
        self.mark(stage)

    def stop(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """End the last stage -> [M + 1] start times of the M stages, and the end; on the device, in `out` if given."""
        if out is not None:
            assert out.shape == (self._marked + 1,) and out.is_contiguous(), f"{out.shape=} {self._marked=}"
        self.mark("end", out)
        return self._stamps[: self._marked] if out is None else out

    def mark(self, stage: str, out: torch.Tensor | None = None) -> None:
        """End the current stage and begin a new one. out [M + 1]: copy the times of all M stages so far to it."""
        number = self._marked
        self._marked += 1
        if self._on_device:
            _stamp_kernel[(1,)](self._stamps, out, number, MOST=MAX_MARKS, num_warps=1, **self._options)
        else:
            stamp_by_host(self._stamps, out, number)


def stamp_by_host(stamps: torch.Tensor, out: torch.Tensor | None, number: int) -> None:
    """`_stamp_kernel` with the host's clock. A CUDA graph would hold the time of its capture."""
    stamps[number].fill_(time.perf_counter_ns())
    if out is not None:
        out.copy_(stamps[: number + 1])


def seconds_by_stage(stages: Sequence[str], stamps: IntArray) -> dict[str, float]:
    """Seconds of each of M stages from M + 1 stamps; stages of the same name are summed."""
    seconds = dict.fromkeys(stages, 0.0)
    for stage, spent in zip(stages, (stamps[1:] - stamps[:-1]).tolist(), strict=True):
        seconds[stage] += spent / 1e9
    return seconds
