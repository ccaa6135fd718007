r"""One rank writes into the memory of its peers and raises flags there; a rank waits for the flags of its peers.

    push    out_r[i] = x[i]  on every rank r, its own too;  then flags_r[source, program] = target    release, system
    wait    until flags[source, program] has reached target for every program of every source         acquire, system
    pull    y[i] = x[i]      x in the memory of a peer

A target is `round * STEPS + step`: the round is counted on the device, so that captured launches may be replayed, and
the step is part of the launch. Flags only grow (differences are taken modulo 2^32), and are never reset. A wait ends
after MAX_POLLS looks: then it leaves its target in `error`, on the device and on the host, and every later wait of the
rank looks once. Both start while the kernel before runs, and do nothing until it has ended (`dependent_launch.py`).
"""

import torch

from specdec.gpu.dependent_launch import trigger_next, wait_for_previous
from specdec.gpu.triton_shim import tl, triton

PROGRAMS, NUMBERS = 64, 1024
"""Programs of a push to one rank at most, each with a flag of its own; and numbers that one copies at a time. Of 128
programs, the flags take longer than the copies save."""

STEPS = 4096
"""Pushes of one round at most."""

MAX_POLLS = 3_000_000
"""About 1 us each."""


@triton.jit
def next_round_kernel(p_round: tl.tensor) -> None:
    tl.store(p_round, tl.load(p_round) + 1)


@triton.jit(do_not_specialize=["num", "offset", "step", "source"])
def push_kernel(
    p_x: tl.tensor,  # [num], or None with num 0
    p_outs: tl.tensor,  # [ranks] int64, addresses of float32 on each rank
    p_flags: tl.tensor,  # [ranks] int64, addresses of int32 [ranks, PROGRAMS] on each rank
    p_round: tl.tensor,  # [1] int32, its type is the flags'
    num: tl.tensor,
    offset: tl.tensor,  # in each output
    step: tl.tensor,
    source: tl.tensor,  # the rank that pushes
    STEPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """grid (`programs_of` num, ranks)"""
    trigger_next(PDL)
    i_program, i_rank = tl.program_id(0), tl.program_id(1)
    programs = tl.num_programs(0)
    wait_for_previous(PDL)
    if p_x is not None:
        p_out = tl.load(p_outs + i_rank).to(p_x.dtype) + offset.to(tl.int64)
        for i_block in range(i_program, tl.cdiv(num, BLOCK), programs):
            o = i_block * BLOCK + tl.arange(0, BLOCK)
            tl.store(p_out + o, tl.load(p_x + o, mask=o < num, other=0.0), mask=o < num)
    tl.debug_barrier()
    p_flag = tl.load(p_flags + i_rank).to(p_round.dtype) + source * PROGRAMS + i_program
    tl.atomic_xchg(p_flag, tl.load(p_round) * STEPS + step, sem="release", scope="sys")


@triton.jit(do_not_specialize=["num_rows", "offset", "step", "source"])
def push_owned_kernel(
    p_x: tl.tensor,  # [S, T, H] float32
    p_owners: tl.tensor,  # [T, S] int32
    p_outs: tl.tensor,  # and so on: `push_kernel`
    p_flags: tl.tensor,
    p_round: tl.tensor,
    num_parts: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    offset: tl.tensor,
    step: tl.tensor,
    source: tl.tensor,
    STEPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """grid (`programs_of` all numbers, ranks): the parts that this rank owns, to where they are in the whole."""
    trigger_next(PDL)
    i_program, i_rank = tl.program_id(0), tl.program_id(1)
    programs = tl.num_programs(0)
    p_out = tl.load(p_outs + i_rank).to(p_x.dtype) + offset.to(tl.int64)
    blocks = tl.cdiv(width, BLOCK)
    wait_for_previous(PDL)
    for i_block in range(i_program, num_parts * num_rows * blocks, programs):
        i_part_row = i_block // blocks
        i_part, i_row = i_part_row // num_rows, i_part_row % num_rows
        if tl.load(p_owners + i_row * num_parts + i_part) >= 0:
            o_h = i_block % blocks * BLOCK + tl.arange(0, BLOCK)
            o = i_part_row.to(tl.int64) * width + o_h
            tl.store(p_out + o, tl.load(p_x + o, mask=o_h < width, other=0.0), mask=o_h < width)
    tl.debug_barrier()
    p_flag = tl.load(p_flags + i_rank).to(p_round.dtype) + source * PROGRAMS + i_program
    tl.atomic_xchg(p_flag, tl.load(p_round) * STEPS + step, sem="release", scope="sys")


@triton.jit(do_not_specialize=["step", "sources", "programs", "max_polls"])
def wait_kernel(
    p_flags: tl.tensor,  # [ranks, PROGRAMS] int32 of this rank
    p_round: tl.tensor,
    p_error: tl.tensor,  # [1] int32 on this device
    p_host_error: tl.tensor,  # [1] int32 in pinned memory of the host
    step: tl.tensor,
    sources: tl.tensor,  # ranks whose flags are waited for
    programs: tl.tensor,  # flags of each
    max_polls: tl.tensor,
    STEPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least `sources` times PROGRAMS
    PDL: tl.constexpr,
) -> None:
    """One program."""
    trigger_next(PDL)
    o = tl.arange(0, BLOCK)
    m = (o % PROGRAMS < programs) & (o // PROGRAMS < sources)
    wait_for_previous(PDL)  # the round may have been counted by the kernel before
    target = tl.load(p_round) * STEPS + step
    polls = tl.where(tl.load(p_error) == 0, max_polls, 1)
    lag = _least(p_flags, o, m, target)
    while (lag < 0) & (polls > 0):
        lag = _least(p_flags, o, m, target)
        polls -= 1
    tl.debug_barrier()
    if lag < 0:
        tl.store(p_error, 1)
        tl.store(p_host_error, 1)


@triton.jit
def _least(p_flags: tl.tensor, o: tl.tensor, m: tl.tensor, target: tl.tensor) -> tl.tensor:
    """How far the last flag is before the target; 0 or more: all have reached it."""
    b_seen = tl.atomic_add(p_flags + o, tl.zeros_like(o), mask=m, sem="acquire", scope="sys")
    return tl.min(tl.where(m, b_seen - target, 0), 0)


@triton.jit(do_not_specialize=["num"])
def pull_kernel(p_x: tl.tensor, p_y: tl.tensor, num: tl.tensor, BLOCK: tl.constexpr) -> None:
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_y + o, tl.load(p_x + o, mask=o < num, other=0), mask=o < num)


def programs_of(num: int) -> int:
    """How many programs push `num` numbers to one rank; the rank that waits for them computes the same count."""
    return max(1, min(PROGRAMS, -(-num // NUMBERS)))


def words(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as int32 where its bytes allow it, else as bytes: [num]."""
    flat = x.reshape(-1).view(torch.uint8)
    return flat.view(torch.int32) if flat.numel() % 4 == 0 and x.data_ptr() % 4 == 0 else flat
