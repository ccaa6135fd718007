"""Adaptive drafts against every fixed one, and plain decoding: `python tools/bench_adaptive.py --shape gemma4-e4b`.

A published shape with random weights, and planted text: the target computes and draws, but the token that it is taken
to have drawn follows from the number of the prompt and the place, and each draft is right with the probability of its
prompt. So times are those of the shape, and acceptance is what the table says.

    steady   so many requests at once, all with one probability; timed from the last first token to the last token
    crowd    --crowd requests, prompts included, as many running as --batches allow; timed from beginning to end
    mixed    the number of requests rises and falls, every second prompt is hard; timed from beginning to end

Every engine has the same requests in each phase of the mixed load: one arrives when another ends, and the next phase
begins when all have ended. Otherwise a phase of one request would be that of whichever was left over, and runs would
differ by 5 % by chance. Before adaptive drafts are measured, what the engine learned is forgotten, so that it begins as
a new one does; plain and adaptive are the better of two. `--only-mixed` makes one engine, and no plain one: "no draft"
is within 1 % of that. Prompts and the host take as long whatever is drafted, so the last ratio is of the time that the
device was in rounds.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gpu_setup import DEVICE, device_option, machine, require_device  # isort: skip - before triton
import numpy as np
import torch
from result_table import table_head, table_row

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention.trees.tree import DraftTree
from specdec.draft_models.base import DraftBatch
from specdec.draft_models.model_and_lookup import ModelAndLookup
from specdec.draft_models.suffix import SuffixDrafter
from specdec.evaluation.model_shapes import find_shape
from specdec.evaluation.phases.random_weights import random_subject
from specdec.runtime.draft_policy.draft_choice import DraftChoice
from specdec.runtime.draft_policy.draft_use import name as shape_name
from specdec.sampling.reference_sampler import ReferenceSampler

MIXED = ((1, 6), (4, 16), (32, 64), (128, 256), (64, 96), (16, 40), (2, 8), (96, 144), (8, 24))
"""Requests at once, and how many in all, one phase after the other."""

LUCK = 4
"""Requests that a steady row has at least, one after the other if need be."""

FIRST_TEXT = 1000
"""Tokens below it begin prompts."""


class Plant:
    """A text for each prompt number, and how often a draft of it is right."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.right = torch.zeros(FIRST_TEXT, device=device)
        self.right_by_lookup = torch.zeros(FIRST_TEXT, device=device)

    def text(self, number: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        mixed = (number * 7919 + position * 104729 + 12345) * 2654435761
        return FIRST_TEXT + (mixed >> 7) % (self.vocab_size - FIRST_TEXT)

    def is_right(self, number: torch.Tensor, position: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        """Mixes number and position, so that no place is likelier for its neighbours: the finalizer of MurmurHash3, in
        32 bits."""
        mixed = (number * 104723 + position * 15485863 + 777) & 0xFFFFFFFF
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
        return ((mixed ^ (mixed >> 16)) % 4096) < chance * 4096

    @contextmanager
    def in_samplers(self) -> Iterator[None]:
        """Inside, what the target draws is the text."""
        drawn_after = ReferenceSampler.draw_after

        def planted(sampler: ReferenceSampler, tree: Any, allowed: Any, logits: Any, positions: Any, cap: Any) -> Any:
            drawn = drawn_after(sampler, tree, allowed, logits, positions, cap)
            assert sampler.past is not None
            number = sampler.past.history[:, :1].clamp(max=FIRST_TEXT - 1)
            return self.text(number, positions).where(positions > 0, drawn)

        ReferenceSampler.draw_after = planted  # type: ignore[method-assign]
        try:
            yield
        finally:
            ReferenceSampler.draw_after = drawn_after  # type: ignore[method-assign]

    def in_worker(self, worker: Any) -> None:
        """The best path of this worker's drafts is right as often as their prompts say; it does all its work."""
        propose = worker.propose

        def planted(batch: DraftBatch) -> DraftTree:
            tree = propose(batch)
            number = batch.history[:, :1].clamp(max=FIRST_TEXT - 1)
            nodes, newest = torch.arange(tree.num_nodes, device=number.device), torch.zeros_like(number)
            on_path = torch.zeros_like(tree.parents, dtype=torch.bool)
            for _ in range(batch.num_steps):  # the first child of the newest node, if it has one
                is_child = (tree.parents == newest) & (nodes > 0)
                newest = torch.where(is_child.any(1, True), is_child.int().argmax(1, True), tree.num_nodes)
                on_path = on_path | (nodes == newest)
            position = batch.history_len[:, None] - 1 + tree.depth
            text = self.text(number, position)
            right = self.right_by_lookup if batch.by_lookup else self.right
            is_right = self.is_right(number + 977 * batch.by_lookup, position, right[number])
            tokens = torch.where(on_path, torch.where(is_right, text, text - 1), tree.tokens)
            return DraftTree.chain(tokens) if batch.topk == 1 else replace(tree, tokens=tokens)

        worker.propose = planted


def prompt(number: int, length: int) -> list[int]:
    draw = np.random.default_rng(number)
    return [number, *draw.integers(FIRST_TEXT, 2 * FIRST_TEXT, length - 1).tolist()]


def steady(engine: Engine, batch: int, length: int, tokens: int) -> float:
    """Seconds a token and request, of a few turns where requests are few: a single one may be lucky."""
    turns = max(1, LUCK // batch)
    return sum(turn(engine, 1 + i * batch, batch, length, tokens) for i in range(turns)) / turns


def turn(engine: Engine, first: int, batch: int, length: int, tokens: int) -> float:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    with engine.prompts_only():
        handles = engine.submit_many([prompt(first + i, length) for i in range(batch)], params)
        while any(
            handle.read() is None for handle in handles if not handle.finished and not handle.stats.output_tokens
        ):
            engine.step()
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    begin = time.perf_counter()
    while engine.step():
        pass
    return (time.perf_counter() - begin) / (batch * (tokens - 1)) * batch


def crowd(engine: Engine, count: int, length: int, tokens: int) -> float:
    """Seconds for all of it."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    handles = engine.submit_many([prompt(1 + i % (FIRST_TEXT - 1), length) for i in range(count)], params)
    while engine.step():
        pass
    assert all(handle.finished for handle in handles)
    return time.perf_counter() - begin


def mixed(engine: Engine, length: int, tokens: int, most: int) -> float:
    """Seconds for all of it."""
    draw = np.random.default_rng(0)
    number, begin = 1, time.perf_counter()
    for at_once, in_all in MIXED:
        wanted = min(at_once, most)
        to_come = in_all * wanted // at_once
        while to_come or engine.running_ids():
            for _ in range(min(to_come, wanted - len(engine.running_ids()))):
                asked = SamplingParams(max_new_tokens=int(draw.integers(tokens // 3, tokens)), ignore_eos=True)
                engine.submit(prompt(number, length), asked)
                number, to_come = number % (FIRST_TEXT - 1) + 1, to_come - 1
            engine.step()
    while engine.step():
        pass
    return time.perf_counter() - begin


def with_rounds(engine: Engine, measure: Callable[[Engine], float]) -> tuple[float, float]:
    """What it measures, and the seconds of it that the device was in rounds: no prompts, nothing of the host."""
    before = engine.stats().batch_seconds
    return measure(engine), engine.stats().batch_seconds - before


def forget(engine: Engine) -> None:
    """The choice is that of a new engine: it knows what was timed when the engine was made, no more."""
    known = engine.steps.choice
    assert known is not None
    captured = engine.steps.graphs is not None
    engine.steps.choice = DraftChoice(known.shapes, engine.table.max_requests + 1, captured=captured)
    engine.steps.choice.times.timed.update(known.times.timed)
    engine.steps.choice.times.catching_up.update(known.times.catching_up)


def fixed_to(engine: Engine, number: int) -> Callable[[], None]:
    """Every round has the draft of this number -> what takes that back."""
    choice = engine.steps.choice
    assert choice is not None
    choose = choice.choose
    choice.choose = lambda *_, **__: choice.shapes[number]  # type: ignore[method-assign]

    def back() -> None:
        choice.choose = choose  # type: ignore[method-assign]

    return back


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    parser.add_argument("--shape", default="gemma4-e4b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--divisor", type=int, default=1)
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--right", default="0,0.3,0.8", help="how often a draft is right")
    parser.add_argument("--hard", type=float, default=0.2, help="the same of every second prompt of the mixed load")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--topk", type=int, default=1, help="more than 1: trees of 16 nodes")
    parser.add_argument("--lookup", type=float, help="how often a suffix lookup next to the model is right")
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an output")
    parser.add_argument(
        "--crowd", type=int, metavar="N", help="a load of N requests, right as often as the last of --right"
    )
    parser.add_argument("--crowd-tokens", default="512,128", help="of a prompt and of an output of it")
    parser.add_argument("--no-steady", action="store_true")
    parser.add_argument("--no-mixed", action="store_true")
    parser.add_argument("--only-mixed", action="store_true", help="--tokens 96 takes about two minutes at batch 128")
    given = parser.parse_args()
    require_device()
    batches = [int(each) for each in given.batches.split(",")]
    rights = [float(each) for each in given.right.split(",")]
    print(machine())
    crowded = [int(each) for each in given.crowd_tokens.split(",")] if given.crowd is not None else [0]
    longest = max(given.length + given.tokens, sum(crowded)) + 32
    sizes = EngineConfig(max_batch_size=max(batches), max_model_len=longest, device=DEVICE)
    spec = SpecConfig(given.steps, given.topk, 16 if given.topk > 1 else None)
    shape = find_shape(given.shape)
    subject = random_subject(shape, {"chain": spec}, layers=given.layers, divisor=given.divisor, config=sizes)
    plant = Plant(subject.target.vocab_size, subject.target.device)
    with plant.in_samplers():
        begin = time.perf_counter()
        plain = None if given.only_mixed else Engine(subject.target, config=sizes)
        made = time.perf_counter()
        drafter = subject.drafter
        if given.lookup is not None:
            drafter = ModelAndLookup(drafter, SuffixDrafter())
            plant.right_by_lookup.fill_(given.lookup)
        bind = type(drafter).bind

        def planted_bind(drafter: Any, binding: Any) -> Any:
            worker = bind(drafter, binding)
            plant.in_worker(worker)
            return worker

        type(drafter).bind = planted_bind  # type: ignore[method-assign,union-attr]
        engine = Engine(subject.target, drafter, spec=spec, config=sizes)
        print(f"engines: plain {made - begin:.1f} s, adaptive {time.perf_counter() - made:.1f} s to make")
        print(engine.stats().captures)
        choice = engine.steps.choice
        assert choice is not None
        use = engine.stats().drafts
        for size, seconds in sorted(choice.times.timed.items()):
            reading = f", catching up {1e3 * choice.times.catching_up.get(size, 0.0):.3f}"
            print(f"{size} requests: " + ", ".join(f"{1e3 * each:.3f}" for each in seconds) + f"{reading} ms")
        names = [shape_name(each) for each in choice.shapes]
        ratios_of = "to plain", "to best", "rounds alone to best"
        print(table_head("requests", "right", "plain engine", *names, "adaptive", *ratios_of, "chosen"))

        def row(case: str, right: str, measure: Callable[[Engine], float], scale: float) -> None:
            measure(engine)  # warm: prompts are captured, clocks are up
            if plain is not None:
                measure(plain)
            first = None if plain is None else measure(plain)
            times, in_rounds = [], []
            for number in range(len(names)):
                back = fixed_to(engine, number)
                seconds, device = with_rounds(engine, measure)
                times.append(seconds)
                in_rounds.append(device)
                back()
            measured = []
            for _ in range(2):
                forget(engine)
                measured.append((*with_rounds(engine, measure), engine.stats().drafts.rounds))
            adaptive, adaptive_in_rounds, rounds = min(measured)
            first = times[0] if plain is None or first is None else min(first, measure(plain))
            ratios = [f"{first / adaptive:.3f}", f"{min(first, *times) / adaptive:.3f}"]
            ratios.append(f"{min(in_rounds) / adaptive_in_rounds:.3f}")
            shown = [f"{scale * each:.3f}" for each in (first, *times, adaptive)]
            print(table_row([case, right, *shown, *ratios, "/".join(map(str, rounds))]), flush=True)

        for right in () if given.only_mixed else rights:
            plant.right.fill_(right)
            for batch in () if given.no_steady else batches:
                row(str(batch), f"{right}", lambda each, b=batch: steady(each, b, given.length, given.tokens), 1e3)
        if given.crowd is not None:
            row(f"{given.crowd} in all, s", f"{rights[-1]}", lambda each: crowd(each, given.crowd, *crowded), 1.0)
        if not given.no_mixed:
            plant.right[::2], plant.right[1::2] = 0.9, given.hard
            most = max(batches)
            row("mixed, s", f"{given.hard}, 0.9", lambda each: mixed(each, given.length, given.tokens, most), 1.0)
        use = engine.stats().drafts
        print(use.why)
        print(engine.stats().captures)


if __name__ == "__main__":
    main()
