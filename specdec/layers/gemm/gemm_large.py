r"""The product of many rows of x in order, with the bits of `gemm_small`. It is bound by arithmetic.

    y[m, n] = ((0 + p_0) + p_1) + ... + bias[n],     p_s = sum over the s-th range of K of x[m, k] W[n, k]
    gated:  y[m, n] = act(g) u

x and W are loaded by tensor descriptors (TMA: Hopper and later), which need no address registers and so allow a larger
tile. Rows of x are the M operand of the tensor core here, and for a gated weight a program has two accumulators (gate
and up). Neither changes a bit: the instruction adds 16 columns at a time, in order. Neighbouring programs share GROUP
tiles of x, so that both operands stay in the L2 cache.
"""

import torch

from specdec.gpu.triton_shim import device_limits, pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.layers.gemm.gemm_medium import descriptor
from specdec.layers.gemm.product import SplitK, Tiles, activate, require_operands

GROUP = 8
"""Row tiles that consecutive programs take for the same weight tile."""

BLOCK_K = 64
"""Columns of a tile."""

LARGE = Tiles(256, 128, BLOCK_K, 8, 4, 256)
"""256 rows of the weight and 128 of x: the fastest if its programs fill all waves."""

SMALL = Tiles(128, 128, BLOCK_K, 8, 4, 128)
"""Half as many rows of the weight, so that fewer multiprocessors idle in the last wave."""

LARGE_TIME = 7 / 4
"""Time of a LARGE tile, in SMALL ones."""


@triton.jit(do_not_specialize=["num_rows"])
def gemm_large_kernel(
    d_x: tl.tensor,  # descriptor of [M, K], tiles [BM, BK]
    d_w: tl.tensor,  # descriptor of [N, K], tiles [BN, BK], or [BN / 2, BK] for a gated weight
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [M, N] or, gated, [M, N / 2]
    num_rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    split_len: tl.tensor,
    WHOLE: tl.constexpr,  # there is one range
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """grid (row tiles times weight tiles)"""
    width = N if ACTIVATION is None else N // 2
    COLUMNS: tl.constexpr = BLOCK_N if ACTIVATION is None else BLOCK_N // 2
    row_tiles, weight_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(width, COLUMNS)
    i_group, i_in_group = tl.program_id(0) // (GROUP * weight_tiles), tl.program_id(0) % (GROUP * weight_tiles)
    height = tl.minimum(row_tiles - i_group * GROUP, GROUP)
    first_m = (i_group * GROUP + i_in_group % height) * BLOCK_M
    first_n = i_in_group // height * COLUMNS
    wait_for_previous(PDL)
    trigger_next(PDL)

    b_out = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    if ACTIVATION is not None:
        b_gate = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        b_up = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        for i_k in range(0, K, BLOCK_K):
            b_x = d_x.load([first_m, i_k])
            b_gate = tl.dot(b_x, d_w.load([first_n, i_k]).T, b_gate)
            b_up = tl.dot(b_x, d_w.load([width + first_n, i_k]).T, b_up)
        b_out = activate(b_gate, ACTIVATION) * b_up
    elif WHOLE:
        for i_k in range(0, K, BLOCK_K):
            b_out = tl.dot(d_x.load([first_m, i_k]), d_w.load([first_n, i_k]).T, b_out)
    else:
        for begin in range(0, K, split_len):
            b_part = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
            for i_k in range(begin, tl.minimum(begin + split_len, K), BLOCK_K):
                b_part = tl.dot(d_x.load([first_m, i_k]), d_w.load([first_n, i_k]).T, b_part)
            b_out += b_part

    o_m, o_n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, COLUMNS)
    m_out = (o_m < num_rows)[:, None] & (o_n < width)[None, :]
    if p_bias is not None:
        b_out += tl.load(p_bias + o_n, mask=o_n < width, other=0.0).to(tl.float32)[None, :]
    p_out += o_m.to(tl.int64)[:, None] * width + o_n[None, :]
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_out)


def choose_large_tiles(num_rows: int, n: int, split_k: SplitK, device: torch.device, *, gated: bool) -> Tiles:
    """The fastest tiles that were timed on an H200, for 2-byte numbers."""
    multiprocessors, shared = device_limits(device)

    def waves(tiles: Tiles) -> int:
        programs = triton.cdiv(num_rows, tiles.block_m) * triton.cdiv(n, tiles.block_n)
        return int(triton.cdiv(programs, multiprocessors))

    tiles = LARGE
    if not gated and split_k.splits > 1 and waves(SMALL) <= waves(LARGE) * LARGE_TIME:
        tiles = SMALL  # in the last wave of large tiles, many programs would be idle
    return tiles.fit(shared)


def gemm_large(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, split_k: SplitK
) -> torch.Tensor:
    """Multiply: x [M, K], weight [N, K], both as descriptors need them; bias [N] or None -> [M, N], or gated [M, N /
    2]."""
    require_operands(x, weight, bias)
    (num_rows, k), n, gated = x.shape, len(weight), activation is not None
    assert split_k.splits == 1 or split_k.split_len % BLOCK_K == 0, f"{split_k=}"  # each tile is within one range
    width = n // 2 if gated else n
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    tiles = choose_large_tiles(num_rows, n, split_k, x.device, gated=gated)
    columns = tiles.block_n // 2 if gated else tiles.block_n
    gemm_large_kernel[(triton.cdiv(num_rows, tiles.block_m) * triton.cdiv(width, columns),)](
        *(descriptor(x, tiles.block_m, BLOCK_K), descriptor(weight, columns, BLOCK_K)),
        *(bias, out, num_rows, n, k, split_k.split_len),
        WHOLE=split_k.splits == 1,
        ACTIVATION=activation,
        GROUP=GROUP,
        **tiles.options,
        **pdl_options(x.device),
    )
    return out
