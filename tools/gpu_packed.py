"""Rounds of published shapes with packed random weights, each next to its memory floor: `python tools/gpu_packed.py`.

    python tools/gpu_packed.py --shapes gemma4-e4b:bf16 gemma4-e4b:int4-g32 llama-70b:int4-g32 --batches 1 8

What `specdec bench --shape S --weights W` measures, for one shape after the other in one process; each row is printed
when it is measured. A row whose tokens are not transformers' own on the dequantised weights shows no times and fails.
`--unchecked` leaves that check out: with many experts it takes longer than the rounds. Floors count the words and
scales of packed weights. Each cell is measured twice and the second is shown: before the first, kernels are compiled,
and the clock of a GPU that has waited for that is low. `--prompt` is the time to read a prompt of so many tokens.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
from result_table import table_head, table_row

from specdec.config import EngineConfig, SamplingParams
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.evaluation.model_shapes import ON_REQUEST, find_shape
from specdec.evaluation.phases import phase_run
from specdec.evaluation.phases.parity import Parity
from specdec.evaluation.phases.phase_report import Cell
from specdec.evaluation.phases.phase_run import PLAIN, Plan, Subject, run_phases
from specdec.evaluation.phases.random_weights import UNPACKED, find_form, random_subject
from specdec.models.weight_storage import stored_weights

PAIRS = (
    *("gemma4-e4b:bf16", "gemma4-e4b:int4-g32", "gemma4-e4b:fp8", "gemma4-31b:bf16", "gemma4-31b:int4-g32"),
    *("gpt-oss-20b:mxfp4", "gpt-oss-120b:mxfp4", "llama-70b:int4-g32"),
)
WIDE_TREES = {"llama-70b": ("tree60",)}
"""Drafts measured of a shape beyond plain decoding and the chain."""
HEADS = ("shape", "weights", "batch", "run", "ms a round", "floor", "x floor", "draft", "verify", "other", "checked")


def unchecked(*given: Any) -> Parity:
    return Parity(passed=True, tokens=0, exact=0, worst=0.0, tolerance=0.0)


def measure(pair: str, args: argparse.Namespace) -> int:
    """Print the rows of one SHAPE:WEIGHTS -> how many have no times."""
    name, _, weights = pair.partition(":")
    shape, begin = find_shape(name), time.perf_counter()
    drafts = {PLAIN: None, **shape.drafts, **ON_REQUEST}
    wanted = args.drafts or (PLAIN, "chain", *WIDE_TREES.get(name, ()))
    subject = random_subject(
        shape,
        {draft: drafts[draft] for draft in wanted},
        weights=weights or None,
        layers=args.layers,
        divisor=args.shrink,
        config=EngineConfig(device=DEVICE),
    )
    made = time.perf_counter() - begin
    print(table_row([name, weights, "", about(subject, made), *[""] * (len(HEADS) - 4)]), flush=True)
    failed = 0
    if args.prompt:
        cells = [name, weights, 1, f"prompt of {args.prompt}", f"{prompt_ms(subject, args.prompt):.2f}"]
        print(table_row([*cells, *[""] * (len(HEADS) - len(cells))]), flush=True)
    for batch in args.batches:
        for draft in wanted:
            measured(subject, draft, batch, args)
            cell = measured(subject, draft, batch, args)
            print(table_row(row_of(pair, cell)), flush=True)
            failed += not cell.shown
    return failed


def measured(subject: Subject, draft: str, batch: int, args: argparse.Namespace) -> Cell:
    plan = Plan(batches=[batch], contexts=[args.context], rounds=args.rounds)
    one = replace(subject, drafts={draft: subject.drafts[draft]})
    with mock.patch.object(phase_run, "check_parity", unchecked) if args.unchecked else nullcontext():
        [cell] = run_phases(one, plan).cells
    return cell


def prompt_ms(subject: Subject, length: int) -> float:
    """In one chunk: the median of five after two."""
    config = EngineConfig(max_batch_size=1, max_model_len=length + 64, prefill_chunk=length, prefix_cache=False)
    [prompt] = subject.prompts(1, length)
    with Engine(subject.target, None, config=config) as engine:
        outs = [engine.generate(prompt, SamplingParams(max_new_tokens=1), progress=False)[0] for _ in range(7)]
    return statistics.median(out.stats.prefill_seconds for out in outs[2:]) * 1e3


def row_of(pair: str, cell: Cell) -> Sequence[object]:
    name, _, weights = pair.partition(":")
    times = {stage: f"{spread.median:.2f}" for stage, spread in cell.ms.items()}
    ratio = "" if cell.x_floor is None else f"{cell.x_floor:.2f}"
    checked = cell.parity.words if cell.parity and cell.parity.tokens else "not checked"
    figures = [times.get("round", ""), f"{cell.floor_ms:.2f}", ratio]
    stages = [times.get(stage, "") for stage in ("draft", "verify", "other")]
    return [name, weights, cell.batch, cell.run, *figures, *stages, cell.note or checked]


def about(subject: Subject, made: float) -> str:
    """What the target is in memory, and whether its layers are fused."""
    stored = stored_weights(subject.target.model)
    peak = "" if ON_CPU else f", peak {torch.cuda.max_memory_allocated() / 1e9:.1f}"
    size = f"{stored.bytes / 1e9:.2f} GB{peak}, {stored.words(subject.dtype)}"
    fused = "fused" if subject.target.unfused is None else f"NOT FUSED: {subject.target.unfused}"
    return f"{size}, made in {made:.1f} s, {fused}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE:WEIGHTS", default=PAIRS, help="in this order")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", nargs="+", help="default: plain, chain, and tree60 of llama-70b")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--prompt", type=int, help="tokens")
    parser.add_argument("--layers", type=int, help="only so many of each shape")
    parser.add_argument("--shrink", type=int, default=1, help="widths divided by this")
    parser.add_argument("--unchecked", action="store_true", help="do not compare tokens with transformers")
    args = parser.parse_args()
    try:  # before anything is made
        for name, _, weights in (pair.partition(":") for pair in args.shapes):
            find_shape(name), find_form(weights or UNPACKED)
    except ConfigError as error:
        parser.error(str(error))
    require_device()
    print(f"{machine()}, context {args.context}, milliseconds\n\n{table_head(*HEADS)}", flush=True)
    failed = 0
    for pair in args.shapes:
        try:
            failed += measure(pair, args)
        except Exception as error:  # one shape that does not fit or run is a row, and the others are measured
            failed += 1
            print(table_row([pair, f"{type(error).__name__}: {error}", *[""] * (len(HEADS) - 2)]), flush=True)
        gc.collect()
        if not ON_CPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
