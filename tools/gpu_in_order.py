"""Tiles of attention in order, and of plain decoding at large batches: `python tools/gpu_in_order.py`, two minutes.

    prompts   the heads of Gemma 4 E4B, chunks of a prompt: microseconds of a layer for tilings of `ragged_attention`,
              in any order, and in order, where every tiling must give the bits of the first
    few       a few tokens of a long prompt, in any order: splits for all tiles -> for those that have work
    decode    rows of plain decoding at 64, 128 and 256 requests: splits merged and folded, which must be equal, and
              how long it takes to read K and V at 4.8 TB/s

Times are medians of a replayed capture of several calls, on one pool.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_setup import DEVICE, ON_CPU, device_option, machine, microseconds, require_device  # isort: skip - before triton
import torch
from result_table import ResultTable, Row

from specdec.attention.kernels.key_tiles import padded_channels
from specdec.attention.kernels.own_keys import own_keys
from specdec.attention.kernels.ragged_attention import RaggedTiles, choose_ragged, ragged_attention
from specdec.attention.kernels.tree_attention import choose_cut, choose_rows, fit_rows, tree_attention
from specdec.attention.pack import Lines, Pack
from specdec.gpu.triton_device import device_limits

HEADS, KV_HEADS, WINDOW = 8, 2, 512
DTYPE = torch.float32 if ON_CPU else torch.bfloat16
LAYERS = {32: WINDOW, 64: None} if ON_CPU else {256: WINDOW, 512: None}  # channels of a head: its window
CHUNKS = (
    ((20, 9), (0, 30))
    if ON_CPU
    else (
        ((1536, 512), (0, 2048), (30720, 2048), (0, 8192), (8192, 8192), (24576, 8192))  # prefix, tokens
    )
)
FEW = ((50, 5),) if ON_CPU else tuple((prefix, tokens) for tokens in (64, 128, 256) for prefix in (0, 8192, 32000))
BATCHES = (3,) if ON_CPU else (64, 128, 256)
LENGTHS = (40,) if ON_CPU else (600, 1600)

TILES = {  # rows, warps, stages, total in memory
    512: ((32, 8, 3, False), (32, 4, 3, True), (32, 4, 2, True), (16, 4, 3, False), (16, 4, 3, True)),
    256: (
        (64, 8, 3, False),
        (64, 4, 3, False),
        (32, 4, 3, False),
        (64, 8, 3, True),
        (64, 4, 3, True),
        (32, 4, 3, True),
    ),
    64: ((16, 4, 2, False), (32, 4, 2, True)),
    32: ((16, 4, 2, False), (32, 4, 2, True)),
}

ANY_ORDER = {  # rows, keys, warps, stages
    512: ((64, 32, 8, 3), (32, 32, 4, 3), (32, 32, 4, 2), (32, 32, 8, 3), (32, 16, 4, 3), (32, 64, 8, 1)),
    256: ((128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 8, 3)),
    64: ((16, 32, 4, 2),),
    32: ((16, 32, 4, 2),),
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


def usual(head_dim: int, tokens: int, *, exact: bool) -> RaggedTiles:
    item = torch.empty((), dtype=DTYPE).element_size()
    return choose_ragged(
        tokens, HEADS // KV_HEADS, KV_HEADS, padded_channels(head_dim), item, DEVICE, exact=exact
    )  # fmt: skip


def prompt_rows() -> Iterator[Row]:
    for head_dim, window in LAYERS.items():
        for prefix, tokens in CHUNKS:
            prompt = Prompt(head_dim, prefix, tokens)
            chosen = usual(head_dim, tokens, exact=True)
            loose = usual(head_dim, tokens, exact=False)
            cells = [f"any order, chosen {microseconds(lambda: prompt.attend(window, loose)):.0f}"]  # noqa: B023
            for block_m, block_k, warps, stages in ANY_ORDER[head_dim]:
                tiles = loose._replace(block_m=block_m, block_k=block_k, num_warps=warps, num_stages=stages)
                name = f"{block_m}x{block_k}/{warps}/{stages}"
                cells.append(f"{name} {microseconds(lambda: prompt.attend(window, tiles)):.0f}")  # noqa: B023
            cells.append(f"in order, chosen {microseconds(lambda: prompt.attend(window, chosen)):.0f}")  # noqa: B023
            expected, equal = prompt.attend(window, chosen), True
            for block_m, warps, stages, in_memory in TILES[head_dim]:
                tiles = chosen._replace(
                    block_m=block_m, num_warps=warps, num_stages=stages, total_in_memory=in_memory
                )  # fmt: skip
                name = f"{block_m}/{warps}/{stages}{' in memory' if in_memory else ''}"
                try:
                    out = prompt.attend(window, tiles)
                    same = torch.equal(out, expected)
                    spent = microseconds(lambda: prompt.attend(window, tiles))  # noqa: B023
                    cells.append(f"{name} {spent:.0f}{'' if same else ' OTHER BITS'}")
                    equal &= same
                except Exception as error:  # it does not fit: the others are still of interest
                    cells.append(f"{name} {type(error).__name__}")
            yield Row(f"heads of {head_dim}, {tokens} after {prefix}", ", ".join(cells), "us", equal)


def few_rows() -> Iterator[Row]:
    head_dim = max(LAYERS)
    for prefix, tokens in FEW:
        prompt = Prompt(head_dim, prefix, tokens, runs=max(8, tokens // 8))
        tiles = usual(head_dim, tokens, exact=False)
        per_tile = tiles.block_m // (HEADS // KV_HEADS)
        working = -(-tokens // per_tile)
        before = tiles._replace(waves=tiles.waves * working / (working + max(8, tokens // 8)))
        times = [microseconds(lambda: prompt.attend(None, each)) for each in (before, tiles)]  # noqa: B023
        close = (prompt.attend(None, before).float() - prompt.attend(None, tiles).float()).abs().max().item()
        found = f"{times[0]:.0f} -> {times[1]:.0f}, apart by {close:.1e}"
        yield Row(f"{tokens} after {prefix}, splits for tiles with work", found, "us", close < 0.05)


def decode_rows() -> Iterator[Row]:
    for head_dim, window in LAYERS.items():
        item, block_d = torch.empty((), dtype=DTYPE).element_size(), padded_channels(head_dim)
        cut = choose_cut(block_d, item, KV_HEADS)
        for batch in BATCHES:
            for length in LENGTHS:
                noise = torch.Generator(DEVICE).manual_seed(length)
                shape = batch * (length + 1) + 1, KV_HEADS, head_dim
                pools = [torch.randn(shape, generator=noise, device=DEVICE).to(DTYPE) for _ in "kv"]
                slots = torch.randperm(shape[0] - 1, generator=noise, device=DEVICE).view(batch, -1) + 1
                pages, write = slots[:, :-1].contiguous(), slots[:, -1:].contiguous()
                committed = torch.full((batch,), length, device=DEVICE)
                query = torch.randn(batch, HEADS, 1, head_dim, generator=noise, device=DEVICE).to(DTYPE)
                own = own_keys(pages, None, committed, write, page_size=1)
                rows = choose_rows(HEADS // KV_HEADS, batch * KV_HEADS, block_d, item, is_tree=False)
                rows = fit_rows(rows, cut, block_d, item, device_limits(DEVICE)[1])
                outs, times = [], []
                for fold in (False, True):
                    for stages in (rows.num_stages, 5):
                        tiles = fit_rows(
                            rows._replace(fold=fold, num_stages=stages), cut, block_d, item, device_limits(DEVICE)[1]
                        )  # fmt: skip

                        def attend() -> torch.Tensor:
                            arguments = query, *pools, own, pages, None, committed, committed[:, None]  # noqa: B023
                            return tree_attention(
                                *arguments, page_size=1, scaling=0.06, window=window, tiles=tiles  # noqa: B023
                            )  # fmt: skip

                        outs.append(attend())
                        times.append(f"{'folded' if fold else 'merged'}/{tiles.num_stages} {microseconds(attend):.0f}")
                seen = length + 1 if window is None else min(length + 1, window)
                floor = batch * seen * KV_HEADS * head_dim * 2 * item / 4.8e12 * 1e6
                equal = all(torch.equal(outs[0], other) for other in outs)
                found = f"{', '.join(times)}; K and V at 4.8 TB/s {floor:.0f}"
                yield Row(f"decode {batch} of {length}, heads of {head_dim}", found, "us", equal)


PARTS = {"prompts": prompt_rows, "few": few_rows, "decode": decode_rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, parents=[device_option])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    require_device()
    table = ResultTable(machine())
    for part in args.parts:
        table.add(PARTS[part]())
    return table.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
