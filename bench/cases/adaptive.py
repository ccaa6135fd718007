"""Adaptive drafts: against every fixed one and plain decoding, and whether they change a token.

Speed: a published shape with random weights, and planted text: the target computes and draws, but the token that it is
taken to have drawn follows from the number of the prompt and the place, and each draft, of a tree the first path, is
right with the probability of its prompt. So times are those of the shape, and acceptance is what the table says.

    steady   a batch of requests at once, all with one probability; timed from the last first token to the last token
    crowd    many requests, prompts included, as many running as --batches allow; timed from beginning to end
    mixed    the number of requests rises and falls, every second prompt is hard; timed from beginning to end

Every engine has the same requests in each phase of the mixed load: one arrives when another ends, and the next phase
begins when all have ended. Before adaptive drafts are measured, what the engine learned is forgotten; plain and
adaptive are the better of two. The last ratio is of the time that the device was in rounds.

Tokens: every drafter, eight requests at a time, greedy and seeded, fixed, adaptive, and every captured draft in turn,
none included; all must give what plain decoding of each alone gives. Chains have six of ten tokens right.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any
from unittest.mock import patch

from bench.device import DEVICE, ON_CPU  # isort: skip - before triton
import numpy as np
import torch

from bench.plants import FIRST_TEXT, KnownTexts, RandomText, change_drafts
from bench.report import Row
from bench.subjects import (
    OPERATIONS,
    answers,
    engine_of,
    few_layers,
    mixed_params,
    pair_of,
    prompts_of,
    read_answers,
    subject_of,
)
from bench.verify import answers_row
from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.lookup import ModelAndLookup, SuffixDrafter
from specdec.runtime.drafts.draft_policy import DraftPolicy, RoundTimes

MIXED = ((1, 6), (4, 16), (32, 64), (128, 256), (64, 96), (16, 40), (2, 8), (96, 144), (8, 24))
"""Requests at once, and how many in all, one phase after the other."""
LUCK = 4
"""Requests that a steady row has at least, one after the other if need be: a single one may be lucky."""

Measure = Callable[[Engine], float]
"""An engine -> seconds."""


def numbered_prompt(number: int, length: int) -> list[int]:
    draw = np.random.default_rng(number)
    return [number, *draw.integers(FIRST_TEXT, 2 * FIRST_TEXT, length - 1).tolist()]


def steady_seconds(engine: Engine, batch: int, length: int, tokens: int) -> float:
    """Seconds a token and request, of a few turns where requests are few."""
    params, turns, spent = SamplingParams(max_new_tokens=tokens, ignore_eos=True), max(1, LUCK // batch), 0.0
    for turn in range(turns):
        first = 1 + turn * batch
        with engine.prompts_only():
            handles = engine.submit_many([numbered_prompt(first + i, length) for i in range(batch)], params)
            while any(h.read() is None for h in handles if not h.finished and not h.stats.output_tokens):
                engine.step()
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        begin = time.perf_counter()
        while engine.step():
            pass
        spent += (time.perf_counter() - begin) / (tokens - 1)
    return spent / turns


def crowd_seconds(engine: Engine, requests: int, length: int, tokens: int) -> float:
    """Seconds for all of it."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    prompts = [numbered_prompt(1 + i % (FIRST_TEXT - 1), length) for i in range(requests)]
    handles = engine.submit_many(prompts, params)
    while engine.step():
        pass
    assert all(handle.finished for handle in handles)
    return time.perf_counter() - begin


def mixed_seconds(engine: Engine, length: int, tokens: int, most: int) -> float:
    """Seconds for all of it."""
    draw = np.random.default_rng(0)
    number, begin = 1, time.perf_counter()
    for at_once, in_all in MIXED[: 2 if ON_CPU else None]:
        wanted = min(at_once, most)
        to_come = in_all * wanted // at_once
        while to_come or engine.running_ids():
            for _ in range(min(to_come, wanted - len(engine.running_ids()))):
                asked = SamplingParams(max_new_tokens=int(draw.integers(max(2, tokens // 3), tokens)), ignore_eos=True)
                engine.submit(numbered_prompt(number, length), asked)
                number, to_come = number % (FIRST_TEXT - 1) + 1, to_come - 1
            engine.step()
    while engine.step():
        pass
    return time.perf_counter() - begin


def forget(engine: Engine) -> None:
    """The choice is that of a new engine: it knows what was timed when the engine was made, no more."""
    known = engine.steps.draft_policy
    assert known is not None
    engine.steps.draft_policy = DraftPolicy(known.shapes, engine.table.max_requests + 1)
    timed = {size: RoundTimes(times.timed.tolist()) for size, times in known.times.items()}
    engine.steps.draft_policy.times.update(timed)


def compared_row(case: str, right: str, plain: Engine, engine: Engine, measure: Measure, scale: float) -> Row:
    """Plain decoding, every draft of the engine always, and its own choice."""

    def in_rounds() -> tuple[float, float]:
        """Seconds, and those of them that the device was in rounds: no prompts, nothing of the host."""
        before = engine.stats().batch_seconds
        return measure(engine), engine.stats().batch_seconds - before

    choice = engine.steps.draft_policy
    assert choice is not None
    for each in (engine, plain):  # warm: prompts are captured, clocks are up
        measure(each)
    first, fixed = measure(plain), []
    for shape in choice.shapes:
        with patch.object(choice, "choose", lambda *_, shape=shape, **__: shape):
            fixed.append(in_rounds())
    measured = []
    for _ in range(2):
        forget(engine)
        measured.append((*in_rounds(), engine.stats().drafts.rounds))
    adaptive, device, rounds = min(measured)
    first = min(first, measure(plain))
    figures: dict[str, object] = {"right": right, "plain engine": f"{scale * first:.3f}"}
    figures |= {str(s): f"{scale * t:.3f}" for s, (t, _) in zip(choice.shapes, fixed, strict=True)}
    figures |= {"adaptive": f"{scale * adaptive:.3f}", "to plain": f"{first / adaptive:.3f}"}
    figures["to best"] = f"{min(first, *(seconds for seconds, _ in fixed)) / adaptive:.3f}"
    figures["rounds alone to best"] = f"{min(seconds for _, seconds in fixed) / max(device, 1e-9):.3f}"
    return Row(case, figures=figures | {"chosen": "/".join(map(str, rounds))})


def speed_rows(
    shape: str,
    layers: int,
    batches: Sequence[int],
    right: Sequence[float],
    hard: float,
    steps: int,
    topk: int,
    lookup: Sequence[float],
    length: int,
    tokens: int,
    crowd: int,
    crowd_tokens: Sequence[int],
    loads: Sequence[str],
) -> Iterator[Row]:
    """ms a token and request of steady rows, seconds of the others. hard: how often a draft of every second prompt of
    the mixed load is right; topk: more than 1: trees of 16 nodes; lookup: how often a suffix lookup next to the drafter
    is right, empty: there is none; crowd: requests of that load, 0: none."""
    most, spec = max(batches), SpecConfig(steps, topk, 16 if topk > 1 else None)
    longest = max(length + tokens, sum(crowd_tokens)) + 32
    sizes = EngineConfig(max_batch_size=most, max_model_len=longest, device=DEVICE)
    subject = subject_of(shape, {"chain": spec}, layers)
    plant = RandomText(subject.target.vocab_size, subject.target.device)
    drafter = subject.drafter
    assert drafter is not None
    if lookup:
        drafter = ModelAndLookup(drafter, SuffixDrafter())
        plant.right_by_lookup.fill_(lookup[0])
    with plant.in_samplers():
        plain = Engine(subject.target, config=sizes)
        engine = Engine(subject.target, change_drafts(drafter, plant.drafts), spec=spec, config=sizes)
        assert engine.steps.draft_policy is not None
        for size, times in sorted(engine.steps.draft_policy.times.items()):
            yield Row(
                f"{size} requests, timed when made", "", ", ".join(f"{1e3 * each:.3f}" for each in times.timed) + " ms"
            )
        for often in right if "steady" in loads else ():
            plant.right.fill_(often)
            for batch in batches:
                measure = lambda each, b=batch: steady_seconds(each, b, length, tokens)  # noqa: E731
                yield compared_row(f"{batch}", f"{often}", plain, engine, measure, 1e3)
        if crowd and "crowd" in loads:
            plant.right.fill_(right[-1])
            measure = lambda each: crowd_seconds(each, crowd, *crowd_tokens)  # noqa: E731
            yield compared_row(f"{crowd} in all, s", f"{right[-1]}", plain, engine, measure, 1.0)
        if "mixed" in loads:
            plant.right[::2], plant.right[1::2] = 0.9, hard
            measure = lambda each: mixed_seconds(each, length, tokens, most)  # noqa: E731
            yield compared_row("mixed, s", f"{hard}, 0.9", plain, engine, measure, 1.0)
        yield Row("why the newest round had its draft", engine.stats().drafts.why, str(engine.stats().captures))


LENGTHS = (3, 9, 5, 7) if ON_CPU else (700, 33, 2, 260, 15, 512, 90, 400)
NEW = 12 if ON_CPU else 64
FOUR = SpecConfig(4)
SIXTEEN = SpecConfig(4, 4, 16)
DRAFTERS: dict[str, tuple[str, str, tuple[SpecConfig, ...]]] = {
    "mtp": ("gemma4-e4b", "own", (FOUR, SIXTEEN)),
    "eagle3": ("qwen3-8b", "own", (FOUR,)),
    "block": ("qwen3-8b", "dflash", (FOUR, SIXTEEN)),
    "suffix": ("qwen3-8b", "suffix", (FOUR,)),
    "lm": ("qwen3-8b", "lm", (FOUR,)),
    "dspark": ("qwen3-8b", "dspark", (FOUR,)),
}
"""Shape of the target, kind of the drafter, drafts."""


def tokens_rows(drafters: Sequence[str]) -> Iterator[Row]:
    for name in drafters:
        shape, kind, specs = DRAFTERS[name]
        pair = pair_of(shape, few_layers(shape), deterministic=True, operations=OPERATIONS)
        bodies = prompts_of(LENGTHS, pair.target.vocab_size - len(LENGTHS), 0)
        prompts = [[number, *(token + len(LENGTHS) for token in body)] for number, body in enumerate(bodies)]
        params = mixed_params(len(LENGTHS), NEW, ignore_eos=True)
        sizes: dict[str, Any] = {"max_model_len": max(LENGTHS) + NEW + 8, "prefix_cache": False, "page_size": 16}
        want = answers(engine_of(pair.target, max_batch_size=1, **sizes), prompts, params)
        texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, want, strict=True)]
        drafter = pair.drafter(kind)
        assert drafter is not None
        change_drafts(drafter, KnownTexts(texts, FOUR.num_steps + 1).six_of_ten)

        def row(what: str, engine: Engine, prompts: Any = prompts, params: Any = params, want: Any = want) -> Row:
            begin, before = time.perf_counter(), engine.stats()
            outputs = engine.generate(prompts, params, progress=False)
            after = engine.stats()
            rounds = [now - then for now, then in zip(after.drafts.rounds, before.drafts.rounds, strict=True)]
            uncaptured = after.captures.uncaptured_rounds - before.captures.uncaptured_rounds
            note = f"{after.acceptance_length:.2f} tokens a round, {'/'.join(map(str, rounds))} rounds by draft"
            note += f", {uncaptured} rounds not captured, {time.perf_counter() - begin:.0f} s"
            return answers_row(what, read_answers(outputs), want, note, ok=ON_CPU or uncaptured == 0)

        for spec in specs:
            title = f"{name}, {'chain of 4' if spec.topk == 1 else f'tree of {spec.num_nodes}'}"
            sizes["max_batch_size"] = len(LENGTHS)
            with engine_of(pair.target, drafter, replace(spec, adaptive=False), **sizes) as engine:
                yield row(f"{title}, fixed", engine)
            with engine_of(pair.target, drafter, spec, **sizes) as engine:
                yield row(f"{title}, adaptive", engine)
                choice = engine.steps.draft_policy
                assert choice is not None
                shapes = cycle(choice.shapes)
                with patch.object(choice, "choose", lambda *_, shapes=shapes, **__: next(shapes)):
                    yield row(f"{title}, in turn", engine)
