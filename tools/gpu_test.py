"""Everything that needs a GPU, in one run and one Markdown table: `make gpu-test`, or `python tools/gpu_test.py`.

    kernels   attention of drafts against float64; page tables, store, move, trees and walks against plain torch
    engine    attention "torch" and "triton" against transformers' eager forward, every drafter, chains and trees
    graphs    captured rounds against rounds as they are, 200 requests at a time; no wait for the host, a level memory
    crowd     200 requests, 128 at once, in short pools, aborts and all: each as alone, and nothing is left
    timings   attention against measured read bandwidth, the small kernels in microseconds

`--parts` names checks, so that several processes can do them at a time. Exits with 1 when a check fails (and times
nothing then), with 2 where there is no CUDA device. `--quick` keeps small shapes of everything and no timings, for
the sanitizer:

    compute-sanitizer --tool memcheck  --error-exitcode 1 python tools/gpu_test.py --quick --kernels
    compute-sanitizer --tool racecheck --error-exitcode 1 python tools/gpu_test.py --quick --kernels
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from gpu_setup import ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import gpu_attention
import gpu_crowd
import gpu_engine
import gpu_graphs
import gpu_tables
import torch
from result_table import ResultTable, Row

PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "attention": gpu_attention.check_rows,
    "tables": gpu_tables.check_rows,
    "engine": gpu_engine.check_rows,
    "graphs": gpu_graphs.check_rows,
    "crowd": gpu_crowd.check_rows,
}


def timing_rows() -> Iterator[Row]:
    """Figures rather than checks, but for the limit on page tables."""
    read, copy = gpu_attention.bandwidth()
    yield Row("measured bandwidth", "", f"read {read / 1e9:.0f} GB/s, copy {copy / 1e9:.0f} GB/s")
    for figure in gpu_attention.timed(read):
        spent = f"{figure['seconds'] * 1e6:.1f} us, {figure['of_read']:.0%} of read bandwidth"
        yield Row(f"attention of drafts: {figure['case']}", "", spent)
    for what, us, swa, reference in gpu_tables.timed_rows():
        late = swa is not None and us >= gpu_tables.LIMIT_US
        parts = [f"{us:.2f} us", *([] if swa is None else [f"{swa:.2f} us without the full table"])]
        parts += [] if reference is None else [f"plain torch {reference:.2f} us"]
        error = f"slower than {gpu_tables.LIMIT_US:.0f} us" if late else ""
        yield Row(" ".join(what.split()), error, ", ".join(parts), ok=not late)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    parser.add_argument("--quick", action="store_true", help="small shapes, no timings")
    parser.add_argument("--kernels", action="store_true", help="not the engine: --parts attention tables")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="checks to do; timings with all")
    parser.add_argument("--out", type=Path, help="write the table there too")
    options = parser.parse_args()
    require_device()
    quick = options.quick or ON_CPU
    torch.manual_seed(0)
    parts = ["attention", "tables"] if options.kernels else options.parts
    sources = [rows(quick) for part, rows in PARTS.items() if part in parts]
    results = ResultTable(f"{machine()}{', small shapes' if quick else ''}")
    results.add(itertools.chain(*sources))
    if not results.failed and not quick and len(parts) == len(PARTS):  # no figure of what is wrong
        results.add(timing_rows())
    return results.finish(options.out)


if __name__ == "__main__":
    sys.exit(main())
