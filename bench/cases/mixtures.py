"""Mixtures with their MTP modules: floors of plain steps, rounds whose rows route alike or apart, the choice of drafts,
and one without a fused form.

    floor      a plain step at 1 and 8 requests, captured, next to the bytes of the experts that are expected
    gain       a round with one draft next to a plain step
    adaptive   the engine's own choice next to plain decoding and every fixed draft, planted text (`adaptive.py`)
    routing    rows of one text and of different ones: experts that a layer reads, counted, and what a round takes
    unfused    a family taken out of the table: captured rounds, with the tokens of uncaptured ones

Bits are the case `bits`, with `--shapes`. Each part stays within ten minutes on one H100.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import mean
from typing import Any
from unittest import mock

from bench.device import ON_CPU  # isort: skip - before triton
import torch

from bench.cases.adaptive import speed_rows
from bench.cases.rounds import cell_row, measured
from bench.report import Row
from bench.subjects import OPERATIONS, answers, engine_of, pair_of, prompts_of, round_ms, subject_of
from bench.verify import answers_row, rows_of_each
from specdec.config import SamplingParams, SpecConfig
from specdec.layers.decoder import FusedDecoder
from specdec.layers.description.families import FAMILIES
from specdec.layers.moe.dense_and_moe import mlp_and_experts
from specdec.layers.moe.routing import Router, Routing, route
from specdec.measurement.phase_run import PLAIN
from specdec.models.target import TargetModel
from specdec.modules.transformers_names import family_name

MAX_FLOORS = 1.6
MAX_GAIN = 1.25
"""A round with one draft, in plain steps."""


def floor_rows(shapes: Sequence[str], batches: Sequence[int], context: int, rounds: int, layers: int) -> Iterator[Row]:
    def rows(pair: str) -> Iterator[Row]:
        subject = subject_of(pair, {PLAIN: None}, layers)
        for batch in batches:
            [cell] = measured(subject, batch, context, rounds)
            ok = ON_CPU or layers > 0 or (cell.x_floor is not None and cell.x_floor <= MAX_FLOORS)
            yield cell_row(_shown(pair, layers), cell, f"at most {MAX_FLOORS}x its floor", ok=ok)

    yield from rows_of_each(shapes, rows)


def gain_rows(shape: str, requests: int, context: int, rounds: int, layers: int) -> Iterator[Row]:
    subject = subject_of(shape, {PLAIN: None, "mtp1": SpecConfig(1)}, layers)
    cells = measured(subject, requests, context, rounds)
    took = [cell.ms["round"].median if "round" in cell.ms else float("inf") for cell in cells]
    yield cell_row(_shown(shape, layers), cells[0])
    note = f"{took[1] / took[0]:.3f}x plain, at most {MAX_GAIN}x"
    yield cell_row(_shown(shape, layers), cells[1], note, ok=ON_CPU or layers > 0 or took[1] <= MAX_GAIN * took[0])


def adaptive_rows(
    shape: str, layers: int, planted: Sequence[float], crowds: Sequence[int], length: int, tokens: int
) -> Iterator[Row]:
    """Within 2 % of plain decoding where no draft is right, and within 5 % of the best fixed draft elsewhere."""
    given: dict[str, Any] = {"steps": 3, "topk": 1, "lookup": [], "hard": 0.0, "crowd": 0, "crowd_tokens": [1, 1]}
    loads = {"batches": crowds, "right": planted, "length": length, "tokens": tokens, "loads": ["steady"]}
    for row in speed_rows(shape, layers, **given, **loads):
        right = row.figures.get("right")
        if right is not None and not ON_CPU:
            to_plain, to_best = (float(str(row.figures[name])) for name in ("to plain", "to best"))
            row = replace(row, ok=to_plain >= 0.98 if float(str(right)) == 0 else to_best >= 0.95)
        yield row


@contextmanager
def counted_experts(decoder: FusedDecoder) -> Iterator[list[int]]:
    """Inside, routers run as they are, and the distinct experts that each forward of a layer reads are counted."""
    counts: list[int] = []
    own_route, own_both = decoder.ops(route), decoder.ops(mlp_and_experts)

    def counted_route(x: torch.Tensor, router: Router, **options: Any) -> Routing:
        routing = own_route(x, router, **options)
        counts.append(len(routing.experts.unique()))
        return routing

    def counted_both(inputs: Any, mlp: Any, router: Router, experts: Any) -> Any:
        counted_route(inputs.router, router)
        return own_both(inputs, mlp, router, experts)

    ops = decoder.ops.replacing({route: counted_route, mlp_and_experts: counted_both})
    with ExitStack() as patches:
        for layer in decoder.layers:
            patches.enter_context(mock.patch.object(layer, "ops", ops))
        yield counts


def routing_rows(routed: Sequence[str], requests: int, context: int, layers: int) -> Iterator[Row]:
    """Plain steps and rounds of three drafts of requests that have all the same text, and different ones."""

    def rows(name: str) -> Iterator[Row]:
        pair = pair_of(name, layers, operations=OPERATIONS)
        different = prompts_of([context] * requests, pair.target.vocab_size, 0)
        texts = {"apart": different, "alike": [different[0]] * requests}
        for kind, spec in (("none", SpecConfig(1, adaptive=False)), ("own", SpecConfig(3, adaptive=False))):
            for how, prompts in texts.items():
                yield _routed(_shown(name, layers), pair, kind, spec, how, prompts)

    yield from rows_of_each(routed, rows)


def _routed(name: str, pair: Any, kind: str, spec: SpecConfig, how: str, prompts: Sequence[list[int]]) -> Row:
    size: dict[str, Any] = {"max_batch_size": len(prompts), "prefix_cache": False}
    with engine_of(pair.target, pair.drafter(kind), spec, **size) as engine:
        took = round_ms(engine, prompts)
    decoder = pair.target.decoder
    assert isinstance(decoder, FusedDecoder), pair.target.unfused
    with engine_of(pair.target, pair.drafter(kind), spec, cuda_graphs=False, **size) as engine:
        with engine.prompts_only():
            handles = engine.submit_many(list(prompts), SamplingParams(max_new_tokens=6, ignore_eos=True))
            while not all(handle.num_output for handle in handles):  # `step` has work left: the rounds
                engine.step()
        with counted_experts(decoder) as counts:
            while engine.step():
                pass
    read = f"{mean(counts):.1f} experts a layer" if counts else "no experts"
    what = "plain step" if kind == "none" else f"round of {spec.num_steps} drafts"
    return Row(f"{name}, {len(prompts)} requests {how}, {what}", read, f"{took:.3f} ms", ok=bool(counts))


def unfused_rows(without: Sequence[str], few_layers: int, tokens: int) -> Iterator[Row]:
    def rows(name: str) -> Iterator[Row]:
        pair = pair_of(name, few_layers, on_cpu=few_layers, operations=OPERATIONS)
        prompts = prompts_of([5, 40, 17], pair.target.vocab_size, 1)
        params = [SamplingParams(max_new_tokens=tokens, ignore_eos=True)] * len(prompts)
        with mock.patch.dict(FAMILIES):
            del FAMILIES[family_name(pair.target.user_decoder)]
            target = TargetModel(pair.target.model, pair.target.ops)
        want = answers(engine_of(target, max_batch_size=4, cuda_graphs=False), prompts, params)
        engine = engine_of(target, max_batch_size=4)
        found = answers(engine, prompts, params)
        captures = engine.stats().captures
        ok = target.unfused is not None and (ON_CPU or (captures.made > 0 and captures.uncaptured_rounds == 0))
        note = f"{captures.made} captured, {captures.uncaptured_rounds} rounds not captured"
        yield answers_row(f"{_shown(name, few_layers)}, without its fused form", found, want, note, ok=ok)

    yield from rows_of_each(without, rows)


def _shown(name: str, layers: int) -> str:
    return f"{name}, {layers} layers" if layers else name
