"""Attention of drafts and prompts: closeness to float64, times next to the bytes of K and V, and other tilings.

paged    the draft's own K and V as arguments, any order of sums
tree     all in the pools, the same bits in any company; other tilings must have the bits of the chosen one
ragged   chunks of a prompt, in any order or `exact`, where the same holds
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bench.device import DEVICE, DTYPE, ON_CPU  # isort: skip - before triton
import torch
import triton

from bench.attention_inputs import (
    Prepared,
    Shape,
    case,
    flops,
    kv_bytes,
    prepare_paged,
    prepare_ragged,
    prepare_tree,
    reduced,
)
from bench.clock import bandwidth_row, best_tiles, copies_of, graph_seconds, timed_row
from bench.report import Row
from bench.verify import DTYPES, attempt, closeness_row, distance, poison
from specdec.attention.kernels import paged_attention as pa
from specdec.attention.kernels.key_tiles import padded_channels
from specdec.attention.kernels.ragged_attention import choose_ragged
from specdec.attention.kernels.tree_attention import RowTiles

KERNELS: dict[str, Callable[[Shape], Prepared]] = {
    "paged": prepare_paged,
    "tree": prepare_tree,
    "ragged": prepare_ragged,
}
MODELS: dict[str, Shape] = {
    "E4B sliding": {"heads": (8, 2), "head_dim": 256, "window": 512},
    "E4B full": {"heads": (8, 2), "head_dim": 512},
    "Llama-8B": {"heads": (32, 8), "head_dim": 128},
}

DRAFTS: dict[str, Shape] = {
    "tree of 16": case(3, 1000, 16, (8, 2), 256),
    "ragged, 64 nodes": case(5, 700, 64, (8, 2), 256, ragged=True),
    "one node": case(4, 3001, 1, (8, 1), 128, ragged=True),
    "window < depth": case(2, 300, 63, (4, 4), 64, window=3),
    "window, pages of 16": case(3, 900, 17, (8, 2), 256, window=512, page_size=16),
    "pages of 3": case(3, 500, 3, (4, 2), 96, page_size=3),
    "head 512": case(2, 777, 16, (8, 2), 512),
    "head 512, one head": case(2, 777, 4, (8, 1), 512, page_size=16),
    "head 80": case(2, 333, 5, (6, 2), 80, ragged=True),
    "softcap, sinks": case(2, 300, 7, (8, 8), 64, softcap=20.0, sinks=1),
    "8 nodes": case(3, 1000, 8, (8, 2), 256),
    "nothing committed": case(2, 0, 1, (8, 2), 256),
    "K/V of 8 bits": case(3, 1000, 5, (8, 2), 256, window=512, fp8=True),
    "K/V of 8 bits, pages of 16": case(3, 500, 16, (32, 8), 128, page_size=16, softcap=20.0, fp8=True),
}


def _prompts(*chunks: tuple[int, int], fp8: bool = False) -> dict[str, Shape]:
    """Tokens of one request after a prefix, in order and in any order. fp8: K/V of 8 bits."""
    kept = {"fp8": True} if fp8 else {}
    shapes: dict[str, Shape] = {}
    for (model, geometry), (prefix, tokens), exact in itertools.product(MODELS.items(), chunks, (True, False)):
        shape = {"batch": 1, "length": prefix, "num_rows": tokens, "kind": "causal", "exact": exact, **geometry, **kept}
        name = f"{model}, {tokens} after {prefix}, {'in' if exact else 'any'} order"
        shapes[f"{name}, K/V of 8 bits" if fp8 else name] = shape
    return shapes


CHECKS: dict[str, dict[str, Shape]] = {
    "paged": {
        **DRAFTS,
        "level of 8 of 200": case(3, 1000, 200, (8, 2), 256, level=8),
        "level of 16 of 80, window": case(3, 700, 80, (32, 8), 128, level=16, window=128),
    },
    "tree": {
        **DRAFTS,
        "verify, 200 nodes": case(2, 700, 200, (8, 2), 256),
        "chain of 8": case(3, 1000, 8, (8, 2), 256, kind="chain"),
        "frozen": case(3, 400, 4, (4, 2), 256, kind="frozen", window=128),
        "prefill": case(2, 300, 500, (8, 2), 256, kind="causal"),
        "prefill of 9 rows": case(2, 300, 9, (8, 2), 256, kind="causal"),
        "prefill, window": case(2, 600, 700, (8, 2), 256, kind="causal", window=128),
        "prefill, head 512": case(1, 64, 257, (8, 2), 512, kind="causal"),
        "prefill, head 128": case(1, 0, 333, (8, 8), 128, kind="causal"),
        "nothing": case(2, 0, 1, (8, 2), 256, kind="frozen"),
        "head 112": case(2, 333, 5, (6, 2), 112, ragged=True),
    },
    "ragged": _prompts((0, 300), (700, 64)) | _prompts((700, 64), fp8=True),
}
COMPILED = ("window", "heads", "head_dim", "num_rows", "kind", "batch", "exact", "fp8")
"""Parts of a shape that a kernel is compiled for."""
OTHER_TILES = {"tree": (RowTiles(16, 4, 2, None, True), RowTiles(8, 4, 2))}
"""Checked besides the chosen ones."""


def _timed_drafts() -> dict[str, Shape]:
    blocks = {"decode": (1, "chain"), "chain of 5": (5, "chain"), "tree of 8": (8, "tree"), "tree of 16": (16, "tree")}
    shapes: dict[str, Shape] = {}
    for (model, geometry), batch in itertools.product(MODELS.items(), (1, 8, 32)):
        for context in (1024, 8192, 32768) if "window" not in geometry else (8192,):
            for block, (num_rows, kind) in blocks.items():
                shape = {"batch": batch, "length": context, "num_rows": num_rows, "kind": kind, **geometry}
                shapes[f"{model}, batch {batch}, {context // 1024}k, {block}"] = shape
    for (model, geometry), length in itertools.product(MODELS.items(), (0, 8192)):
        shape = {"batch": 1, "length": length, "num_rows": 2048, "kind": "causal", **geometry}
        shapes[f"{model}, prefill 2k{' on 8k' if length else ''}"] = shape
    for (model, geometry), num_rows, fp8 in itertools.product(MODELS.items(), (1, 5), (False, True)):
        shape = {"batch": 8, "length": 16384, "num_rows": num_rows, "kind": "chain", "fp8": fp8, **geometry}
        shapes[f"{model}, batch 8, 16k, {num_rows} rows, K/V of {8 if fp8 else 16} bits"] = shape
    for (model, geometry), batch, length in itertools.product(MODELS.items(), (64, 128, 256), (600, 1600)):
        shape = {"batch": batch, "length": length, "num_rows": 1, "kind": "chain", **geometry}
        shapes[f"{model}, batch {batch}, {length}, decode"] = shape
    return shapes


TIMED: dict[str, dict[str, Shape]] = {
    "paged": {
        **{f"{nodes} nodes": case(8, 8192, nodes, (8, 2), 256) for nodes in (1, 8, 16, 64)},
        "pages of 16": case(8, 8192, 16, (8, 2), 256, page_size=16),
        "window 1024": case(8, 8192, 16, (8, 2), 256, window=1024),
        "head 512": case(8, 8192, 16, (8, 2), 512),
        "one node, head 512": case(8, 8192, 1, (8, 2), 512),
        "head 128": case(8, 8192, 16, (32, 8), 128),
        "one node, head 128": case(8, 8192, 1, (32, 8), 128),
        "level of 8 of 48, head 128": case(8, 8192, 48, (32, 8), 128, level=8),
        "batch 1": case(1, 8192, 16, (8, 2), 256),
        "batch 1, 64k": case(1, 65536, 16, (8, 2), 256),
    },
    "tree": _timed_drafts(),
    "ragged": _prompts((1536, 512), (0, 2048), (30720, 2048), (0, 8192), (8192, 8192), (24576, 8192))
    | _prompts((8192, 8192), fp8=True),
}


def chosen(shapes: dict[str, Shape], only: Sequence[str]) -> dict[str, Shape]:
    """Those whose name holds one of these words."""
    return {name: shape for name, shape in shapes.items() if not only or any(word in name for word in only)}


def checked_tiles(kernel: str) -> tuple[Any, ...]:
    return None, *OTHER_TILES.get(kernel, ())


def error_of(kernel: str, shape: Shape, dtype: torch.dtype, tiles: Any) -> float:
    run, reference = KERNELS[kernel]({**shape, "dtype": dtype})
    poison()
    return distance(run(tiles=tiles), reference())


def check_rows(kernel: str, only: Sequence[str], small: bool) -> Iterator[Row]:
    """Every case in every dtype and tiling against float64."""
    for name, shape in chosen(CHECKS[kernel], only).items():
        each = reduced(shape) if small else shape

        def worst(dtype: torch.dtype, each: Shape = each) -> float:
            return max(error_of(kernel, each, dtype, tiles) for tiles in checked_tiles(kernel))

        title = f"{kernel} attention: {name}"
        yield attempt(title, closeness_row, title, worst)


def calls_of(kernel: str, shape: Shape, copies: int | None = None) -> list[Callable[..., torch.Tensor]]:
    """Calls on inputs of their own, which together exceed the L2 cache."""
    count = copies_of(kv_bytes(shape)) if copies is None else copies
    return [KERNELS[kernel]({**shape, "seed": seed, "dtype": DTYPE}).run for seed in range(count)]


def times_rows(kernel: str, only: Sequence[str]) -> Iterator[Row]:
    yield bandwidth_row()
    for name, shape in chosen(TIMED[kernel], only).items():
        yield attempt(name, _time_row, name, kernel, shape)


def _time_row(name: str, kernel: str, shape: Shape) -> Row:
    seconds = graph_seconds(calls_of(kernel, shape))
    torch.cuda.empty_cache()
    note = f"{flops(shape) / seconds / 1e12:.0f} TFLOP/s" if shape.get("kind") == "causal" else ""
    return timed_row(f"{kernel} attention: {name}", seconds * 1e6, kv_bytes(shape), note=note)


def tilings(kernel: str, shape: Shape) -> list[Any]:
    """Tilings worth trying for a timed shape."""
    group = shape["heads"][0] // shape["heads"][1]
    if kernel == "tree":
        folds = (False, True) if shape["num_rows"] > 64 or shape["num_rows"] == 1 else (False,)
        warps = {16: (4,), 32: (4,), 64: (8,) if shape["head_dim"] > 256 else (4, 8)}
        tiles = itertools.product((16, 32, 64), (2, 3, 5), folds)
        return [RowTiles(m, w, stages, None, fold) for m, stages, fold in tiles for w in warps[m]]
    if kernel == "ragged":
        channels = padded_channels(shape["head_dim"])
        sizes = shape["batch"], shape["num_rows"], group, shape["heads"][1], channels, channels, DTYPE.itemsize
        usual = choose_ragged(*sizes, DEVICE, exact=shape["exact"])
        keys = (usual.block_k,) if shape["exact"] else (16, 32, 64)
        every = itertools.product((16, 32, 64, 128), keys, (4, 8), (2, 3), (1, 2))
        return [
            usual._replace(block_m=m, block_k=k, num_warps=w, num_stages=stages, value_parts=parts)
            for m, k, w, stages, parts in every
        ]
    packed = (shape.get("level") or shape["num_rows"]) * group
    rows = sorted({min(m, max(16, triton.next_power_of_2(packed))) for m in (16, 32, 64, 128)})
    every = itertools.product(rows, (16, 32, 64), (4, 8), (2, 3, 5, 7), (1.0, 2.0))
    return [
        pa.PagedTiles(*each)
        for each in every
        if each[0] >= min(64, packed) and (each[0] * each[1] >= 512 or each[2] == 4)
    ]


def tiles_rows(kernel: str, only: Sequence[str]) -> Iterator[Row]:
    """Every tiling of some timed shapes."""
    for name, shape in chosen(TIMED[kernel], only).items():
        each = reduced(shape) if ON_CPU else shape
        calls = calls_of(kernel, each)
        want = calls[0]() if kernel == "tree" or each.get("exact") else None

        def make(tiles: Any, calls: Sequence[Any] = calls) -> list[Callable[[], torch.Tensor]]:
            return [partial(call, tiles=tiles) for call in calls]

        found, equal = best_tiles(tilings(kernel, each), make, want)
        same = "" if want is None else "bits equal" if equal else "other bits"
        yield Row(f"{kernel} attention: {name}, other tiles", same, found, equal)


def warm_jobs(kernel: str, only: Sequence[str], small: bool) -> list[Callable[[], Any]]:
    """One call of everything that checks and times launch: several processes compile them."""
    jobs: list[Callable[[], Any]] = []
    for shape in chosen(CHECKS[kernel], only).values():
        for (dtype, _), tiles in itertools.product(DTYPES.values(), checked_tiles(kernel)):
            each = reduced(shape) if small else shape
            jobs.append(lambda each=each, dtype=dtype, tiles=tiles: error_of(kernel, each, dtype, tiles))
    if not small:
        every = {tuple(map(shape.get, COMPILED)): shape for shape in chosen(TIMED[kernel], only).values()}
        short = [{**shape, "length": min(shape["length"], 1024)} for shape in every.values()]
        jobs += [lambda shape=shape: calls_of(kernel, shape, 1)[0]() for shape in short]
    return jobs
