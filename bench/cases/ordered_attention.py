"""Attention of prompts in order and in any order, in other tiles, and of plain decoding at large batches.

prompts   chunks of a prompt: tilings of `ragged_attention` in any order, and in order, where each must give the bits
          of the first
few       a few tokens of a long prompt, in any order: splits for all tiles -> for those that have work
decode    rows of plain decoding: splits merged and folded, which must be equal, next to the bytes of K and V
"""

from collections.abc import Iterator, Sequence
from functools import partial

from bench.device import DEVICE, DTYPE, ON_CPU  # isort: skip - before triton
import torch

from bench.clock import best_tiles, floor_us, microseconds
from bench.report import Row
from specdec.attention.kernels.key_tiles import padded_channels
from specdec.attention.kernels.own_keys import own_keys
from specdec.attention.kernels.ragged_attention import RaggedTiles, choose_ragged, ragged_attention
from specdec.attention.kernels.tree_attention import RowTiles, choose_cut, choose_rows, fit_rows, tree_attention
from specdec.attention.pack import Lines, Pack
from specdec.gpu.triton_device import device_limits

HEADS, KV_HEADS = 8, 2
LAYERS = {32: 512, 64: None} if ON_CPU else {256: 512, 512: None}  # channels of a head: its window
CHUNKS = ((1536, 512), (0, 2048), (30720, 2048), (0, 8192), (8192, 8192), (24576, 8192))  # prefix, tokens
FEW = tuple((prefix, tokens) for tokens in (64, 128, 256) for prefix in (0, 8192, 32000))
IN_ORDER = {  # rows, warps, stages, total in memory
    512: ((32, 8, 3, False), (32, 4, 3, True), (32, 4, 2, True), (16, 4, 3, False), (16, 4, 3, True)),
    256: (
        (64, 8, 3, False),
        (64, 4, 3, False),
        (32, 4, 3, False),
        (64, 8, 3, True),
        (64, 4, 3, True),
        (32, 4, 3, True),
    ),
}
ANY_ORDER = {  # rows, keys, warps, stages
    512: ((64, 32, 8, 3), (32, 32, 4, 3), (32, 32, 4, 2), (32, 32, 8, 3), (32, 16, 4, 3), (32, 64, 8, 1)),
    256: ((128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 8, 3)),
}


class Prompt:
    """`tokens` places after `prefix` earlier tokens of one request, whose slots lie anywhere; `runs`: how many requests
    there is room for."""

    def __init__(self, head_dim: int, prefix: int, tokens: int, runs: int = 1) -> None:
        noise = torch.Generator(DEVICE).manual_seed(prefix + tokens)
        width = prefix + tokens
        self.pool_k, self.pool_v = (
            torch.randn(width + 1, KV_HEADS, head_dim, generator=noise, device=DEVICE).to(DTYPE) for _ in "kv"
        )
        self.query = torch.randn(1, tokens, HEADS, head_dim, generator=noise, device=DEVICE).to(DTYPE).transpose(1, 2)
        slots = torch.randperm(width, generator=noise, device=DEVICE)[None] + 1
        start, length = torch.zeros(2, runs, dtype=torch.int64, device=DEVICE)
        start[0], length[0] = prefix, tokens
        self.pack = Pack.of(torch.zeros_like(start), start, length, tokens)
        self.lines = Lines(slots.expand(runs, -1), torch.zeros_like(start), None)

    def attend(self, window: int | None, tiles: RaggedTiles) -> torch.Tensor:
        arguments = self.query, self.pool_k, self.pool_v, self.pack, self.lines
        return ragged_attention(*arguments, scaling=0.06, window=window, exact=tiles.split_len > 0, tiles=tiles)

    def calls(self, window: int | None, tiles: RaggedTiles) -> list[partial[torch.Tensor]]:
        return [partial(self.attend, window, tiles)] * 4


def usual(head_dim: int, tokens: int, *, exact: bool) -> RaggedTiles:
    sizes = HEADS // KV_HEADS, KV_HEADS, padded_channels(head_dim), DTYPE.itemsize
    return choose_ragged(tokens, *sizes, DEVICE, exact=exact)


def prompts_rows(chunks: Sequence[tuple[int, int]] = CHUNKS) -> Iterator[Row]:
    for head_dim, window in LAYERS.items():
        for prefix, tokens in ((0, 30),) if ON_CPU else chunks:
            prompt = Prompt(head_dim, prefix, tokens)
            loose, chosen = (usual(head_dim, tokens, exact=exact) for exact in (False, True))
            any_order = [
                loose._replace(block_m=m, block_k=k, num_warps=warps, num_stages=stages)
                for m, k, warps, stages in ANY_ORDER.get(head_dim, ((16, 32, 4, 2),))
            ]
            in_order = [
                chosen._replace(block_m=m, num_warps=warps, num_stages=stages, total_in_memory=in_memory)
                for m, warps, stages, in_memory in IN_ORDER.get(head_dim, ((16, 4, 2, False), (32, 4, 2, True)))
            ]
            call = partial(prompt.calls, window)
            name = f"heads of {head_dim}, {tokens} after {prefix}"
            us = microseconds(partial(prompt.attend, window, loose))
            yield Row(f"{name}, any order", best_tiles(any_order, call, None)[0], f"chosen {us:.0f} us")
            us = microseconds(partial(prompt.attend, window, chosen))
            found, equal = best_tiles(in_order, call, prompt.attend(window, chosen))
            yield Row(f"{name}, in order", f"{found}{'' if equal else ', OTHER BITS'}", f"chosen {us:.0f} us", equal)


def few_rows() -> Iterator[Row]:
    head_dim = max(LAYERS)
    for prefix, tokens in ((50, 5),) if ON_CPU else FEW:
        prompt = Prompt(head_dim, prefix, tokens, runs=max(8, tokens // 8))
        tiles = usual(head_dim, tokens, exact=False)
        working = -(-tokens // (tiles.block_m // (HEADS // KV_HEADS)))
        before = tiles._replace(waves=tiles.waves * working / (working + max(8, tokens // 8)))
        times = [microseconds(partial(prompt.attend, None, each)) for each in (before, tiles)]
        close = (prompt.attend(None, before).float() - prompt.attend(None, tiles).float()).abs().max().item()
        found = f"{times[0]:.0f} -> {times[1]:.0f}, apart by {close:.1e}"
        yield Row(f"{tokens} after {prefix}, splits for tiles with work", found, "us", close < 0.05)


def decode_rows(batches: Sequence[int], contexts: Sequence[int]) -> Iterator[Row]:
    sizes = [(h, w, batch, length) for h, w in LAYERS.items() for batch in batches for length in contexts]
    for head_dim, window, batch, length in sizes:
        block_d, item, group = padded_channels(head_dim), DTYPE.itemsize, HEADS // KV_HEADS
        cut, shared = choose_cut(block_d, item, KV_HEADS), device_limits(DEVICE)[1]
        noise = torch.Generator(DEVICE).manual_seed(length)
        shape = batch * (length + 1) + 1, KV_HEADS, head_dim
        pools = [torch.randn(shape, generator=noise, device=DEVICE).to(DTYPE) for _ in "kv"]
        slots = torch.randperm(shape[0] - 1, generator=noise, device=DEVICE).view(batch, -1) + 1
        pages, write = slots[:, :-1].contiguous(), slots[:, -1:].contiguous()
        committed = torch.full((batch,), length, device=DEVICE)
        query = torch.randn(batch, HEADS, 1, head_dim, generator=noise, device=DEVICE).to(DTYPE)
        own = own_keys(pages, None, committed, write, page_size=1)
        arguments = query, *pools, own, pages, None, committed, committed[:, None]
        rows = fit_rows(choose_rows(group, batch * KV_HEADS, block_d, item, is_tree=False), cut, block_d, item, shared)
        variants = [rows._replace(fold=fold, num_stages=n) for fold in (False, True) for n in (rows.num_stages, 5)]
        tilings: list[RowTiles] = [fit_rows(each, cut, block_d, item, shared) for each in variants]
        attend = partial(tree_attention, *arguments, page_size=1, scaling=0.06, window=window)
        calls = [partial(attend, tiles=tiles) for tiles in tilings]
        outs = [call() for call in calls]
        times = [
            f"{'folded' if tiles.fold else 'merged'}/{tiles.num_stages} {microseconds(call):.0f}"
            for tiles, call in zip(tilings, calls, strict=True)
        ]
        seen = length + 1 if window is None else min(length + 1, window)
        floor = floor_us(batch * seen * KV_HEADS * head_dim * 2 * item)
        equal = all(torch.equal(outs[0], other) for other in outs)
        yield Row(f"decode {batch} of {length}, heads of {head_dim}", ", ".join(times), f"us; floor {floor:.0f}", equal)
