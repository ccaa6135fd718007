"""Check the attention of drafts on a GPU against float64, then time it against measured bandwidth.

    python tools/gpu_attention.py [--check] [--tune CASE] [--json FILE]

Bytes count every visible K and V once, and nothing else; the time is that of a CUDA graph that runs the call on
several pools in turn, together far larger than the L2 cache, divided by the number of calls. Nothing is timed when a
check fails.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
import triton
import triton.language as tl
from result_table import Row, table_head, table_row

from specdec.attention.kernels import paged_attention as pa
from specdec.attention.kernels import paged_attention_kernels as kernels

DTYPES = {"bf16": (torch.bfloat16, 1e-2), "fp16": (torch.float16, 2e-3), "fp32": (torch.float32, 2e-6)}


def make(
    batch: int,
    length: int,
    num_rows: int,
    heads: tuple[int, int],
    head_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 1,
    window: int | None = None,
    ragged: bool = False,
    seed: int = 0,
    evicted: bool = False,
) -> dict[str, Any]:
    """A committed prefix in shuffled pages, NaN in every slot that holds none of it, and a block of rows after it.

    ragged: prefixes of up to `length` keys. evicted: tables begin with what the window needs."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    hq, hkv = heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=DEVICE, dtype=torch.float32).to(dtype)

    committed = torch.full((batch,), length, device=DEVICE)
    if ragged:
        committed = torch.randint(0, length + 1, (batch,), generator=g, device=DEVICE)
    start = torch.zeros_like(committed)
    width = length
    if evicted and window is not None:
        start = (committed - window - num_rows).clamp(min=0) // page_size * page_size
        width = min(length, window + num_rows + page_size)
    num_pages = -(-width // page_size)
    pages = torch.randperm(batch * num_pages, generator=g, device=DEVICE).view(batch, num_pages) + 1
    slots = (pages[:, :, None] * page_size + torch.arange(page_size, device=DEVICE)).flatten(1)
    held = start[:, None] + torch.arange(slots.shape[1], device=DEVICE) < committed[:, None]
    pool_k, pool_v = (
        torch.full(((batch * num_pages + 1) * page_size, hkv, head_dim), torch.nan, device=DEVICE, dtype=dtype)
        for _ in range(2)
    )
    pool_k[slots[held]], pool_v[slots[held]] = (normal(int(held.sum()), hkv, head_dim) for _ in range(2))
    query, block_k, block_v = (normal(batch, num_rows, count, head_dim).transpose(1, 2) for count in (hq, hkv, hkv))
    return {
        "query": query,
        "block_k": block_k,
        "block_v": block_v,
        "pool_k": pool_k,
        "pool_v": pool_v,
        "pages": pages,
        "start": start,
        "committed_len": committed,
        "page_size": page_size,
        "scaling": head_dim**-0.5,
        "window": window,
    }


def binary(num_nodes: int) -> list[int]:
    """Parents: node n is a child of node (n - 1) // 2."""
    return [-1] + [(n - 1) // 2 for n in range(1, num_nodes)]


def depths(parents: list[int]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def draft(level: int | None = None, **shape: Any) -> dict[str, Any]:
    """Arguments of `paged_attention`: the newest `level` nodes of a binary tree of `num_rows`; None: all of them."""
    args = make(**shape)
    del args["start"]
    batch, num_nodes = shape["batch"], shape["num_rows"]
    newest = slice(num_nodes - (level or num_nodes), None)
    parents = binary(num_nodes)
    bits = torch.zeros((num_nodes, -(-num_nodes // pa.WORD)), dtype=torch.int64)
    for node, parent in enumerate(parents):
        bits[node] = bits[parent] if parent >= 0 else 0
        bits[node, node // pa.WORD] |= torch.tensor(1) << node % pa.WORD
    positions = args["committed_len"][:, None] + torch.tensor(depths(parents), device=DEVICE)
    return {
        **args,
        "query": args["query"][:, :, newest],
        "block_positions": positions,
        "positions": positions[:, newest],
        "ancestors": bits[newest].to(DEVICE).repeat(batch, 1, 1),
    }


def case(batch: int, length: int, num_rows: int, heads: tuple[int, int], head_dim: int, **extra: Any) -> dict[str, Any]:
    shape = {"batch": batch, "length": length, "num_rows": num_rows, "heads": heads, "head_dim": head_dim}
    return {**shape, **extra}


CHECKS: dict[str, dict[str, Any]] = {
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
}


LEVELS: dict[str, dict[str, Any]] = {
    "level of 8 of 200": case(3, 1000, 200, (8, 2), 256, level=8),
    "level of 16 of 80, window": case(3, 700, 80, (32, 8), 128, level=16, window=128),
}


def error(shape: dict[str, Any], dtype: torch.dtype) -> float:
    """|out - reference| / |reference|, the reference in float64."""
    shape = dict(shape)
    sinks, softcap = shape.pop("sinks", None), shape.pop("softcap", None)
    args = draft(**shape, dtype=dtype)
    if sinks:
        args["sinks"] = torch.linspace(-1, 2, args["query"].shape[1], device=DEVICE).to(dtype)
    args["softcap"] = softcap
    poison = torch.full((1 if ON_CPU else 64 << 20,), torch.nan, device=DEVICE)  # what torch.empty will hand out
    del poison
    out = pa.paged_attention(**args).double()
    exact = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in args.items()}
    expected = pa.reference_paged_attention(**exact)
    if not out.isfinite().all():
        return float("nan")
    return float((out - expected).norm() / expected.norm().clamp(min=1e-30))


def reduced(shape: dict[str, Any]) -> dict[str, Any]:
    """Reduces a case, so that it is small enough for a sanitizer or the interpreter."""
    most = {"batch": 2, "length": 70, "num_rows": 20, "window": 24}
    return {key: min(value, most.get(key, value)) if type(value) is int else value for key, value in shape.items()}


def check_rows(quick: bool = False) -> Iterator[Row]:
    """Every case in every dtype against float64."""
    dtypes = {label: entry for label, entry in DTYPES.items() if not (ON_CPU and label == "bf16")}  # not interpreted
    for name, shape in (CHECKS | LEVELS).items():
        cells, good = [], True
        for label, (dtype, limit) in dtypes.items():
            try:
                e = error(reduced(shape) if quick else shape, dtype)
            except Exception as exception:  # every case, then the verdict
                e, cells = float("nan"), [*cells, f"{type(exception).__name__} {str(exception)[:200]}"]
            cells.append(f"{label} {e:.1e}")
            good &= e < limit
        yield Row(f"attention: {name}", ", ".join(cells), ok=good)
    if ON_CPU:
        return
    before = len(compiled())
    for length, num_rows in itertools.product([5, 16, 1024, 2000], [9, 16]):
        for window in (None, 64):
            pa.paged_attention(**draft(**case(2, length, num_rows, (8, 2), 256, window=window)))
    yield Row("attention: variants compiled for 16 launches of other lengths", str(len(compiled()) - before))


def check() -> bool:
    good = True
    for row in check_rows():
        print(f"{row.check:40} {row.error}{'' if row.ok else '  FAILED'}", flush=True)
        good &= row.ok
    print("ALL CHECKS PASSED" if good else "CHECKS FAILED", flush=True)
    return good


def compiled() -> Any:
    return kernels.attend_kernel.device_caches[torch.cuda.current_device()][0]


@triton.jit
def read_kernel(p_x: tl.tensor, p_out: tl.tensor, steps: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Read everything, write what nobody needs if it is there."""
    i = tl.program_id(0).to(tl.int64)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_step in tl.range(0, steps, num_stages=4):
        b_sum += tl.load(p_x + (i * steps + i_step) * BLOCK + tl.arange(0, BLOCK))
    tl.store(p_out + i, tl.sum(b_sum, 0))


def graph_time(calls: list[Callable[[], Any]], replays: int = 30) -> float:
    """Median seconds of one call, all of them replayed in turn from one CUDA graph, on a GPU kept busy before."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(replays):
        graph.replay()
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def bandwidth() -> tuple[float, float]:
    """(read, copy counted both ways), bytes a second, on 4 GiB."""
    x, y = (torch.randn(1 << 30, device=DEVICE) for _ in range(2))
    copy = 2 * x.nbytes / graph_time([lambda: torch.mul(x, 1.5, out=y)], 8)  # a kernel, not the copy engine
    rates = []
    for programs in (132 * 8, 1 << 14):
        steps = x.numel() // programs // 2048
        out = torch.empty(programs, device=DEVICE)
        seconds = graph_time(
            [lambda p=programs, s=steps, o=out: read_kernel[(p,)](x, o, s, BLOCK=2048, num_warps=4)], 8
        )
        rates.append(programs * steps * 2048 * 4 / seconds)
    rates.append(x.nbytes / graph_time([lambda: x.sum()], 8))
    return max(rates), copy


TIMED: dict[str, dict[str, Any]] = {
    "one node": case(8, 8192, 1, (8, 2), 256),
    "8 nodes": case(8, 8192, 8, (8, 2), 256),
    "16 nodes": case(8, 8192, 16, (8, 2), 256),
    "64 nodes": case(8, 8192, 64, (8, 2), 256),
    "pages of 16": case(8, 8192, 16, (8, 2), 256, page_size=16),
    "window 1024": case(8, 8192, 16, (8, 2), 256, window=1024),
    "head 512": case(8, 8192, 16, (8, 2), 512),
    "one node, head 512": case(8, 8192, 1, (8, 2), 512),
    "head 128": case(8, 8192, 16, (32, 8), 128),
    "one node, head 128": case(8, 8192, 1, (32, 8), 128),
    "level of 8 of 48, head 128": case(8, 8192, 48, (32, 8), 128, level=8),
    "batch 1": case(1, 8192, 16, (8, 2), 256),
    "batch 1, 64k": case(1, 65536, 16, (8, 2), 256),
}


def kv_bytes(shape: dict[str, Any]) -> int:
    """Bytes of K and V that some row of the shape can see, each once."""
    keys = shape["length"] if shape.get("window") is None else min(shape["length"], shape["window"] - 1)
    keys += 0 if shape.get("kind") == "frozen" else shape["num_rows"]
    return 2 * shape["batch"] * keys * shape["heads"][1] * shape["head_dim"] * 2


def seconds_of(shape: dict[str, Any], **options: Any) -> float:
    sets = max(4, min(64, -(-400_000_000 // kv_bytes(shape))))
    calls = []
    for seed in range(sets):
        args = draft(**shape, seed=seed)
        calls.append(lambda args=args: pa.paged_attention(**args, **options))
    return graph_time(calls)


def timed(read: float) -> Iterator[dict[str, Any]]:
    """Figures of every timed shape; `read`: bytes a second that the device can read."""
    for name, shape in TIMED.items():
        seconds, size = seconds_of(shape), kv_bytes(shape)
        yield {
            "case": name,
            **shape,
            "bytes": size,
            "seconds": seconds,
            "of_read": size / seconds / read,
        }


def tune(name: str, read: float) -> None:
    """Every sensible tiling of one shape, best first."""
    shape = TIMED[name]
    packed = (shape.get("level") or shape["num_rows"]) * shape["heads"][0] // shape["heads"][1]
    rows = sorted({min(m, max(16, triton.next_power_of_2(packed))) for m in (16, 32, 64, 128)})
    found = []
    for m, k, w, s, waves in itertools.product(rows, (16, 32, 64), (4, 8), (2, 3, 5, 7), (1.0, 2.0)):
        if m < min(64, packed) or (m * k < 512 and w == 8):
            continue
        try:
            found.append((seconds_of(shape, tiles=pa.Tiles(m, k, w, s, waves)), (m, k, w, s, waves)))
        except Exception as exception:
            if "OutOfResources" not in type(exception).__name__:
                print(type(exception).__name__, (m, k, w, s), flush=True)
    for seconds, tiles in sorted(found)[:12]:
        share = kv_bytes(shape) / seconds / read
        print(f"{name:22} {tiles!s:24} {seconds * 1e6:8.1f} us  {share:6.1%}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, parents=[device_option])
    parser.add_argument("--check", action="store_true", help="only check")
    parser.add_argument("--tune", action="append", default=[], choices=sorted(TIMED), help="only try tilings of a case")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    if options.json:
        options.json.open("a").close()  # now, not after the work
    require_device()
    print(machine(), flush=True)
    if not options.tune:
        good = check()
        if options.check or not good or ON_CPU:
            return 0 if good else 1
    read, copy = bandwidth()
    print(f"measured: read {read / 1e9:.0f} GB/s, copy {copy / 1e9:.0f} GB/s read and written", flush=True)
    for name in options.tune:
        tune(name, read)
    if options.tune:
        return 0
    print(table_head("case, bf16", "MB of K, V", "us", "GB/s", "of read"))
    figures = []
    for figure in timed(read):
        cells = [figure["case"], f"{figure['bytes'] / 1e6:.1f}", f"{figure['seconds'] * 1e6:.1f}"]
        cells += [f"{figure['bytes'] / figure['seconds'] / 1e9:.0f}", f"{figure['of_read']:.1%}"]
        print(table_row(cells))
        figures.append(figure)
    if options.json:
        options.json.write_text(json.dumps({"read": read, "copy": copy, "cases": figures}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
