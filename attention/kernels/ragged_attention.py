r"""Attention of prompts in one call: runs of tokens of many requests in one row (`attention/plan.py`).

Token t of run r, at position q, sees its own key and the earlier keys of its request:

    visible(t, p) = begin_r <= p <= q   and q - p < window   and p >= min(first_key, q)
    out_t = sum_p e^{x_tp} v_p / (e^{sink} + sum_p e^{x_tp}),   x_tp = cap(scaling * q_t . k_p),  cap(x) = c tanh(x / c)

All keys are read by position from the pools, after the forward has stored its own. So one loop covers prefix and run,
and layers that share another layer's K/V need no special case. With `exact` a row has the bits of plain decoding at its
position, whatever its chunk and the other rows. Places of no run are 0. T and R decide the launch, and the host reads
nothing back, so it can be captured. `runs_attention` does the same in plain torch, run by run.
"""

from typing import NamedTuple

import torch

from specdec.attention.kernels.key_tiles import HeadShapes, fits
from specdec.attention.kernels.paged_attention import (
    choose_paged_tiles,
    choose_splits,
    fit_tiles,
    merge_splits,
    split_results,
)
from specdec.attention.kernels.ragged_attention_kernel import ragged_kernel
from specdec.attention.kernels.tree_attention import choose_key_split
from specdec.attention.plan import Pack, RunSlots
from specdec.gpu.triton_shim import device_limits, triton
from specdec.kvcache.fp8_pool import FieldPool, numbers_and_scales

FEW_TOKENS = 256
"""A forward of at most this many tokens usually reads a part of one long prompt while other requests decode."""

FILLING_ROWS = 64
"""From this many rows (of all heads) per multiprocessor on, tiles are chosen for throughput; with fewer rows, for the
time of one program."""


class RaggedTiles(NamedTuple):
    """How the work is cut, and the resources of a program. split_len: keys per chain if keys are added in order; 0: any
    order. value_parts: programs that divide the value channels of a tile among them."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    split_len: int = 0
    waves: float = 1.0
    value_parts: int = 1


TALL = 128
"""Rows of a tall tile, which 8 warps compute. With 64 rows and 8 warps, both warp groups of a program would compute the
same product of queries and keys."""

TALL_ROWS = 1024
"""Minimum packed rows (tokens times the query heads of a K/V head) for tall tiles, if keys may be added in any
order."""


def ragged_attention(
    query: torch.Tensor,
    pool_k: FieldPool,
    pool_v: FieldPool,
    pack: Pack,
    lines: RunSlots,
    *,
    scaling: float,
    exact: bool = False,
    window: int | None = None,
    first_key: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    shares: int = 1,
    tiles: RaggedTiles | None = None,
) -> torch.Tensor:
    """Attend -> [1, T, Hq, D] in the query's dtype.

    query: [1, Hq, T, D], any strides.      pool_k, pool_v: [slots, Hkv, D], any strides; the pack's K/V are in them.
    lines: slots in the group of the pools. window: a key is visible if it is fewer than this many positions back.
    first_key: keys before this position do not exist, except a query's own.
    softcap: c above.  sinks: [Hq] logits.  exact: add keys in the order of plain decoding.
    shares: number of ranks that divide the heads. With `exact`, keys are cut as for the heads of all ranks together.
    tiles: `choose_ragged` chooses them; only tests and tuning give them by hand.
    """
    one, num_heads, num_tokens, _ = query.shape
    num_runs, device = len(pack.rows), query.device
    assert one == 1 and pack.run_of.shape == (num_tokens,), f"{query.shape=} {pack.run_of.shape=}"
    assert lines.slots.stride(1) == 1 and lines.line.shape == pack.start.shape == (num_runs,), f"{lines.slots.shape=}"
    heads = HeadShapes.from_inputs(query, pool_k, pool_v, sinks)
    kv_heads, group, _, value_dim, block_d, block_v = heads
    if tiles is None:
        sizes = num_runs, num_tokens, group, kv_heads * shares, block_d, block_v, query.element_size()
        tiles = choose_ragged(*sizes, device, exact=exact)
    tokens = tiles.block_m // group
    num_tiles = -(-num_tokens // tokens) + num_runs  # the last tile of each run, and of padding, may be part full
    num_splits = 1
    if not tiles.split_len:
        num_keys = lines.slots.shape[1] if window is None else min(lines.slots.shape[1], window + tokens)
        # few tokens of a long prompt: programs of absent runs do nothing and should not count
        is_few = window is None and num_tokens <= FEW_TOKENS
        working = -(-num_tokens // tokens) if is_few else num_tiles
        num_splits = choose_splits(working * kv_heads * tiles.value_parts, num_keys, tiles.waves, device)
    out = torch.empty((1, num_tokens, num_heads, value_dim), dtype=query.dtype, device=device)
    part, lse = split_results(out, num_splits)
    (numbers_k, scales_k), (numbers_v, scales_v) = map(numbers_and_scales, (pool_k, pool_v))
    ragged_kernel[(num_tiles * tiles.value_parts, kv_heads, num_splits)](
        *(query, numbers_k, numbers_v, scales_k, scales_v),
        *(lines.slots, lines.line, lines.begin, pack.start, pack.cu_len, sinks),
        *(part, lse),
        *(scaling, softcap, window, first_key or None, num_runs, num_tokens, num_splits, lines.slots.stride(0)),
        *(*query.stride()[1:], *numbers_k.stride(), *numbers_v.stride()),
        **heads._replace(BLOCK_V=block_v // tiles.value_parts)._asdict(),
        VALUE_PARTS=tiles.value_parts,
        TOKENS=tokens,
        BLOCK_M=tiles.block_m,
        BLOCK_K=tiles.block_k,
        BLOCK_R=search_width(num_runs),
        SPLIT_LEN=tiles.split_len,
        GROWS=window is None and lines.begin is None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return merge_splits(part, lse, out)


def search_width(num_runs: int) -> int:
    """Width of the kernel's search over runs, padding included: 64, 256, 1,024 and so on, since each is compiled."""
    width = 64
    while width <= num_runs:
        width *= 4
    return width


def choose_ragged(
    num_runs: int,
    num_tokens: int,
    group: int,
    kv_heads: int,
    block_d: int,
    block_v: int,
    item_size: int,
    device: torch.device,
    *,
    exact: bool,
) -> RaggedTiles:
    """Choose the tiles that were fastest on an H200 (`python -m bench ordered-attention`). Keys in any order: those of
    drafts, or tall ones. Keys in order (`exact`): plain decoding's cut of keys, with more rows, which change no bit.

    In order, a row has two accumulators: of a chain, and of all chains before it. If registers do not hold both, the
    compiler moves the second to local memory while a chain is added, which is faster than smaller tiles."""
    multiprocessors, shared = device_limits(device)
    rows = num_tokens * group
    fewest: int = max(16, triton.next_power_of_2(group))  # a tile holds at least one token

    def tall(block_k: int, values: int) -> RaggedTiles | None:
        """Tall tiles with programs of `values` value channels, if runs fill them and they fit the device."""
        if item_size > 2 or rows < num_runs * TALL or group > TALL or block_v % values:
            return None
        for stages in (5, 3):
            if fits(TALL, block_k, stages, block_d, item_size, shared, block_v=values):
                return RaggedTiles(TALL, block_k, 8, stages, waves=1.1, value_parts=block_v // values)
        return None

    if not exact:
        if block_d > 256 and rows >= TALL_ROWS and (tiles := tall(32, 256)):
            return tiles
        any_order = fit_tiles(choose_paged_tiles(rows, block_d, item_size), block_d, item_size, shared)
        return RaggedTiles(max(any_order.block_m, fewest), *any_order[1:4], 0, any_order.waves)
    cut = choose_key_split(block_d, item_size, kv_heads)
    fills = rows * kv_heads >= FILLING_ROWS * multiprocessors
    large = tall(cut.block_k, min(block_v, 256)) if fills else None
    tiles = RaggedTiles(32, cut.block_k, 4, 3)
    if item_size > 2:
        tiles = RaggedTiles(16, cut.block_k, 4 if block_d <= 256 else 8, 2)
    elif rows > 256 and block_d <= 64:
        tiles = RaggedTiles(64, cut.block_k, 4, 2)
    elif rows > 256 and block_d <= 256:
        parts = 1 if fills or block_v % 128 else block_v // 128
        tiles = large or RaggedTiles(64, cut.block_k, 4, 3, value_parts=parts)
    elif rows > 256:
        tiles = large or tall(cut.block_k, 128) or RaggedTiles(32 if fills else 16, cut.block_k, 4, 3)
    block_m, stages, values = max(tiles.block_m, fewest), tiles.num_stages, block_v // tiles.value_parts
    while stages > 1 and not fits(block_m, cut.block_k, stages, block_d, item_size, shared, block_v=values):
        stages -= 1
    return tiles._replace(block_m=block_m, num_stages=stages, split_len=cut.split_len)
