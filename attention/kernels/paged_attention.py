r"""Attention of a draft in progress: its newest level attends to the committed prefix and its ancestors in one call.

Request b has keys of its prefix by position p, in page `pages[b, (p - start[b]) // page_size]`, and keys j of its block
(the draft's nodes so far) at positions r_j. Node i of the level, at position q_i, sees keys through its window w:

    visible(i, p) = start[b] <= p < S_b     and q_i - p < w     a committed key; S_b = committed_len[b]
    visible(i, j) = bit j of ancestors[b,i] and q_i - r_j < w   key j of the block, M for the N nodes of the level
    and in both     p, r_j >= min(f, q_i)                       f = first_key: it hides earlier keys, except q_i's own

    out_i = sum_j e^{x_ij} v_j / (e^{sink} + sum_j e^{x_ij}),   x_ij = cap(scaling * q_i . k_j),  cap(x) = c tanh(x / c)

The keys are cut into splits s that run in parallel. Each computes its own softmax, with lse_s = log sum_{j in s}
e^{x_ij}:

    out = sum_s e^{lse_s} out_s / sum_s e^{lse_s}

The sink and the block belong to split 0. The result of a row that sees nothing is 0. Only shapes decide the launch, and
the host reads nothing back, so it can be captured in a CUDA graph.
"""

from typing import NamedTuple

import torch

from specdec.attention.kernels.key_tiles import HeadShapes, check_prefixes, fits, padded_channels
from specdec.attention.kernels.page_table import PageTable
from specdec.attention.kernels.paged_attention_kernels import merge_paged_kernel, paged_attention_kernel
from specdec.gpu.triton_shim import device_limits
from specdec.kvcache.fp8_pool import FieldPool, numbers_and_scales

WORD = 64
"""Ancestor bits in an int64: bit j % 64 of word j // 64 is key j of the block."""


class PagedTiles(NamedTuple):
    """How the work is cut. `choose_paged_tiles` chooses it; only tests and tuning give it by hand."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    waves: float = 2.0  # target number of programs per multiprocessor


class BlockKeys(NamedTuple):
    """Keys and values of a draft's M nodes so far, of which the newest N attend.

    k [B, Hkv, M, D], v [B, Hkv, M, DV]: any strides; pairs of numbers if the pools are fp8.
    positions: [B, M] of the keys.   ancestors: [B, N, ceil(M / 64)] int64, bits of the keys that each query sees.
    scales: if the pools are fp8, [B * M', Hkv] of all rows of the tensors that k and v view.
    """

    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)


def paged_attention(
    query: torch.Tensor,
    pool_k: FieldPool,
    pool_v: FieldPool,
    table: PageTable,
    block: BlockKeys,
    positions: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    first_key: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tiles: PagedTiles | None = None,
) -> torch.Tensor:
    """Attend -> [B, N, Hq, DV] in the query's dtype.

    query: [B, Hq, N, D], any strides.             positions: [B, N] of the queries.
    pool_k [slots, Hkv, D], pool_v [slots, Hkv, DV]: any strides.   table: the prefixes in the group of these pools.
    window: a key is visible if it lies fewer than this many positions back.  softcap: c above.  sinks: [Hq] logits.
    first_key: f above.
    """
    pages, start, committed_len, page_size = table
    block_k, block_v, block_positions, ancestors, block_scales = block
    batch, num_heads, num_rows, _ = query.shape
    num_pages, num_keys = pages.shape[1], block_k.shape[2]
    heads = HeadShapes.from_inputs(query, pool_k, pool_v, sinks)
    kv_heads, group, _, value_dim, block_d, _ = heads
    check_prefixes(query, pages, positions, start, committed_len)
    (numbers_k, scales_k), (numbers_v, scales_v) = map(numbers_and_scales, (pool_k, pool_v))
    assert block_k.shape == (batch, kv_heads, num_keys, numbers_k.shape[2]), f"{block_k.shape=}"
    assert block_v.shape == (batch, kv_heads, num_keys, numbers_v.shape[2]), f"{block_v.shape=}"
    assert block_k.dtype == block_v.dtype == numbers_k.dtype, f"{block_k.dtype=} {block_v.dtype=} {numbers_k.dtype=}"
    assert all((scales is None) == (scales_k is None) for scales in block_scales), f"{block_scales=}"
    assert block_positions.shape == (batch, num_keys), f"{block_positions.shape=} {num_keys=}"
    assert ancestors.shape == (batch, num_rows, -(-num_keys // WORD)), f"{ancestors.shape=} {num_keys=}"
    assert ancestors.dtype == torch.int64, f"{ancestors.dtype=}"

    if tiles is None:
        tiles = choose_paged_tiles(num_rows * group, block_d, query.element_size())
        tiles = fit_tiles(tiles, block_d, query.element_size(), device_limits(query.device)[1])
    row_tiles = -(-num_rows * group // tiles.block_m)
    num_splits = choose_splits(row_tiles * batch * kv_heads, num_pages * page_size, tiles.waves, query.device)

    out = torch.empty((batch, num_rows, num_heads, value_dim), dtype=query.dtype, device=query.device)
    part, lse = split_results(out, num_splits)
    paged_attention_kernel[(row_tiles, batch * kv_heads, num_splits)](
        *(query, block_k, block_v, numbers_k, numbers_v, *block_scales, scales_k, scales_v),
        *(pages, start, committed_len, positions, block_positions, ancestors),
        *(sinks, part, lse, scaling, softcap, window, first_key or None, num_rows, num_keys, num_splits, num_pages),
        *(*query.stride(), *block_k.stride(), *block_v.stride(), *numbers_k.stride(), *numbers_v.stride()),
        *(*pages.stride(), *positions.stride(), *block_positions.stride(), *ancestors.stride()),
        PAGE_SIZE=page_size,
        **heads._asdict(),
        BLOCK_M=tiles.block_m,
        BLOCK_K=tiles.block_k,
        WORDS=ancestors.shape[2],
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return merge_splits(part, lse, out)


def split_results(out: torch.Tensor, num_splits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Make the float32 buffers that the splits of `out` [..., D] write: parts [splits, ..., D] and sums [splits, ...].
    A single split writes `out` itself and no sums."""
    if num_splits == 1:
        return out, None
    part = torch.empty((num_splits, *out.shape), dtype=torch.float32, device=out.device)
    return part, torch.empty(part.shape[:-1], dtype=torch.float32, device=out.device)


def merge_splits(part: torch.Tensor, lse: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Compute `out` from the buffers that its splits wrote (`split_results`)."""
    if lse is not None:
        value_dim, block_v = out.shape[-1], padded_channels(out.shape[-1])
        merge_paged_kernel[(out.numel() // value_dim,)](
            part, lse, out, len(part), VALUE_DIM=value_dim, BLOCK_V=block_v, num_warps=max(1, block_v // 128)
        )
    return out


def choose_paged_tiles(num_rows: int, block_d: int, item_size: int) -> PagedTiles:
    """Tiles for `num_rows` packed rows of `block_d` channels: the fastest of those timed on an H200.

    Decoding is bound by memory, so several tiles of K and V are loaded while one is used. 64 rows keep the tensor cores
    busier than 32, even if half of them are padding. Prefill is bound by compute and takes the largest tiles that fit.
    """
    if item_size > 2:  # float32 products do not use tensor cores
        return PagedTiles(16, 16, 4 if block_d <= 256 else 8, 2)
    if num_rows <= 16:
        return PagedTiles(16, min(64, 16384 // block_d), 4, 5, 2.0 if block_d <= 128 else 1.0)
    if block_d > 256:
        return PagedTiles(64, 32, 8, 3, 1.0)
    if num_rows <= 64:
        return PagedTiles(64, 64, 4, 5, 2.0) if block_d <= 128 else PagedTiles(64, 32, 4, 7, 1.0)
    return PagedTiles(128, 64, 8, 5 if block_d <= 128 else 3, 1.0) if num_rows > 256 else PagedTiles(128, 32, 8, 5, 1.0)


def fit_tiles(tiles: PagedTiles, block_d: int, item_size: int, shared: int) -> PagedTiles:
    """Reduce the stages of `tiles`, then their keys, until they fit `shared` bytes of shared memory."""
    while tiles.block_k > 16:
        if fits(tiles.block_m, tiles.block_k, tiles.num_stages, block_d, item_size, shared):
            break
        fewer = {"num_stages": tiles.num_stages - 2} if tiles.num_stages > 3 else {"block_k": tiles.block_k // 2}
        tiles = tiles._replace(**fewer)
    return tiles


def choose_splits(programs: int, num_keys: int, waves: float, device: torch.device) -> int:
    """Number of splits of the prefix that fills the device, from numbers that the host has without a
    synchronisation."""
    return max(1, min(int(waves * device_limits(device)[0]) // programs, -(-num_keys // 128), 64))
