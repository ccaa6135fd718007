"""Rounds of published shapes with random weights, 16-bit and packed, each next to its memory floor.

What `specdec bench --shape S --weights W` measures, for one shape after the other in one process. A row whose tokens
are not transformers' own on the dequantised weights shows no times and fails. Each cell is measured twice and the
second is shown: before the first, kernels are compiled, and the clock of a GPU that has waited is low.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from bench.device import ON_CPU  # isort: skip - before triton
import torch

from bench.figures import E4B, readme_rows
from bench.report import Row
from bench.subjects import subject_of
from bench.verify import rows_of_each
from specdec.config import SpecConfig
from specdec.measurement.model_shapes import ON_REQUEST, block_spec_of, find_shape
from specdec.measurement.phase_report import Cell, cell_figures
from specdec.measurement.phase_run import PLAIN, BenchSubject, Plan, run_phases
from specdec.measurement.random_weights import drafter_of
from specdec.models.weight_storage import stored_weights

BLOCK = 16
LAST = BLOCK - 1
"""Drafts of a block."""
OWN_DRAFTS = {"plain step": None, "EAGLE-3, chain of 4": SpecConfig(4)}
BLOCK_DRAFTS = {
    "block, chain of 15": SpecConfig(LAST),
    "block, tree of 31": SpecConfig(LAST, 4, 32),
    "block, tree of 63": SpecConfig(LAST, 8, 64),
}
DEVICE_STAGES = ("draft", "verify", "other")
BOUNDS = {"block, chain of 15": 1.35, "block, tree of 31": 1.5}
"""How many plain steps a round may take."""


def measured(subject: BenchSubject, batch: int, context: int, rounds: int) -> list[Cell]:
    """A cell for each draft of the subject, from the second of two runs."""
    plan = Plan(batches=[batch], contexts=[context], rounds=rounds)
    return [run_phases(subject, plan).cells for _ in range(1 if ON_CPU else 2)][-1]


def cell_row(name: str, cell: Cell, note: str = "", *, ok: bool = True) -> Row:
    figures = {**cell_figures(cell), "uncaptured": cell.uncaptured, "note": note}
    return Row(name, ok=ok and cell.shown, figures=figures)


def cells_rows(
    shapes: Sequence[str],
    batches: Sequence[int],
    contexts: Sequence[int],
    drafts: Sequence[str],
    rounds: int,
    layers: int,
    devices: int,
) -> Iterator[Row]:
    """A shape that does not fit or run is a row, and the others are measured."""

    def rows(pair: str) -> Iterator[Row]:
        known = {PLAIN: None, **find_shape(pair.partition(":")[0]).drafts, **ON_REQUEST}
        begin = time.perf_counter()
        subject = subject_of(pair, {name: known[name] for name in drafts}, layers, devices)
        yield Row(pair, about(subject), f"made in {time.perf_counter() - begin:.1f} s")
        for context, batch in product(contexts, batches):
            yield from (cell_row(pair, cell) for cell in measured(subject, batch, context, rounds))

    yield from rows_of_each(shapes, rows)


def about(subject: BenchSubject) -> str:
    """What the target is in memory, and whether its layers are fused."""
    stored = stored_weights(subject.target.model)
    peak = "" if ON_CPU else f", peak {torch.cuda.max_memory_allocated() / 1e9:.1f}"
    fused = "fused" if subject.target.unfused is None else f"not fused: {subject.target.unfused}"
    return f"{stored.bytes / 1e9:.2f} GB{peak}, {stored.summary(subject.target.dtype)}, {fused}"


def block_rows(rounds: int, context: int, layers: int) -> Iterator[Row]:
    """A block drafter at the shape of Qwen3-8B, next to a plain step and to the EAGLE-3 head of that shape. Bounds hold
    at full depth."""
    subject = subject_of("qwen3-8b", OWN_DRAFTS, layers)
    spec = block_spec_of(subject.target.config, "dflash", layers=1 if ON_CPU else 5, block_size=BLOCK)
    block = replace(subject, drafter=drafter_of(spec, subject.target, 1), drafts=BLOCK_DRAFTS)
    cells = [cell for each in (subject, block) for cell in measured(each, 1, context, rounds)]
    took = [sum(cell.ms[stage].median for stage in DEVICE_STAGES if stage in cell.ms) for cell in cells]
    for cell, total in zip(cells, took, strict=True):
        bound = BOUNDS.get(cell.run)
        note = f"{total / max(took[0], 1e-9):.2f}x plain" + (f", at most {bound}x" if bound else "")
        yield cell_row("qwen3-8b", cell, note, ok=ON_CPU or layers > 0 or bound is None or total <= bound * took[0])


def recorded_rows() -> Iterator[Row]:
    """The rows as they are recorded."""
    for line in readme_rows():
        print(line, flush=True)
    yield Row(f"{len(E4B)} rows are printed")


def measured_rows(rounds: int, context: int, layers: int) -> Iterator[Row]:
    """The rows of the README's GPU table, as they are today on this device, next to the peer's recorded figures."""
    subject = subject_of("gemma4-e4b", {PLAIN: None, "chain": SpecConfig(4)}, layers)
    found = {}
    for batch in E4B:
        plain, drafted = measured(subject, batch, context, rounds)
        yield cell_row("gemma4-e4b", plain)
        yield cell_row("gemma4-e4b", drafted)
        if plain.shown and drafted.shown:
            found[batch] = replace(E4B[batch], plain=plain.ms["round"].median, drafts=drafted.ms["round"].median)
    for line in readme_rows(found):
        print(line, flush=True)
