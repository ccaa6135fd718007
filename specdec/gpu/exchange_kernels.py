r"""Ranks exchange numbers: each writes into its peers' memory and raises flags there, then waits for its own flags.

    push    out_r[i] = x[i]  on every rank r, its own too;  then flags_r[source, program] = target    release, system
    wait    until flags[source, program] has reached target                                           acquire, system
    tagged  word_r[i] = x[i], target in one store of 8 bytes;  wait until word[i] has the target, out[i] = its number
    pull    y[i] = x[i]      x in the memory of a peer

Push and wait are the halves of one kernel. Program (p, r) pushes the blocks p, p + programs, ... to rank r and raises
flag p there; then it waits for rank r's flag p only. In a capture, one launch does both. It cannot deadlock, whichever
rank begins first: a program pushes before it waits, and all programs of a launch become resident, since the kernel
before ends without them and the kernel after starts only once they all run. Outside captures, or if the ranks are one
device, each half is its own launch, and all ranks push before any rank waits.

Tagged exchanges send twice the bytes, but need neither a system-wide barrier nor a flag after the data, so they suit
few numbers. Each 8-byte store becomes visible as a whole, so the order of stores does not matter. A reader empties each
word: otherwise the old word would seem new when its target recurs 2^20 rounds later, in an exchange of another size. A
peer rewrites the word only in an exchange that cannot begin before the launch after this one.

A target is `round * STEPS + step`. The round is counted on the device, so captured launches can be replayed; the step
is part of the launch. Flags only grow, modulo 2^32, and are never reset: a peer is less than two rounds ahead, so a
value that seems further ahead is old. A wait gives up after MAX_POLLS polls: it writes 1 to `error`, on device and
host, and every later wait of this rank polls once. A launch may start while the kernel before runs, but does nothing
until that has ended (`triton_shim.py`).
"""

from specdec.gpu.triton_shim import tl, trigger_next, triton, wait_for_previous

PROGRAMS = 64
"""Upper bound on the programs, and so on the flags, of an exchange with one rank. With 128, flags cost more time than
copies save."""

NUMBERS = 1024
"""Numbers that one program copies at a time."""

TAGGED = 2**18
"""Tensors of more numbers than this are not exchanged tagged."""

TAGGED_NUMBERS = 256
"""Numbers per program (one warp) of a tagged exchange."""

STEPS = 4096
"""More than the exchanges of one round, so no target uses the last step and none equals EMPTY. Even, so that a round
which follows within a forward continues with the same half of the buffers."""

EMPTY = -1
"""A word that was read, or never written."""

MAX_POLLS = 6_000_000
"""Polls of one wait: a second or more in all."""

LOAD_ACQUIRE = tl.constexpr("ld.acquire.sys.global.u32 $0, [$1];")
"""Polls a flag without a barrier: a Triton atomic runs in one thread, which must share the result with the others."""


@triton.jit
def next_round_kernel(p_round: tl.tensor) -> None:
    tl.store(p_round, tl.load(p_round) + 1)


@triton.jit(do_not_specialize=["num_parts", "num_rows", "width", "offset", "step", "rank", "max_polls", "push", "wait"])
def exchange_kernel(
    p_x: tl.tensor,  # [S, T, H] float32, or None: flags alone
    p_owners: tl.tensor,  # [T, S] int32: those not negative are pushed; None: all
    p_outs: tl.tensor,  # [ranks] int64, addresses of float32 on each rank
    p_flags: tl.tensor,  # [ranks] int64, addresses of int32 [ranks, PROGRAMS] on each rank
    p_round: tl.tensor,  # [1] int32, its type is the flags'
    p_error: tl.tensor,  # [1] int32 on this device
    p_host_error: tl.tensor,  # [1] int32 in pinned memory of the host
    num_parts: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    offset: tl.tensor,  # in each output
    step: tl.tensor,
    rank: tl.tensor,  # the rank that launches
    max_polls: tl.tensor,
    push: tl.tensor,  # bool, like the next; no constexpr, so one loaded kernel serves both halves and captures
    wait: tl.tensor,
    ASM: tl.constexpr,  # may a poll use LOAD_ACQUIRE?
    STEPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """grid (`programs_of` all numbers, ranks to push to and to wait for)"""
    trigger_next(PDL)
    i_program, i_rank = tl.program_id(0), tl.program_id(1)
    p_there = tl.load(p_flags + i_rank).to(p_round.dtype) + rank * PROGRAMS + i_program
    p_here = tl.load(p_flags + rank).to(p_round.dtype) + i_rank * PROGRAMS + i_program
    if p_x is not None:
        p_out = tl.load(p_outs + i_rank).to(p_x.dtype) + offset.to(tl.int64)
    wait_for_previous(PDL)  # the round may have been counted by the kernel before
    target = tl.load(p_round) * STEPS + step
    polls = tl.where(tl.load(p_error) == 0, max_polls, 1)
    if push:
        if p_x is not None:
            blocks = tl.cdiv(width, BLOCK)
            for i_block in range(i_program, num_parts * num_rows * blocks, tl.num_programs(0)):
                i_part_row = i_block // blocks
                owned = True
                if p_owners is not None:
                    i_part, i_row = i_part_row // num_rows, i_part_row % num_rows
                    owned = tl.load(p_owners + i_row * num_parts + i_part) >= 0
                if owned:
                    o_h = i_block % blocks * BLOCK + tl.arange(0, BLOCK)
                    o = i_part_row.to(tl.int64) * width + o_h
                    tl.store(p_out + o, tl.load(p_x + o, mask=o_h < width, other=0.0), mask=o_h < width)
        if i_rank != rank:
            tl.debug_barrier()
            tl.atomic_xchg(p_there, target, sem="release", scope="sys")
    if wait & (i_rank != rank):
        old = _is_old(_flag(p_here, ASM), target, STEPS)
        while old & (polls > 0):
            old = _is_old(_flag(p_here, ASM), target, STEPS)
            polls -= 1
        if old:
            _leave_error(p_error, p_host_error)


@triton.jit
def _flag(p_flag: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """Reads a flag with acquire semantics: its source's earlier writes are visible, too."""
    if ASM:
        seen = tl.inline_asm_elementwise(
            asm=LOAD_ACQUIRE,
            constraints="=r,l",
            args=[p_flag],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        seen = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys")
    return seen


@triton.jit
def _is_old(flag: tl.tensor, target: tl.tensor, STEPS: tl.constexpr) -> tl.tensor:
    ahead = flag - target
    return (ahead < 0) | (ahead >= 2 * STEPS)


@triton.jit(do_not_specialize=["step", "rank", "max_polls", "push", "wait"])
def exchange_tagged_kernel(
    p_x: tl.tensor,  # [num] float32
    p_out: tl.tensor,  # [ranks, num] float32 of this rank
    p_words: tl.tensor,  # [ranks] int64, addresses of int64 on each rank
    p_round: tl.tensor,  # this and the next: see `exchange_kernel`
    p_error: tl.tensor,
    p_host_error: tl.tensor,
    num: tl.tensor,
    first: tl.tensor,  # word
    step: tl.tensor,
    rank: tl.tensor,
    max_polls: tl.tensor,
    push: tl.tensor,
    wait: tl.tensor,
    STEPS: tl.constexpr,
    EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """grid (blocks of x, ranks)"""
    trigger_next(PDL)
    i_rank = tl.program_id(1)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < num
    p_there = tl.multiple_of(tl.load(p_words + i_rank).to(tl.pointer_type(tl.int64)), 16) + first + rank * num + o
    p_here = tl.multiple_of(tl.load(p_words + rank).to(tl.pointer_type(tl.int64)), 16) + first + i_rank * num + o
    wait_for_previous(PDL)
    target = tl.load(p_round) * STEPS + step
    polls = tl.where(tl.load(p_error) == 0, max_polls, 1)
    if push:
        b_x = tl.load(p_x + o, mask=m, other=0.0)
        if i_rank == rank:
            tl.store(p_out + rank * num + o, b_x, mask=m)
        else:
            b_low = b_x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
            tl.store(p_there, (target.to(tl.int64) << 32) | b_low, mask=m, cache_modifier=".wt")
    if wait & (i_rank != rank):
        b_word = tl.load(p_here, mask=m, other=0, volatile=True)
        missing = _missing(b_word, m, target)
        while (missing > 0) & (polls > 0):
            b_word = tl.load(p_here, mask=m, other=0, volatile=True)
            missing = _missing(b_word, m, target)
            polls -= 1
        tl.store(p_out + i_rank * num + o, b_word.to(tl.int32).to(tl.float32, bitcast=True), mask=m)
        tl.store(p_here, tl.full([BLOCK], EMPTY, tl.int64), mask=m)
        if missing > 0:
            _leave_error(p_error, p_host_error)


@triton.jit
def _leave_error(p_error: tl.tensor, p_host_error: tl.tensor) -> None:
    tl.store(p_error, 1)
    tl.store(p_host_error, 1)


@triton.jit
def _missing(b_word: tl.tensor, m: tl.tensor, target: tl.tensor) -> tl.tensor:
    """Number of words whose target differs."""
    return tl.sum((m & ((b_word >> 32).to(tl.int32) != target)).to(tl.int32), 0)


@triton.jit(do_not_specialize=["num"])
def pull_kernel(p_x: tl.tensor, p_y: tl.tensor, num: tl.tensor, BLOCK: tl.constexpr) -> None:
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_y + o, tl.load(p_x + o, mask=o < num, other=0), mask=o < num)


def programs_of(num: int) -> int:
    """Number of programs that exchange `num` numbers with one rank, the same on both."""
    return max(1, min(PROGRAMS, -(-num // NUMBERS)))
