r"""Attention in which every row's bits depend on its own path only: for decoding, chains, trees, a drafter's chunks and
frozen drafters.

Query n of request b is at position q = S + depth, S = committed_len[b], and sees the keys of its own path:

    visible(n, p) = start_b <= p <= q   and q - p < window     p < S: committed; p >= S: the ancestor at depth p - S
                  = start_b <= p < S    and q - p < window     if the queries have no keys (a frozen drafter)
    and in both     p >= min(first_key, q)                     earlier keys do not exist, except a query's own
    out_n = sum_p e^{x_np} v_p / (e^{sink} + sum_p e^{x_np}),   x_np = cap(scaling * q_n . k_p),  cap(x) = c tanh(x / c)

Keys are cut by absolute position, so the cut is the same in every launch that computes the row:

    tiles    |t|t|t|t|t|t|t|t|t|t|t|t|      BLOCK_K keys, at multiples of BLOCK_K; a split is a chain of tiles
    splits   |split 0|split 1|split 2|      folded in ascending order: decay the total, add the split
             |shared         |.S.|own|      complete committed tiles: by page, read once for all rows of a request
                                            from the tile of S on: by node, `own_keys` says where its path lies

An invisible key has weight exactly 0. So siblings, the rest of the batch, the table's width, prompt chunks and the row
tile do not change the result. The forward's own K and V are read from the pool after it has stored them. So the same
code loads every key, committed or not; layers that share another layer's K/V need no special case; and a fused RoPE
kernel need only store them. The host reads nothing back. The form for a CPU is `attend_alone` in `attention/dense.py`.

Padding rows and unwritten slots may hold anything. A NaN or infinity in the K or V of a real row may reach all rows of
its row tile.
"""

from typing import NamedTuple

import torch

from specdec.attention.kernels.key_tiles import FEW_ROWS, HeadShapes, check_prefixes, fits
from specdec.attention.kernels.own_keys import ALIGN, PathKeys
from specdec.attention.kernels.tree_attention_kernels import MIDDLE_SPLITS, SHORT_SPLITS, attend_kernel, merge_kernel
from specdec.gpu.triton_shim import device_limits, pdl_options
from specdec.kvcache.fp8_pool import FieldPool, Fp8Pool, numbers_and_scales

PART_BYTES = 1 << 30
"""Above this many bytes of partial results, each program folds its own splits, as it also does if the rows alone fill
the device. Otherwise a merge kernel folds them."""

FEW_QUERIES = 32
"""Up to this many queries, a merge kernel lets the next product start at once, to load its weight meanwhile."""

MANY_MERGES = 1024
"""Above this many programs, a merge kernel also lets the next product start at once: its last programs start late
anyway."""

MANY_HEADS = 8
"""From this number of K/V heads on, splits with 256 channels are twice as long."""


class KeySplit(NamedTuple):
    """Cut of the keys. Of all launch parameters, only this one affects the bits of a row."""

    block_k: int
    split_len: int


class RowTiles(NamedTuple):
    """Cut of the rows, and resources of a program. They have no effect on bits."""

    block_m: int
    num_warps: int
    num_stages: int
    rows: int | None = None  # packed rows per tile; None: block_m; fewer rows make more programs
    fold: bool | None = None  # fold splits in the program that computes them; None: if rows alone fill the device
    max_registers: int | None = None  # per thread; the compiler's own choice may leave no room for a third program


def tree_attention(
    query: torch.Tensor,
    pool_k: FieldPool,
    pool_v: FieldPool,
    path: PathKeys,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    shares: int = 1,
    cut: KeySplit | None = None,
    tiles: RowTiles | None = None,
) -> torch.Tensor:
    """Attend -> [B, N, Hq, DV] in the query's dtype.

    query: [B, Hq, N, D], any strides.      pool_k [slots, Hkv, D], pool_v [slots, Hkv, DV]: any strides; they hold the
    forward's own K/V.                      path: visible keys, in the group of these pools.
    softcap: c above.  sinks: [Hq] logits.
    shares: number of ranks that divide the heads; keys are cut as for the heads of all ranks together.
    cut, tiles: `choose_key_split` and `choose_rows` choose them; only tests and tuning give them by hand.
    """
    (pages, start, committed_len, page_size), own, positions, block_len, window, first_key = path
    batch, num_heads, num_rows, _ = query.shape
    num_pages, fp8 = pages.shape[1], isinstance(pool_k, Fp8Pool)
    heads = HeadShapes.from_inputs(query, pool_k, pool_v, sinks)
    kv_heads, group, head_dim, value_dim, block_d, block_v = heads
    check_prefixes(query, pages, positions, start, committed_len, block_len)
    assert own.slots.is_contiguous() and own.slots.shape[0] == batch, f"{own.slots.shape=}"
    assert own.run_end is None or own.run_end.shape == (batch, num_rows) == own.slots.shape[:2], f"{own.slots.shape=}"

    cut = cut or choose_key_split(block_d, query.element_size(), kv_heads * shares)
    assert ALIGN % cut.block_k == 0 == cut.split_len % cut.block_k, f"{cut=} does not divide {ALIGN}"
    grows = window is None and start is None
    num_splits = count_splits(num_pages * page_size + own.path_len, window, own.path_len, cut, grows=grows)
    if tiles is None:
        sizes = num_rows * group, batch * kv_heads, block_d, query.element_size()
        tiles = choose_rows(*sizes, is_tree=own.run_end is not None, fp8=fp8, windowed=window is not None)
        tiles = fit_rows(tiles, cut, block_d, query.element_size(), device_limits(query.device)[1])
    tile_rows = tiles.rows or tiles.block_m
    row_tiles = -(-num_rows * group // tile_rows)
    programs = row_tiles * batch * kv_heads
    fold = tiles.fold
    if fold is None:
        part_bytes = num_splits * batch * num_rows * num_heads * value_dim * 4
        fold = part_bytes > PART_BYTES or (num_rows * group > 256 and programs >= device_limits(query.device)[0])
    parts = 1 if fold else num_splits
    part_shape = (parts, batch, kv_heads, num_rows * group)
    part = torch.empty((*part_shape, value_dim), dtype=torch.float32, device=query.device)
    part_max, part_sum = (torch.empty(part_shape, dtype=torch.float32, device=query.device) for _ in "ms")
    out = torch.empty((batch, num_rows, num_heads, value_dim), dtype=query.dtype, device=query.device)
    # even a program of an empty split costs a launch slot, so a program may take several splits: under a window, which
    # all requests fill alike, as many as fill the device; else only where programs are very many, since programs of one
    # split even out what long and short requests leave
    most = 512 // programs if window is not None else max(16, -(-4096 // programs))
    split_programs = 1 if fold else min(num_splits, max(1, most))
    shared_options = {
        "HAS_OWN": own.path_len > 0,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "VALUE_DIM": value_dim,
        "BLOCK_V": block_v,
        "SPLIT_LEN": cut.split_len,
        "GROWS": grows,
        "FOLD": fold,
    }
    (numbers_k, scales_k), (numbers_v, scales_v) = map(numbers_and_scales, (pool_k, pool_v))
    attend_kernel[(row_tiles, batch * kv_heads, split_programs)](
        *(query, numbers_k, numbers_v, scales_k, scales_v),
        *(pages, start, committed_len, positions, own.slots, own.run_end, block_len),
        *(part, part_max, part_sum, scaling, softcap, window, first_key or None),
        *(tile_rows, num_rows, num_pages, *own.slots.shape[1:]),
        *(*query.stride(), *numbers_k.stride(), *numbers_v.stride(), *pages.stride(), *positions.stride()),
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=tiles.block_m,
        BLOCK_K=cut.block_k,
        ALIGN=ALIGN,
        OWN_STAGES=tiles.num_stages if own.run_end is None else min(tiles.num_stages, 3),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **({"maxnreg": tiles.max_registers} if tiles.max_registers and query.device.type == "cuda" else {}),
        **shared_options,
        **pdl_options(query.device),
    )
    merge_kernel[(batch * num_rows * num_heads,)](
        *(part, part_max, part_sum, start, committed_len, positions, block_len, sinks, out),
        *(window, num_rows, *positions.stride()),
        UNROLL=min(parts, 8),
        num_warps=max(1, block_v // 128),
        **shared_options,
        **pdl_options(query.device, late=merges_late(batch * num_rows, num_heads)),
    )
    return out


def merges_late(queries: int, heads: int) -> bool:
    """Does the merge kernel let the next launch start only late (`triton_shim.py`)?"""
    return queries > FEW_QUERIES and queries * heads <= MANY_MERGES


def choose_key_split(block_d: int, item_size: int, kv_heads: int) -> KeySplit:
    """The cut of a layer's keys: short splits for a lone request, few partial results for many requests.

    With many heads even a lone request has enough programs, so splits may be longer.
    """
    if item_size > 2:
        return KeySplit(16, 128)
    if block_d == 256 and kv_heads < MANY_HEADS:
        return KeySplit(32, 128)
    return KeySplit(32 if block_d > 128 else 64, 256)


def choose_rows(
    num_rows: int, heads: int, block_d: int, item_size: int, *, is_tree: bool, fp8: bool, windowed: bool
) -> RowTiles:
    """Row tiles for `num_rows` packed rows of each of `heads` kv heads, over all requests, as timed on an H200.

    Few programs are bound by latency: they get small tiles, more stages and, with one per multiprocessor, more warps.
    Many are bound by instructions, of which fewer warps need fewer: a warp for 128 channels. Chains over 128 channels
    were timed on an H100 within an engine's steps, between other kernels: there, few programs take a third less time
    with eight warps. A graph of attention alone does not show it.
    """
    if item_size > 2:  # float32 multiplies without tensor cores
        return RowTiles(16, 4 if block_d <= 256 else 8, 2)
    if num_rows <= FEW_ROWS.value:
        return _tiles_of_few_rows(heads, block_d, fp8=fp8, windowed=windowed)
    if num_rows > 256:
        return RowTiles(32 if block_d <= 256 else 16, 4, 3)
    if num_rows > 16 and num_rows * heads > (384 if block_d == 256 else 256):
        return _tiles_of_trees(heads, block_d) if is_tree else _tiles_of_chains(num_rows, heads, block_d, fp8=fp8)
    if heads >= 128 and block_d <= 256:
        return RowTiles(16, max(1, block_d // 128), 5 if block_d <= 64 else 3)
    lone, rows = heads <= 8, 8 if is_tree and num_rows * heads <= 128 else None
    if block_d > 256:
        return RowTiles(16, 4, 5 if heads <= 16 else 3, rows)
    if block_d > 128 and (lone or num_rows > 16):
        return RowTiles(16, 8 if lone else 4, 5, rows)
    stages = 5 if block_d <= 128 or heads <= 16 else 3
    if fp8 and block_d <= 128 and not lone:
        return RowTiles(16, 2, stages, rows)
    if block_d == 128 and not is_tree and not fp8:
        return RowTiles(16, 8 if heads <= 16 else 4, 5 if heads <= 32 else 3)
    return RowTiles(16, 4, stages, rows, max_registers=None if is_tree else 168)


def _tiles_of_few_rows(heads: int, block_d: int, *, fp8: bool, windowed: bool) -> RowTiles:
    """Tiles of decoding rows: one warp if programs are many or walk far, more if they are few; many keys in flight
    unless programs share a multiprocessor. In an engine's steps a lone request over 128 channels is 1 % faster in full
    tiles."""
    if block_d == 128 and heads <= 16 and not fp8:
        return RowTiles(16, 8, 5)
    few = FEW_ROWS.value
    if block_d > 256:
        return RowTiles(few, 4, 5 if heads <= 16 else 3)
    if windowed and block_d <= 64:
        return RowTiles(few, 2, 5 if heads <= 32 else 2)
    if heads >= 128:
        return RowTiles(few, 1, 2)
    if block_d > 128:
        return RowTiles(few, 4 if fp8 and (windowed or heads <= 16) else 1, 5)
    return RowTiles(few, 2 if fp8 or heads <= 16 else 1, 5)


def _tiles_of_trees(heads: int, block_d: int) -> RowTiles:
    """Small tiles: each path in a tile is a loop of its own over the newest keys."""
    if block_d <= 128:
        return RowTiles(16, 1 if heads >= 64 else 2, 3)
    return RowTiles(16, block_d // 128, 2 if block_d == 256 else 3)


def _tiles_of_chains(num_rows: int, heads: int, block_d: int, *, fp8: bool) -> RowTiles:
    """Tiles of up to 64 rows, which see nearly the same keys and read them once; of 32 where registers or the decoding
    of 8-bit K/V bind."""
    if block_d > 256:
        return RowTiles(32, 4, 5 if heads <= 32 else 3)
    stages = 5 if block_d <= 64 else 3
    if num_rows > 32 and not fp8:  # over 64 channels a third program fits
        return RowTiles(64, 4, stages, max_registers=168 if block_d <= 64 <= heads else None)
    return RowTiles(32, 2 if heads >= (64 if block_d <= 128 else 256) else 4, stages)


def fit_rows(tiles: RowTiles, cut: KeySplit, block_d: int, item_size: int, shared: int) -> RowTiles:
    """Reduce the stages of `tiles`, then their rows, until they fit `shared` bytes of shared memory. A program of few
    warps needs another one beside it, or more warps."""
    room = shared if tiles.num_warps >= 4 else shared // 2
    while not fits(tiles.block_m, cut.block_k, tiles.num_stages, block_d, item_size, room):
        if tiles.num_stages > 3:
            tiles = tiles._replace(num_stages=tiles.num_stages - 2)
        elif tiles.block_m > 16:
            tiles = tiles._replace(block_m=16, rows=None)
        else:
            return tiles._replace(num_warps=max(4, tiles.num_warps))
    return tiles


def count_splits(num_keys: int, window: int | None, path_len: int, cut: KeySplit, *, grows: bool) -> int:
    """Upper bound on the splits of one request."""
    if grows:
        units = -(-num_keys // cut.split_len)
        short: int = SHORT_SPLITS.value
        middle: int = MIDDLE_SPLITS.value
        far = max(0, units - short - 2 * middle)
        return max(1, min(units, short) + min(-(-max(0, units - short) // 2), middle) + -(-far // 4))
    if window is not None:
        num_keys = min(num_keys, window + max(path_len, 1) - 1)
    return max(1, (num_keys - 2) // cut.split_len + 2)  # keys may begin within a split
