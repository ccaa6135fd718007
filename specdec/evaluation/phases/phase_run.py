"""The phase benchmark: every way of decoding at every batch and context, timed, checked, compared with its floor.

    for each context, batch:    plain, chain, tree, [peers]:    prefill -> rounds -> parity -> Cell

The engines are made for a cell and closed after it, so that their K/V are all the memory in use in addition to the
weights. An interruption leaves whole cells.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from specdec.config import EngineConfig, SpecConfig
from specdec.draft_models.base import Drafter
from specdec.engine import Engine
from specdec.errors import CapacityError, ConfigError, first_line
from specdec.evaluation.conditions import conditions
from specdec.evaluation.phases.memory_floor import StepBytes, read_bandwidth, step_bytes
from specdec.evaluation.phases.parity import Parity, check_parity
from specdec.evaluation.phases.phase_report import Cell, PhaseReport, Spread
from specdec.evaluation.phases.timed_rounds import Driven, drive, most_new_tokens
from specdec.evaluation.phases.transformers_steps import Peer, peers_for
from specdec.kvcache.index_spaces import Space
from specdec.models.target import TargetModel
from specdec.progress import Interrupted, progress_bar

PLAIN = "plain"
CHECKED = 2
"""Requests of a batch whose tokens are judged: the first and the last."""

MakePrompts = Callable[[int, int], list[list[int]]]
"""(batch, context) -> that many prompts of that length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured. drafts: by name; plain decoding has none. assumed: acceptance lengths of random weights.

    prepared: seconds of preparing target and drafter once their weights were loaded: fusing, probing, compiling.
    """

    name: str
    shrunk: str = ""
    target: TargetModel
    drafter: Drafter | None
    drafts: Mapping[str, SpecConfig | None]
    prompts: MakePrompts
    assumed: Sequence[float] = ()
    dtype: torch.dtype
    prepared: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which cells, and how long each."""

    batches: Sequence[int]
    contexts: Sequence[int]
    rounds: int
    peer: bool = False
    profiled: bool = False
    command: str = ""

    def require(self, subject: Subject) -> None:
        """Raises ConfigError where a cell cannot be: before anything runs."""
        most = subject.target.context_length.most
        deepest = max(spec.num_steps if spec else 0 for spec in subject.drafts.values())
        for context in self.contexts:
            wanted = context + most_new_tokens(self.rounds, deepest)
            if most is not None and wanted > most:
                raise ConfigError(
                    f"context={context} with {self.rounds} rounds after it can take {wanted} tokens, and "
                    f"{subject.name} has {most}; choose a shorter context or fewer rounds"
                )


Check = Callable[[Any, Sequence[Sequence[int]], Sequence[Sequence[int]]], Parity]


def run_phases(subject: Subject, plan: Plan, *, check: Check = check_parity) -> PhaseReport:
    """Ctrl-C raises Interrupted with the report of the cells that were finished."""
    plan.require(subject)
    target = subject.target
    read = read_bandwidth(target.device)
    cells: list[Cell] = []

    def report() -> PhaseReport:
        models = {"target": target.model, **_modules(subject.drafter)}
        weights = {id(weight): weight for model in models.values() for weight in model.parameters()}
        return PhaseReport(
            subject=subject.name,
            shrunk=subject.shrunk,
            assumed=bool(subject.assumed),
            parameters={name: sum(w.numel() for w in model.parameters()) for name, model in models.items()},
            weight_bytes=sum(weight.nbytes for weight in weights.values()),
            read_bandwidth=read,
            conditions=conditions(target.device, plan.command) | how_it_runs(target),
            cells=_with_break_even(cells),
        )

    grid = [(context, batch) for context in plan.contexts for batch in plan.batches]
    runs = [(place, name) for place in grid for name in (*subject.drafts, *(["peers"] if plan.peer else []))]
    try:
        with progress_bar("measuring", len(runs)) as update:
            for done, ((context, batch), name) in enumerate(runs):
                update(done, f"{name}, batch {batch}, context {context}")
                if name == "peers":
                    cells += _peer_cells(subject, plan, read, batch, context)
                else:
                    cells.append(_cell(subject, plan, read, name, batch, context, check))
    except KeyboardInterrupt as stop:
        kept = f"{len(cells)} cells were measured"
        raise Interrupted(kept, report() if cells else None) from stop
    return report()


def how_it_runs(target: TargetModel) -> dict[str, str]:
    """Precision, and whether fused layers run."""
    layers = "fused" if target.unfused is None else f"not fused, since {target.unfused}"
    return {"dtype": str(target.dtype).removeprefix("torch."), "layers": layers}


def _cell(subject: Subject, plan: Plan, read: float, name: str, batch: int, context: int, check: Check) -> Cell:
    """One engine's rounds; what goes wrong with the memory of one cell is its note."""
    spec = subject.drafts[name]
    nodes, depth = (1, 0) if spec is None else (spec.num_nodes, spec.num_steps)
    floor = step_bytes(subject.target, batch, nodes, context)
    cell = Cell(run=name, batch=batch, context=context, spec=spec, floor_bytes=floor, floor_ms=_ms(floor, read))
    prompts = subject.prompts(batch, context)
    try:
        driven, ready = _driven(subject, plan, spec, prompts, context + most_new_tokens(plan.rounds, depth))
    except (CapacityError, torch.OutOfMemoryError) as error:
        return replace(cell, note=f"no figure: {first_line(error)}")
    finally:
        _empty_cache(subject.target.device)
    chosen = sorted({0, batch - 1})[:CHECKED]
    try:
        parity = check(subject.target.model, [prompts[i] for i in chosen], [driven.outputs[i] for i in chosen])
    except torch.OutOfMemoryError as error:
        return replace(cell, note=f"no figure: no memory for the parity check ({first_line(error)})")
    finally:
        _empty_cache(subject.target.device)
    if not parity.passed:
        return replace(cell, parity=parity, note=f"parity failed: {parity.words}")
    return _timed(replace(cell, parity=parity, ready_s=subject.prepared + ready), driven, subject)


def _driven(
    subject: Subject, plan: Plan, spec: SpecConfig | None, prompts: list[list[int]], max_len: int
) -> tuple[Driven, float]:
    """The rounds, and the seconds that the engine took to be made."""
    config = EngineConfig(
        max_batch_size=len(prompts),
        max_model_len=max_len,
        dtype=subject.dtype,
        prefill_chunk=min(2048, max(16, max_len)),
        prefix_cache=False,
    )
    drafter = None if spec is None else subject.drafter
    begin = perf_counter()
    with Engine(subject.target, drafter, spec=spec, config=config) as engine:
        ready = perf_counter() - begin
        _require_room(engine, len(prompts), max_len)
        depth = 0 if spec is None else spec.num_steps
        return drive(engine, prompts, plan.rounds, depth, profiled=plan.profiled), ready


def _require_room(engine: Engine, batch: int, max_len: int) -> None:
    """Raises CapacityError where not all of the batch fit at a time: some would wait, and rounds be smaller."""
    there = engine.stats().full_slots.capacity
    if there >= batch * max_len:
        return
    item = torch.empty((), dtype=engine.target.dtype).element_size()
    each = engine.target.layout.numbers_per_slot(Space.FULL) * item
    raise CapacityError(
        f"{batch} requests of {max_len} tokens take {batch * max_len * each / 1e9:.1f} GB of K/V on the full layers, "
        f"and {there * each / 1e9:.1f} GB are left for them"
    )


def _timed(cell: Cell, driven: Driven, subject: Subject) -> Cell:
    rounds = driven.rounds
    stages = ("draft", "verify", "other", "host") if cell.spec is not None else ("verify", "other", "host")
    ms = {"round": Spread.of([one.wall for one in rounds])}
    ms |= {stage: Spread.of([getattr(one, stage) for one in rounds]) for stage in stages}
    emitted = sum(one.emitted for one in rounds) / (len(rounds) * cell.batch)
    lengths: dict[str, float] = {"measured": emitted}
    if subject.assumed and cell.spec is None:
        lengths = {"if AL 1": 1.0}
    elif subject.assumed:
        most = cell.spec.num_steps + 1 if cell.spec is not None else 1
        lengths = {f"if AL {length:g}": length for length in subject.assumed if length <= most}
    return replace(
        cell,
        rounds=len(rounds),
        ms=ms,
        idle_ms=None if driven.idle is None else 1e3 * driven.idle,
        acceptance_length=emitted,
        tokens_per_second={
            words: cell.batch * length / (ms["round"].median / 1e3) for words, length in lengths.items()
        },
    )


def _peer_cells(subject: Subject, plan: Plan, read: float, batch: int, context: int) -> list[Cell]:
    chains = [spec.num_steps for spec in subject.drafts.values() if spec is not None and spec.topk == 1]
    prompts = subject.prompts(batch, context)
    cells = []
    for peer in peers_for(subject.target.model, subject.drafter, chains[0] if chains else None, batch):
        cells.append(_peer_cell(subject, plan, read, peer, prompts))
        _empty_cache(subject.target.device)
    return cells


def _peer_cell(subject: Subject, plan: Plan, read: float, peer: Peer, prompts: list[list[int]]) -> Cell:
    batch, context = len(prompts), len(prompts[0])
    floor = step_bytes(subject.target, batch, peer.rows, context)
    cell = Cell(run=peer.name, batch=batch, context=context, floor_bytes=floor, floor_ms=_ms(floor, read))
    try:
        seconds = peer.run(prompts, plan.rounds)
    except Exception as error:  # of many kinds: what a peer cannot do is no fault of ours, and ends no benchmark
        return replace(cell, note=f"no figure: {type(error).__name__}: {first_line(error)}")
    if not seconds:
        return replace(cell, note="no figure: it ended before its first step was over")
    return replace(cell, rounds=len(seconds), ms={"round": Spread.of(seconds)})


def _with_break_even(cells: Sequence[Cell]) -> list[Cell]:
    """A round that takes x times a plain step is ahead of it when more than x tokens come out."""
    plain = {(cell.batch, cell.context): cell.ms["round"].median for cell in cells if cell.run == PLAIN and cell.shown}
    done = []
    for cell in cells:
        base = plain.get((cell.batch, cell.context))
        even = cell.ms["round"].median / base if base and cell.shown and cell.spec is not None else None
        done.append(replace(cell, break_even=even))
    return done


def _ms(floor: StepBytes, read: float) -> float:
    return 1e3 * floor.total / read


def _modules(drafter: Drafter | None) -> dict[str, nn.Module]:
    """What holds a drafter's weights; an n-gram has none."""
    module = getattr(drafter, "assistant", None) or getattr(drafter, "head", None)
    return {"drafter": module} if isinstance(module, nn.Module) else {}


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
