"""The next product's weight, on its way to the L2 cache while norms, attention and gates run. An experiment, off.

A product learns which weight follows its own from the order of the launches before, and asks for its first
`AHEAD.most` bytes:

    tail     every program of a product, after its sums, asks for a share
    stream   a kernel of a second stream does, as soon as the product has ended; the head waits for that stream

Nothing that is computed depends on it.
"""

import torch

from specdec.gpu.triton_shim import tl, triton
from specdec.layers.packed.packed_weight import PackedWeight, Weight

HEAD_ROWS = 100_000
"""Rows of a weight from which on it is the last of a step."""

PROGRAMS = 32
"""Programs of the kernel that only asks."""

PREFETCH: tl.constexpr = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, thread;
}""")


@triton.jit
def prefetch_share(p_next: tl.tensor, share: tl.tensor) -> None:
    """Ask for this program's `share` bytes, a multiple of 16."""
    i = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    address = p_next.to(tl.int64) + i.to(tl.int64) * share
    tl.inline_asm_elementwise(
        asm=PREFETCH, constraints="=r,l,r", args=[address, share], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["share"])
def prefetch_kernel(p_next: tl.tensor, share: tl.tensor) -> None:
    prefetch_share(p_next, share)


class Ahead:
    """Which weight follows which. most: bytes of it that are asked for, 0: none. streams: of the second form."""

    def __init__(self) -> None:
        self.most = 0
        self.streams: list[torch.cuda.Stream] = []
        self._next: dict[int, torch.Tensor] = {}
        self._last = 0

    def after(self, weight: Weight, programs: int) -> tuple[torch.Tensor | None, int]:
        """The weight after this one, as far as is known, and the bytes for each of these programs to ask for."""
        words = weight.words if isinstance(weight, PackedWeight) else weight
        self._next[self._last] = words
        self._last = words.data_ptr()
        following = self._next.get(self._last)
        if not self.most or following is None or len(words) >= HEAD_ROWS:
            return None, 0
        share = min(self.most, following.nbytes) // programs // 16 * 16
        return (following, share) if share else (None, 0)

    def on_second_stream(self, weight: Weight) -> None:
        """Before the launch of this product, when that of the one before has been recorded."""
        main, [second] = torch.cuda.current_stream(), self.streams
        if len(weight) >= HEAD_ROWS:
            main.wait_stream(second)

    def launch(self, following: torch.Tensor, share: int) -> None:
        """After the launch of a product."""
        [second] = self.streams
        second.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(second):
            prefetch_kernel[(PROGRAMS,)](following, share, num_warps=1)


AHEAD = Ahead()
