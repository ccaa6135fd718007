"""Check tree attention on a GPU, closeness and bits, then time it against read bandwidth.

    python tools/gpu_tree_attention.py [--quick] [--parts bits timings] [--only TEXT] [--tune SHAPE] [--out table.md]

    closeness   against float64, in fp32, fp16 and bf16
    bits        a text is computed token by token; its rows must have the same bits in a batch, in chains, in trees, in
                chunks of any size, with other row tiles, tables and page sizes
    timings     CUDA graphs that run the call on several pools in turn, together larger than the L2 cache

Bytes count every visible K and V once. Nothing is timed when a check fails. Variants are compiled by several processes
first (`--warm`).
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import gpu_attention
import torch
from result_table import ResultTable, Row

from specdec.attention.deterministic_attention import deterministic_attention
from specdec.attention.kernels.own_keys import OwnKeys, own_keys, reference_own_keys
from specdec.attention.kernels.tree_attention import (
    RowTiles,
    choose_cut,
    fit_rows,
    tree_attention,
)
from specdec.gpu.triton_device import device_limits

E4B_SLIDING = {"heads": (8, 2), "head_dim": 256, "window": 512}
E4B_FULL = {"heads": (8, 2), "head_dim": 512}
PARTS = ("closeness", "bits", "timings")
LLAMA_8B = {"heads": (32, 8), "head_dim": 128}
MODELS = {"E4B sliding": E4B_SLIDING, "E4B full": E4B_FULL, "Llama-8B": LLAMA_8B}


def arguments(shape: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor | None, torch.Tensor | None]:
    """(arguments of `tree_attention` less `own`, write, parents) of "tree", "chain", "causal" or "frozen" rows."""
    shape = dict(shape)
    kind, (batch, num_rows) = shape.pop("kind", "tree"), (shape["batch"], shape["num_rows"])
    args = gpu_attention.make(**shape, evicted=True)
    block_k, block_v = args.pop("block_k"), args.pop("block_v")
    if shape.get("window") is None:
        args["start"] = None
    length, parents = args["committed_len"][:, None], None
    args["positions"] = length + torch.arange(num_rows, device=DEVICE)
    if kind == "frozen":
        args["positions"] = length.expand(-1, num_rows)
        return args, None, None
    if kind == "tree":
        tree = gpu_attention.binary(num_rows)
        parents = torch.tensor(tree, device=DEVICE).expand(batch, -1)
        args["positions"] = length + torch.tensor(gpu_attention.depths(tree), device=DEVICE)
    size = args["page_size"]
    spare = -(-batch * num_rows // size) * size - batch * num_rows
    write = torch.arange(batch * num_rows, device=DEVICE).view(batch, num_rows) + len(args["pool_k"])
    for name, block in (("pool_k", block_k), ("pool_v", block_v)):
        rows = block.transpose(1, 2).flatten(0, 1)  # [B * N, Hkv, D]
        args[name] = torch.cat([args[name], rows, rows[:1].expand(spare, -1, -1)])
    return args, write, parents


def table_of(args: dict[str, Any]) -> dict[str, Any]:
    return {name: args[name] for name in ("pages", "start", "committed_len", "page_size")}


def close_error(shape: dict[str, Any], dtype: torch.dtype, **options: Any) -> float:
    shape = dict(shape)
    sinks, softcap = shape.pop("sinks", None), shape.pop("softcap", None)
    args, write, parents = arguments({**shape, "dtype": dtype})
    if sinks:
        args["sinks"] = torch.linspace(-1, 2, args["query"].shape[1], device=DEVICE).to(dtype)
    if shape.get("kind") == "causal":
        args["block_len"] = torch.arange(shape["batch"], device=DEVICE) * -7 + shape["num_rows"]
        args["block_len"].clamp_(min=1)
    args["softcap"] = softcap
    poison = torch.full((1 if ON_CPU else 64 << 20,), torch.nan, device=DEVICE)  # what torch.empty will hand out
    del poison
    out = tree_attention(own=own_keys(**table_of(args), write=write, parents=parents), **args, **options).double()
    exact = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in args.items()}
    own = reference_own_keys(**table_of(args), write=write, parents=parents)
    expected = deterministic_attention(own=own, **exact)
    if not out.isfinite().all():
        return float("nan")
    return float((out - expected).norm() / expected.norm().clamp(min=1e-30))


CLOSENESS_TILES = (None, RowTiles(16, 4, 2, None, True))


def closeness_cases() -> dict[str, dict[str, Any]]:
    case = gpu_attention.case
    return {
        **gpu_attention.CHECKS,
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
    }


def closeness_rows(quick: bool) -> Iterator[Row]:
    dtypes = {label: entry for label, entry in gpu_attention.DTYPES.items() if not (ON_CPU and label == "bf16")}
    for name, shape in closeness_cases().items():
        cells, good = [], True
        for label, (dtype, limit) in dtypes.items():
            for tiles in CLOSENESS_TILES:
                try:
                    e = close_error(gpu_attention.reduced(shape) if quick else shape, dtype, tiles=tiles)
                except Exception as exception:  # every case, then the verdict
                    e, cells = float("nan"), [*cells, f"{type(exception).__name__} {str(exception)[:200]}"]
                good &= e < limit
            cells.append(f"{label} {e:.1e}")
        yield Row(f"tree attention: {name}", ", ".join(cells), ok=good)


EXTRA_TILES = (RowTiles(16, 4, 3, 12, False), RowTiles(32, 4, 3, None, True), RowTiles(64, 4, 3, None, False))


class Text:
    """Queries, keys and values of a text of T tokens, its K and V in shuffled slots of a pool beside junk."""

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
        depth = torch.tensor(gpu_attention.depths(parents) if parents else list(range(num_rows)), device=DEVICE)
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
        own = own_keys(pages, start, committed, write, tree, page_size=self.page_size)
        return tree_attention(
            query.transpose(1, 2),
            self.pool_k,
            self.pool_v,
            own,
            pages,
            start,
            committed,
            committed[:, None] + depth,
            page_size=self.page_size,
            scaling=self.scaling,
            window=window,
            **options,
        )


def planted(num_nodes: int, begin: int, seed: int) -> tuple[list[int], list[int]]:
    """(parents, nodes): a random tree, the true tokens on the path to its deepest node and junk elsewhere."""
    rng = random.Random(seed)
    parents = [-1] + [rng.randrange(max(0, n - 5), n) for n in range(1, num_nodes)]
    depth = gpu_attention.depths(parents)
    node, nodes = max(range(num_nodes), key=lambda n: depth[n]), [-1] * num_nodes
    while node >= 0:
        nodes[node] = begin + depth[node]
        node = parents[node]
    return parents, nodes


def bit_comparisons(
    length: int, shape: dict[str, Any], dtype: torch.dtype, page_size: int
) -> Iterator[tuple[str, bool]]:
    """(what, whether it had the bits of token-by-token decoding) for every company a row can have."""
    heads, head_dim, window = shape["heads"], shape["head_dim"], shape.get("window")
    text = Text(length, heads, head_dim, dtype, page_size)
    positions = list(range(length))
    lone = torch.cat(
        [text.attend(positions[i : i + 1], [[i]], None, window)[:, 0] for i in positions[:: max(1, length // 24)]]
    )
    batched = []
    for i in range(0, length, 256):
        some = positions[i : i + 256]
        batched.append(text.attend(some, [[p] for p in some], None, window, width=-(-length // page_size) + 7)[:, 0])
    expected = torch.cat(batched)  # [T, Hq, D]
    yield "decode alone", torch.equal(lone, expected[:: max(1, length // 24)])
    block_d = 1 << (head_dim - 1).bit_length()
    tiles_of_rows: list[RowTiles | None] = [None]
    if dtype.itemsize == 2 and not ON_CPU:
        shared, cut = device_limits(DEVICE)[1], choose_cut(block_d, 2, heads[1])
        for tiles in EXTRA_TILES:
            if tiles.block_m == 64 and block_d > 256:
                tiles = tiles._replace(num_warps=8)
            tiles_of_rows.append(fit_rows(tiles, cut, block_d, 2, shared))
    begins = [0, 1, 15, 31, 32, 63, 64, 65, 127, 128, 200, length // 2, length - 300]
    begins = [b for b in begins if 0 <= b < length - 20]
    for size in (5, 16, 57, 300, 1000):
        if size >= length:
            continue
        spots = begins if size <= 57 else [0, 1, 63, length // 3]
        for tiles in tiles_of_rows if size in (16, 300) else tiles_of_rows[:1]:
            same = True
            for begin in spots:
                if begin + size <= length:
                    rows = text.attend([begin], [positions[begin : begin + size]], None, window, tiles=tiles)[0]
                    same &= torch.equal(rows, expected[begin : begin + size])
            yield f"chains and chunks of {size}{'' if tiles is None else f' {tuple(tiles)}'}", same
    for size in (8, 16, 200):
        for tiles in tiles_of_rows if size != 8 else tiles_of_rows[:1]:
            same = True
            for seed, begin in enumerate(begins):
                parents, nodes = planted(size, begin, seed)
                if max(nodes) >= length:
                    continue
                rows = text.attend([begin], [nodes], parents, window, tiles=tiles)[0]
                here = [n for n in range(size) if nodes[n] >= 0]
                same &= torch.equal(rows[here], expected[[nodes[n] for n in here]])
            yield f"trees of {size}{'' if tiles is None else f' {tuple(tiles)}'}", same
    parents, _ = planted(16, 0, 1)
    trees = [planted(16, begin, 1)[1] for begin in begins]
    same = True
    for rows, nodes in zip(text.attend(begins, trees, parents, window), trees, strict=True):
        here = [n for n in range(16) if nodes[n] >= 0]
        same &= torch.equal(rows[here], expected[[nodes[n] for n in here]])
    yield "trees in a batch", same
    if window is not None:
        some = [p for p in begins if p > 0]
        rows = text.attend(some, [[p] for p in some], None, window, evict=True)[:, 0]
        yield "evicted table", torch.equal(rows, expected[some])


BIT_SHAPES: dict[str, dict[str, Any]] = {
    **MODELS,
    "head 64, window 100": {"heads": (8, 1), "head_dim": 64, "window": 100},
    "head 80": {"heads": (6, 2), "head_dim": 80},
}


def bit_rows(quick: bool, only: list[str]) -> Iterator[Row]:
    for name, shape in BIT_SHAPES.items():
        if not any(text in name for text in only):
            continue
        for label, (dtype, _) in gpu_attention.DTYPES.items():
            if (ON_CPU and label == "bf16") or (quick and label == "fp16" and not ON_CPU):
                continue
            length = 90 if ON_CPU else 700 if label == "fp32" else 1500
            page_size = 16 if name == "Llama-8B" else 1
            failed, count = [], 0
            try:
                for what, same in bit_comparisons(length, shape, dtype, page_size):
                    count += 1
                    failed += [] if same else [what]
            except Exception as exception:
                failed.append(f"{type(exception).__name__} {str(exception)[:200]}")
            yield Row(
                f"bits: {name}, {label}",
                f"other bits: {'; '.join(failed)}" if failed else f"{count} equal",
                ok=not failed,
            )
            if not ON_CPU:
                torch.cuda.empty_cache()


def timed_shapes() -> dict[str, dict[str, Any]]:
    blocks = {"decode": (1, "chain"), "chain of 5": (5, "chain"), "tree of 8": (8, "tree"), "tree of 16": (16, "tree")}
    shapes: dict[str, dict[str, Any]] = {}
    for model, geometry in MODELS.items():
        for batch in (1, 8, 32):
            for context in (1024, 8192, 32768) if "window" not in geometry else (8192,):
                for block, (num_rows, kind) in blocks.items():
                    name = f"{model}, batch {batch}, {context // 1024}k, {block}"
                    shapes[name] = {
                        "batch": batch, "length": context, "num_rows": num_rows, "kind": kind, **geometry
                    }  # fmt: skip
    for model, geometry in MODELS.items():
        shapes[f"{model}, prefill 2k"] = {"batch": 1, "length": 0, "num_rows": 2048, "kind": "causal", **geometry}
        shapes[f"{model}, prefill 2k on 8k"] = {
            "batch": 1,
            "length": 8192,
            "num_rows": 2048,
            "kind": "causal",
            **geometry,
        }
    return shapes


def inputs_of(shape: dict[str, Any], sets: int | None = None) -> list[tuple[dict[str, Any], OwnKeys]]:
    """Arguments of as many calls as exceed the L2 cache together."""
    if sets is None:
        sets = max(2, min(48, -(-300_000_000 // gpu_attention.kv_bytes(shape))))
    found = []
    for seed in range(sets):
        args, write, parents = arguments({**shape, "seed": seed})
        found.append((args, own_keys(**table_of(args), write=write, parents=parents)))
    return found


def calls_of(inputs: list[tuple[dict[str, Any], OwnKeys]], **options: Any) -> list[Callable[[], Any]]:
    return [lambda args=args, own=own: tree_attention(own=own, **args, **options) for args, own in inputs]


def flops(shape: dict[str, Any]) -> int:
    """Counts operations of a causal shape: four a pair of visible row and key, head and channel."""
    window = shape.get("window") or 1 << 40
    pairs = sum(min(shape["length"] + i + 1, window) for i in range(shape["num_rows"]))
    return 4 * shape["batch"] * pairs * shape["heads"][0] * shape["head_dim"]


def replay_time(calls: list[Callable[[], Any]], replays: int = 12) -> float:
    return gpu_attention.graph_time(calls, replays)


def timing_rows(only: list[str]) -> Iterator[Row]:
    read, copy = gpu_attention.bandwidth()
    yield Row("measured bandwidth", "", f"read {read / 1e9:.0f} GB/s, copy {copy / 1e9:.0f} GB/s")
    for name, shape in timed_shapes().items():
        if not any(text in name for text in only):
            continue
        size = gpu_attention.kv_bytes(shape)
        try:
            seconds = replay_time(calls_of(inputs_of(shape)))
        except Exception as exception:
            yield Row(name, f"{type(exception).__name__} {str(exception)[:200]}", ok=False)
            continue
        finally:
            torch.cuda.empty_cache()
        of_read = f"floor {size / read * 1e6:.1f} us, {size / seconds / read:.0%} of read"
        if shape["kind"] == "causal":
            of_read = f"{flops(shape) / seconds / 1e12:.0f} TFLOP/s"
        yield Row(name, "", f"{seconds * 1e6:.1f} us, {of_read}")


def tilings(shape: dict[str, Any]) -> list[RowTiles]:
    """Row tilings worth trying for a timed shape."""
    prefill = shape["num_rows"] > 64
    found = []
    for block_m in (16, 32, 64):
        for stages in (3, 5):
            num_warps = 8 if block_m == 64 and shape["head_dim"] > 256 else 4
            for fold in (False, True) if prefill else (False,):
                found.append(RowTiles(block_m, num_warps, stages, None, fold))
    return found


def tune(name: str) -> None:
    """Every row tiling of one timed shape, best first."""
    shape, found = timed_shapes()[name], []
    inputs = inputs_of(shape)
    for tiles in tilings(shape):
        try:
            found.append((replay_time(calls_of(inputs, tiles=tiles), 6), tiles))
        except Exception as exception:
            print(type(exception).__name__, tiles, str(exception)[:100].replace("\n", " "), flush=True)
    for seconds, tiles in sorted(found):
        print(f"{name:44} {tuple(tiles)!s:36} {seconds * 1e6:8.1f} us", flush=True)


def warm_jobs(options: argparse.Namespace) -> list[Callable[[], Any]]:
    """One call of everything that the run will launch."""
    jobs: list[Callable[[], Any]] = []
    for name in options.tune:
        shape = timed_shapes()[name]
        for tiles in {tiles._replace(rows=None): tiles for tiles in tilings(shape)}.values():
            jobs.append(lambda s=shape, t=tiles: calls_of(inputs_of({**s, "batch": 1}, 1), tiles=t)[0]())
    if "closeness" in options.parts:
        for shape in closeness_cases().values():
            for dtype, _ in gpu_attention.DTYPES.values():
                jobs.append(lambda s=shape, d=dtype: [close_error(s, d, tiles=t) for t in CLOSENESS_TILES])
    if "bits" in options.parts:
        for name, shape in BIT_SHAPES.items():
            for dtype, _ in gpu_attention.DTYPES.values() if any(text in name for text in options.bits_of) else ():
                jobs.append(lambda s=shape, d=dtype: list(bit_comparisons(130, s, d, 16 if s is LLAMA_8B else 1)))
    if "timings" in options.parts:
        seen = set()
        for name, shape in timed_shapes().items():
            key = (str(shape.get("window")), shape["heads"], shape["num_rows"], shape["kind"], shape["batch"])
            if any(text in name for text in options.only) and key not in seen:
                seen.add(key)
                jobs.append(lambda s=shape: calls_of(inputs_of({**s, "length": min(s["length"], 1024)}, 1))[0]())
    random.Random(0).shuffle(jobs)
    return jobs


def warm(options: argparse.Namespace) -> None:
    """Compile in as many processes as there are cores."""
    processes = max(1, min(15, (os.cpu_count() or 2) - 1))
    begin = time.perf_counter()
    command = [sys.executable, *sys.argv]
    children = [subprocess.Popen([*command, "--warm", f"{i}/{processes}"]) for i in range(processes)]
    for child in children:
        child.wait()
    print(f"compiled by {processes} processes in {time.perf_counter() - begin:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, parents=[device_option])
    parser.add_argument("--quick", action="store_true", help="small shapes, no timings")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which of the three to do")
    parser.add_argument("--only", nargs="+", default=[""], help="time the shapes whose name holds one of these")
    parser.add_argument("--bits-of", nargs="+", default=[""], help="compare bits of the shapes whose name holds one")
    parser.add_argument("--tune", nargs="+", default=[], choices=timed_shapes(), help="try row tilings of timed shapes")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the table there too")
    options = parser.parse_args()
    require_device()
    if options.warm:
        index, count = map(int, options.warm.split("/"))
        for job in warm_jobs(options)[index::count]:
            try:
                job()
            except Exception as exception:  # the run itself will tell
                print("warm:", type(exception).__name__, str(exception)[:200], flush=True)
        return 0
    if not ON_CPU:
        warm(options)
    results = ResultTable(machine())
    if "closeness" in options.parts:
        results.add(closeness_rows(options.quick or ON_CPU))
    if "bits" in options.parts:
        results.add(bit_rows(options.quick, options.bits_of))
    for name in options.tune:
        tune(name)
    if "timings" in options.parts and not (results.failed or options.quick or ON_CPU):
        results.add(timing_rows(options.only))
    return results.finish(options.out)


if __name__ == "__main__":
    sys.exit(main())
