"""The phase benchmark: every way of decoding at every batch and context is timed, checked and compared with its floor.

Each cell makes an engine and closes it, so that in addition to the weights only its K/V are in memory. An interruption
leaves whole cells.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter

import torch
from torch import nn

from specdec.config import EngineConfig, SpecConfig
from specdec.draft_models.base import Drafter
from specdec.engine import Engine
from specdec.errors import CapacityError, ConfigError, counted, error_summary, first_line
from specdec.kvcache.layout import KEEP_ALL
from specdec.measurement.conditions import conditions
from specdec.measurement.memory_floor import draft_bytes, read_bandwidth, step_bytes
from specdec.measurement.parity import check_parity
from specdec.measurement.phase_report import STAGES, Cell, PhaseReport, Spread
from specdec.measurement.timed_rounds import TimedRun, drive, tokens_of_rounds
from specdec.measurement.transformers_peer import peers_for
from specdec.models.target import TargetModel
from specdec.models.weight_storage import stored_weights
from specdec.progress import Interrupted, progress_bar

PLAIN = "plain"

MakePrompts = Callable[[int, int], list[list[int]]]
"""(batch, context) -> `batch` prompts of `context` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSubject:
    """What is measured. drafts: draft shapes by name; None is plain decoding. assumed: acceptance lengths to suppose.

    prepared: seconds that preparing target and drafter took after their weights were loaded (fusing, probing,
    compiling). tensor_parallel: devices that share the target.
    """

    name: str
    shrunk: str = ""
    target: TargetModel
    drafter: Drafter | None
    drafts: Mapping[str, SpecConfig | None]
    prompts: MakePrompts
    assumed: Sequence[float] = ()
    prepared: float = 0.0
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The cells to measure, and the rounds of each."""

    batches: Sequence[int]
    contexts: Sequence[int]
    rounds: int
    peer: bool = False
    profiled: bool = False
    command: str = ""

    def require(self, subject: BenchSubject) -> None:
        """Raise ConfigError for a cell that cannot be measured, before anything runs."""
        most = subject.target.context_length.max_len
        deepest = max(spec.num_steps if spec else 0 for spec in subject.drafts.values())
        for context in self.contexts:
            wanted = context + tokens_of_rounds(self.rounds, deepest)
            if most is not None and wanted > most:
                raise ConfigError(
                    f"context={context} with {self.rounds} rounds after it can take {wanted} tokens, and "
                    f"{subject.name} has {most}; choose a shorter context or fewer rounds"
                )


def run_phases(subject: BenchSubject, plan: Plan) -> PhaseReport:
    """Measure all cells. Ctrl-C raises Interrupted with the report of the finished ones."""
    plan.require(subject)
    report = _empty_report(subject, plan)
    cells, read = report.cells, report.read_bandwidth
    plain: Cell | None = None  # of the same batch and context, measured before the drafts
    runs = [*product(plan.contexts, plan.batches, (*subject.drafts, *(["peers"] if plan.peer else [])))]
    try:
        with progress_bar("measuring", len(runs)) as update:
            for done, (context, batch, name) in enumerate(runs):
                update(done, f"{name}, batch {batch}, context {context}")
                if name == "peers":
                    cells += _peer_cells(subject, plan, read, batch, context)
                    continue
                cells.append(cell := _measure_cell(subject, plan, read, name, batch, context))
                if name == PLAIN:
                    plain = cell
                elif plain is not None and plain.shown and cell.shown:
                    cell.break_even = cell.ms["round"].median / plain.ms["round"].median
    except KeyboardInterrupt as stop:
        raise Interrupted(f"{len(cells)} cells were measured", report if cells else None) from stop
    return report


def _empty_report(subject: BenchSubject, plan: Plan) -> PhaseReport:
    target, drafter = subject.target, drafting_modules(subject.drafter)
    stored, parameters = stored_weights(target.model, *drafter), {"target": stored_weights(target.model).numbers}
    if drafter:
        parameters["drafter"] = stored.numbers - parameters["target"]  # MTP modules share tables with the target
    layers = "fused" if target.unfused is None else f"not fused, since {target.unfused}"
    return PhaseReport(
        subject=subject.name,
        shrunk=subject.shrunk,
        assumed=bool(subject.assumed),
        parameters=parameters,
        weights=stored.summary(target.dtype),
        weight_bytes=stored.bytes,
        read_bandwidth=read_bandwidth(target.device),
        conditions=conditions(target.device, plan.command)
        | {"dtype": str(target.dtype).removeprefix("torch."), "layers": layers},
        cells=[],
    )


def drafting_modules(drafter: Drafter | None) -> list[nn.Module]:
    """The modules with a drafter's weights; none for a lookup."""
    found = [getattr(drafter, name, None) for name in ("assistant", "head")]
    found += [nn.ModuleDict(module.parts()) for module in getattr(drafter, "modules", ())]
    return [module for module in found if isinstance(module, nn.Module)]


def _empty_cell(
    subject: BenchSubject, read: float, run: str, rows: int, batch: int, context: int, steps: int = 0
) -> Cell:
    """A cell that has only its floor. rows: verified rows per request and step. steps: drafts per round."""
    drafts = draft_bytes(subject.drafter, subject.target, batch, steps, context) if steps else 0
    floor = replace(step_bytes(subject.target, batch, rows, context), drafts=drafts)
    return Cell(run=run, batch=batch, context=context, floor_bytes=floor, floor_ms=1e3 * floor.total / read)


def _measure_cell(subject: BenchSubject, plan: Plan, read: float, name: str, batch: int, context: int) -> Cell:
    """The rounds of one engine. If memory does not suffice, the cell has a note instead of figures."""
    spec = subject.drafts[name]
    nodes, depth = (1, 0) if spec is None else (spec.num_nodes, spec.num_steps)
    cell = _empty_cell(subject, read, name, nodes, batch, context, depth)
    cell.spec, prompts, failed = spec, subject.prompts(batch, context), ""
    chosen = sorted({0, batch - 1})  # the first and the last request are checked
    try:
        driven, ready = _time_rounds(subject, plan, spec, prompts, context + tokens_of_rounds(plan.rounds, depth))
        torch.cuda.empty_cache()
        failed = "no memory for the parity check: "
        parity = check_parity(subject.target.model, [prompts[i] for i in chosen], [driven.outputs[i] for i in chosen])
    except (CapacityError, torch.OutOfMemoryError) as error:
        cell.note = f"no figure: {failed}{first_line(error)}"
        return cell
    finally:
        torch.cuda.empty_cache()
    cell.parity = parity
    if parity.passed:
        cell.ready_s = subject.prepared + ready
        _add_times(cell, driven, subject.assumed)
    else:
        cell.note = f"parity failed: {parity.summary}"
    return cell


def _time_rounds(
    subject: BenchSubject, plan: Plan, spec: SpecConfig | None, prompts: list[list[int]], max_len: int
) -> tuple[TimedRun, float]:
    """The rounds, and the seconds that making the engine took."""
    config = EngineConfig(
        max_batch_size=len(prompts),
        max_model_len=max_len,
        dtype=subject.target.dtype,
        prefill_chunk=min(2048, max(16, max_len)),
        prefix_cache=False,
        tensor_parallel=subject.tensor_parallel,
    )
    begin = perf_counter()
    fixed = None if spec is None else replace(spec, adaptive=False)
    with Engine(subject.target, subject.drafter if spec else None, spec=fixed, config=config) as engine:
        ready = perf_counter() - begin
        _require_room(engine, len(prompts), max_len)
        return drive(engine, prompts, plan.rounds, spec.num_steps if spec else 0, profiled=plan.profiled), ready


def _require_room(engine: Engine, batch: int, max_len: int) -> None:
    """Raise CapacityError if the batch does not fit at once: requests would wait, and rounds would be smaller."""
    available = engine.stats().full_slots.capacity
    if available < batch * max_len:
        each = engine.target.layout.slot_bytes(KEEP_ALL, engine.target.dtype)
        raise CapacityError(
            f"{counted(batch, 'request')} of {max_len} tokens: {batch * max_len * each / 1e9:.1f} GB of K/V on the "
            f"full layers, and {available * each / 1e9:.1f} GB are left for them"
        )


def _add_times(cell: Cell, driven: TimedRun, assumed: Sequence[float]) -> None:
    rounds, spec = driven.rounds, cell.spec
    cell.rounds, cell.uncaptured, cell.acceptance_length = len(rounds), driven.uncaptured, driven.acceptance_length
    cell.ms = {"round": Spread.of([one.wall for one in rounds])}
    for stage in STAGES if spec else STAGES[1:]:  # plain decoding drafts nothing
        cell.ms[stage] = Spread.of([getattr(one, stage) for one in rounds])
    cell.idle_ms = None if driven.idle is None else 1e3 * driven.idle
    lengths = {"measured": driven.acceptance_length}
    if assumed:
        supposed = [length for length in assumed if length <= spec.num_steps + 1] if spec else [1.0]
        lengths = {f"if AL {length:g}": length for length in supposed}
    per_second = cell.batch / (cell.ms["round"].median / 1e3)
    cell.tokens_per_second = {words: per_second * length for words, length in lengths.items()}


def _peer_cells(subject: BenchSubject, plan: Plan, read: float, batch: int, context: int) -> Iterator[Cell]:
    chains = [spec.num_steps for spec in subject.drafts.values() if spec is not None and spec.topk == 1]
    prompts = subject.prompts(batch, context)
    for peer in peers_for(subject.target.model, subject.drafter, chains[0] if chains else None, batch):
        cell = _empty_cell(subject, read, peer.name, peer.rows, batch, context)
        try:
            seconds = peer.run(prompts, plan.rounds)
            cell.rounds, cell.ms = len(seconds), {"round": Spread.of(seconds)} if seconds else {}
            cell.note = "" if seconds else "no figure: it ended before its first step was over"
        except Exception as error:  # a peer may fail in many ways, and the benchmark goes on
            cell.note = f"no figure: {error_summary(error)}"
        yield cell
        torch.cuda.empty_cache()
