"""`tree_attention` has the same bits in any company.

A text is computed token by token; its rows must have the same bits in a batch, in chains, in trees, in chunks of any
size, with other row tiles, tables and page sizes.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.device import DEVICE, ON_CPU  # isort: skip - before triton
import torch

from bench.attention_inputs import depths
from bench.cases.attention import MODELS, chosen
from bench.report import Row
from bench.verify import DTYPES, attempt, bits_row
from specdec.attention.kernels.own_keys import own_keys
from specdec.attention.kernels.tree_attention import RowTiles, choose_cut, fit_rows, tree_attention
from specdec.gpu.triton_device import device_limits

SHAPES: dict[str, dict[str, Any]] = {
    **MODELS,
    "head 64, window 100": {"heads": (8, 1), "head_dim": 64, "window": 100},
    "head 80": {"heads": (6, 2), "head_dim": 80},
}
PAGES = {"Llama-8B": 16}
"""Slots of a page by shape, where not 1."""
EXTRA_TILES = (RowTiles(16, 4, 3, 12, False), RowTiles(32, 4, 3, None, True), RowTiles(64, 4, 3, None, False))


class Text:
    """Queries, keys and values of a text of T tokens, its K and V in shuffled slots of a pool next to junk."""

    def __init__(self, length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, page_size: int) -> None:
        g = torch.Generator(DEVICE).manual_seed(length + head_dim)
        self.length, self.page_size, self.scaling = length, page_size, head_dim**-0.5
        pages = -(-length // page_size)
        self.pages = torch.randperm(pages, generator=g, device=DEVICE) + 1
        self.slots = (self.pages[:, None] * page_size + torch.arange(page_size, device=DEVICE)).flatten()[:length]
        self.first_junk, count = (pages + 1) * page_size, 2048
        total = self.first_junk + count * page_size
        self.pool_k, self.pool_v = (
            torch.randn(total, heads[1], head_dim, generator=g, device=DEVICE).to(dtype) for _ in "kv"
        )
        self.query = torch.randn(length, heads[0], head_dim, generator=g, device=DEVICE).to(dtype) * 1.5
        self.junk = torch.randn(count, heads[0], head_dim, generator=g, device=DEVICE).to(dtype)

    def attend(
        self, begins: list[int], nodes: list[list[int]], parents: list[int] | None, window: int | None, **options: Any
    ) -> torch.Tensor:
        """B requests with S = begins[b]; nodes[b][n] is the position whose token node n holds, -1 for a junk token."""
        ids = torch.tensor(nodes, device=DEVICE)
        batch, num_rows = ids.shape
        junk = torch.arange(batch * num_rows, device=DEVICE).view(batch, num_rows) % len(self.junk)
        true = ids >= 0
        write = torch.where(true, self.slots[ids.clamp(min=0)], self.first_junk + junk)
        query = torch.where(true[..., None, None], self.query[ids.clamp(min=0)], self.junk[junk])
        committed = torch.tensor(begins, device=DEVICE)
        depth = torch.tensor(depths(parents) if parents else list(range(num_rows)), device=DEVICE)
        width = options.pop("width", -(-max(begins) // self.page_size))
        pages = torch.zeros(batch, width, dtype=torch.int64, device=DEVICE)
        pages[:, : len(self.pages)] = self.pages[:width]
        start = None
        if window is not None and options.pop("evict", False):
            start = (committed - window).clamp(min=0) // self.page_size * self.page_size
            columns = (start // self.page_size)[:, None] + torch.arange(width, device=DEVICE)
            pages = pages.gather(1, columns.clamp(max=width - 1))
        elif window is not None:
            start = torch.zeros_like(committed)
        tree = None if parents is None else torch.tensor(parents, device=DEVICE).expand(batch, -1)
        return tree_attention(
            query.transpose(1, 2),
            self.pool_k,
            self.pool_v,
            own_keys(pages, start, committed, write, tree, page_size=self.page_size),
            pages,
            start,
            committed,
            committed[:, None] + depth,
            page_size=self.page_size,
            scaling=self.scaling,
            window=window,
            **options,
        )


def hidden_path(num_nodes: int, begin: int, seed: int) -> tuple[list[int], list[int]]:
    """(parents, nodes): a random tree, the true tokens on the path to its deepest node and junk elsewhere."""
    rng = random.Random(seed)
    parents = [-1] + [rng.randrange(max(0, n - 5), n) for n in range(1, num_nodes)]
    depth = depths(parents)
    node, nodes = max(range(num_nodes), key=lambda n: depth[n]), [-1] * num_nodes
    while node >= 0:
        nodes[node] = begin + depth[node]
        node = parents[node]
    return parents, nodes


def row_tiles(shape: dict[str, Any], dtype: torch.dtype) -> list[RowTiles | None]:
    """The chosen tiles, and others that fit the device."""
    if ON_CPU or dtype.itemsize != 2:
        return [None]
    block_d = 1 << (shape["head_dim"] - 1).bit_length()
    cut, shared = choose_cut(block_d, 2, shape["heads"][1]), device_limits(DEVICE)[1]
    wide = [t._replace(num_warps=8) if t.block_m == 64 and block_d > 256 else t for t in EXTRA_TILES]
    return [None, *(fit_rows(tiles, cut, block_d, 2, shared) for tiles in wide)]


def comparisons(length: int, shape: dict[str, Any], dtype: torch.dtype, page_size: int) -> Iterator[tuple[str, bool]]:
    """(what, whether it had the bits of token-by-token decoding) for every company a row can have."""
    window = shape.get("window")
    text = Text(length, shape["heads"], shape["head_dim"], dtype, page_size)
    positions, wide = list(range(length)), -(-length // page_size) + 7
    batched = [
        text.attend(some, [[p] for p in some], None, window, width=wide)[:, 0]
        for some in (positions[i : i + 256] for i in range(0, length, 256))
    ]
    expected = torch.cat(batched)  # [T, Hq, D]
    few = positions[:: max(1, length // 24)]
    alone = torch.cat([text.attend([i], [[i]], None, window)[:, 0] for i in few])
    yield "decode alone", torch.equal(alone, expected[few])

    def same(rows: torch.Tensor, nodes: list[int]) -> bool:
        here = [n for n, position in enumerate(nodes) if position >= 0]
        return torch.equal(rows[here], expected[[nodes[n] for n in here]])

    tiles_of_rows = row_tiles(shape, dtype)
    begins = [0, 1, 15, 31, 32, 63, 64, 65, 127, 128, 200, length // 2, length - 300]
    begins = [b for b in begins if 0 <= b < length - 20]
    for size in (size for size in (5, 16, 57, 300, 1000) if size < length):
        spots = [b for b in (begins if size <= 57 else [0, 1, 63, length // 3]) if b + size <= length]
        for tiles in tiles_of_rows if size in (16, 300) else tiles_of_rows[:1]:
            chains = [positions[b : b + size] for b in spots]
            equal = all(same(text.attend([c[0]], [c], None, window, tiles=tiles)[0], c) for c in chains)
            yield f"chains and chunks of {size}{'' if tiles is None else f' {tuple(tiles)}'}", equal
    for size in (8, 16, 200):
        trees = [(b, *hidden_path(size, b, seed)) for seed, b in enumerate(begins)]
        for tiles in tiles_of_rows if size != 8 else tiles_of_rows[:1]:
            equal = all(
                same(text.attend([b], [nodes], parents, window, tiles=tiles)[0], nodes)
                for b, parents, nodes in trees
                if max(nodes) < length
            )
            yield f"trees of {size}{'' if tiles is None else f' {tuple(tiles)}'}", equal
    parents, _ = hidden_path(16, 0, 1)
    batch = [hidden_path(16, begin, 1)[1] for begin in begins]
    yield "trees in a batch", all(map(same, text.attend(begins, batch, parents, window), batch))
    if window is not None:
        some = [p for p in begins if p > 0]
        rows = text.attend(some, [[p] for p in some], None, window, evict=True)[:, 0]
        yield "evicted table", torch.equal(rows, expected[some])


def bits_rows(only: Sequence[str], formats: Sequence[str], length: int) -> Iterator[Row]:
    """One row a shape and dtype, of a text of `length` tokens; of half that in float32."""
    for name, shape in chosen(SHAPES, only).items():
        for label in (label for label in formats if label in DTYPES):
            dtype = DTYPES[label][0]
            count = length // 2 if label == "fp32" and not ON_CPU else length
            title = f"tree attention: {name}, {label}"
            yield attempt(title, _row, title, count, shape, dtype, PAGES.get(name, 1))


def _row(title: str, length: int, shape: dict[str, Any], dtype: torch.dtype, page_size: int) -> Row:
    return bits_row(title, comparisons(length, shape, dtype, page_size))


def warm_jobs(only: Sequence[str], formats: Sequence[str]) -> list[Callable[[], Any]]:
    """Short texts that launch every variant: several processes compile them."""
    return [
        lambda name=name, shape=shape, label=label: list(comparisons(130, shape, DTYPES[label][0], PAGES.get(name, 1)))
        for name, shape in chosen(SHAPES, only).items()
        for label in formats
        if label in DTYPES
    ]
