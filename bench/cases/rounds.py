"""Rounds of published shapes with random weights, 16-bit and packed, each next to its memory floor.

What `specdec bench --shape S --weights W` measures, for one shape after the other in one process. A row whose tokens
are not transformers' own on the dequantised weights shows no times and fails. Each cell is measured twice and the
second is shown: before the first, kernels are compiled, and the clock of a GPU that has waited is low.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.device import DEVICE, DIVISOR, ON_CPU, free_memory  # isort: skip - before triton
import torch

from bench.figures import E4B, readme_rows
from bench.report import Row
from bench.verify import attempt_all
from specdec.config import EngineConfig, SpecConfig
from specdec.evaluation.model_shapes import ON_REQUEST, block_spec_of, find_shape
from specdec.evaluation.phases.phase_report import Cell
from specdec.evaluation.phases.phase_run import PLAIN, BenchSubject, Plan, run_phases
from specdec.evaluation.phases.random_weights import drafter_of, random_subject
from specdec.models.weight_storage import stored_weights

BLOCK = 16
LAST = BLOCK - 1
"""Drafts of a block."""
BLOCK_CASES: dict[str, tuple[str, SpecConfig | None, float | None]] = {
    "plain step": ("none", None, None),
    "block, chain of 15": ("block", SpecConfig(LAST), 1.35),
    "block, tree of 31": ("block", SpecConfig(LAST, 4, 32), 1.5),
    "block, tree of 63": ("block", SpecConfig(LAST, 8, 64), None),
    "EAGLE-3, chain of 4": ("own", SpecConfig(4), None),
}
"""What is timed: the drafter, its draft, and how many plain steps a round may take."""


def subject_of(pair: str, drafts: Mapping[str, SpecConfig | None], layers: int, devices: int = 1) -> BenchSubject:
    name, _, weights = pair.partition(":")
    config = EngineConfig(device=DEVICE, tensor_parallel=devices, fused=devices > 1 or "auto")
    return random_subject(
        find_shape(name),
        drafts,
        weights=weights or None,
        layers=2 if ON_CPU else layers or None,
        divisor=DIVISOR,
        config=config,
    )


def measured(subject: BenchSubject, draft: str, batch: int, context: int, rounds: int) -> Cell:
    """One cell, the second of two."""
    plan = Plan(batches=[batch], contexts=[context], rounds=rounds)
    one = replace(subject, drafts={draft: subject.drafts[draft]})
    for _ in range(1 if ON_CPU else 2):
        [cell] = run_phases(one, plan).cells
    return cell


def cell_row(name: str, cell: Cell, note: str = "", *, ok: bool = True) -> Row:
    ms = {stage: f"{spread.median:.2f}" for stage, spread in cell.ms.items()}
    checked = cell.parity.words if cell.parity else ""
    figures: dict[str, object] = {"batch": cell.batch, "context": cell.context, "run": cell.run}
    figures |= {"ms a round": ms.get("round", ""), "floor": f"{cell.floor_ms:.2f}"}
    figures["x floor"] = "" if cell.x_floor is None else f"{cell.x_floor:.2f}"
    figures |= {stage: ms.get(stage, "") for stage in ("draft", "verify", "other")}
    figures["uncaptured"] = cell.uncaptured
    return Row(name, ok=ok and cell.shown, figures=figures | {"checked": cell.note or checked, "note": note})


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
    for pair in shapes:
        shape = find_shape(pair.partition(":")[0])
        known = {PLAIN: None, **shape.drafts, **ON_REQUEST}
        wanted = {name: known[name] for name in drafts}

        def rows(pair: str = pair, wanted: Any = wanted) -> Iterator[Row]:
            begin = time.perf_counter()
            subject = subject_of(pair, wanted, layers, devices)
            yield Row(pair, about(subject), f"made in {time.perf_counter() - begin:.1f} s")
            for context in contexts:
                for batch in batches:
                    for draft in wanted:
                        yield cell_row(pair, measured(subject, draft, batch, context, rounds))

        yield from attempt_all(pair, rows())
        free_memory()


def about(subject: BenchSubject) -> str:
    """What the target is in memory, and whether its layers are fused."""
    stored = stored_weights(subject.target.model)
    peak = "" if ON_CPU else f", peak {torch.cuda.max_memory_allocated() / 1e9:.1f}"
    fused = "fused" if subject.target.unfused is None else f"not fused: {subject.target.unfused}"
    return f"{stored.bytes / 1e9:.2f} GB{peak}, {stored.words(subject.target.dtype)}, {fused}"


def block_rows(rounds: int, context: int, layers: int) -> Iterator[Row]:
    """A block drafter at the shape of Qwen3-8B, next to a plain step and to the EAGLE-3 head of that shape. Bounds hold
    at full depth."""
    drafts = {name: spec for name, (_, spec, _) in BLOCK_CASES.items()}
    subject = subject_of("qwen3-8b", drafts, layers)
    spec = block_spec_of(subject.target.config, "dflash", layers=1 if ON_CPU else 5, block_size=BLOCK)
    block = drafter_of(spec, subject.target, 1)
    plain = 0.0
    for name, (kind, _, bound) in BLOCK_CASES.items():
        mine = replace(subject, drafter=block) if kind == "block" else subject
        cell = measured(mine, name, 1, context, rounds)
        stages = [cell.ms[stage].median for stage in ("draft", "verify", "other") if stage in cell.ms]
        total = sum(stages)
        plain = plain or total
        note = f"{total / max(plain, 1e-9):.2f}x plain" + (f", at most {bound}x" if bound else "")
        yield cell_row("qwen3-8b", cell, note, ok=ON_CPU or layers > 0 or bound is None or total <= bound * plain)


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
        plain, drafted = (measured(subject, draft, batch, context, rounds) for draft in (PLAIN, "chain"))
        yield cell_row("gemma4-e4b", plain)
        yield cell_row("gemma4-e4b", drafted)
        if plain.shown and drafted.shown:
            found[batch] = replace(E4B[batch], plain=plain.ms["round"].median, drafts=drafted.ms["round"].median)
    for line in readme_rows(found):
        print(line, flush=True)
