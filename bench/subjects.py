"""What engines are measured on: published shapes with random weights, drafters for them, prompts, and their answers."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.device import DEVICE, DIVISOR, DTYPE, ON_CPU  # isort: skip - before triton
import torch

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.base import Drafter
from specdec.draft_models.language_model import LanguageModelDrafter
from specdec.draft_models.lookup import NgramDrafter, SuffixDrafter
from specdec.engine import Engine
from specdec.gpu.operations import FAST, REFERENCE
from specdec.measurement.model_shapes import BLOCKS, ModelShape, Shrink, block_spec_of, find_shape
from specdec.measurement.phase_run import BenchSubject
from specdec.measurement.random_weights import UNPACKED, drafter_of, find_form, make_target, random_subject
from specdec.models.target import TargetModel

CHAIN, TREE = SpecConfig(4, adaptive=False), SpecConfig(4, 4, 16, adaptive=False)
OPERATIONS = REFERENCE if ON_CPU else FAST
"""For cases that would take hours in the interpreter."""
FEW_LAYERS = {
    "gemma4-e4b": 8,
    "gemma4-31b": 6,
    "gemma4-26b-a4b": 4,
    "gpt-oss-20b": 3,
    "qwen3-8b": 4,
    "step-3.7-flash": 5,
    "mimo-v2-flash": 3,
    "qwen3.5-4b": 4,
    "qwen3.5-35b-a3b": 4,
}
"""Layers by shape, enough to have every kind of them; of the other shapes two."""

Answer = tuple[list[int], Any]
"""Token ids and log-probabilities: sums over the vocabulary, so one other bit in any logit shows."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A target of random weights at a published shape."""

    shape: ModelShape
    shrink: Shrink
    target: TargetModel

    def drafter(self, kind: str, seed: int = 1) -> Drafter | None:
        """A drafter for the target: "own" is what is published for the shape; None for "none"."""
        if kind in BLOCKS:
            few = {"layers": 1 if ON_CPU else 2, "block_size": 8}
            return drafter_of(block_spec_of(self.target.config, kind, **few), self.target, seed)
        if kind == "lm":  # of the same family and other weights
            model = make_target(self.shape, self.shrink, DEVICE, DTYPE, 5)
            return LanguageModelDrafter(TargetModel(model, self.target.ops), self.target)
        if kind == "own":
            return drafter_of(self.shape.drafter(self.target.config, self.shrink), self.target, seed)
        return {"suffix": SuffixDrafter, "ngram": NgramDrafter, "none": lambda: None}[kind]()


def pair_of(
    pair: str, layers: int = 0, *, on_cpu: int = 2, deterministic: bool = False, operations: Any = FAST
) -> Pair:
    """pair: SHAPE or SHAPE:WEIGHTS. layers: 0: all. on_cpu: layers on a CPU."""
    name, _, weights = pair.partition(":")
    shape, form = find_shape(name), find_form(weights or UNPACKED)
    shrink = Shrink(on_cpu if ON_CPU else layers or None, DIVISOR, multiple=32 if form else 8)
    model = make_target(shape, shrink, DEVICE, DTYPE, 0, form)
    return Pair(shape, shrink, TargetModel(model, operations, deterministic=deterministic))


def subject_of(pair: str, drafts: Mapping[str, SpecConfig | None], layers: int, devices: int = 1) -> BenchSubject:
    """Such a pair for the phase benchmark, with the drafter that is published for the shape."""
    name, _, weights = pair.partition(":")
    return random_subject(
        find_shape(name),
        drafts,
        weights=weights or None,
        layers=2 if ON_CPU else layers or None,
        divisor=DIVISOR,
        config=EngineConfig(device=DEVICE, tensor_parallel=devices, fused=devices > 1 or "auto"),
    )


def few_layers(pair: str) -> int:
    return FEW_LAYERS.get(pair.partition(":")[0], 2)


def engine_of(
    target: TargetModel, drafter: Any = None, spec: SpecConfig = CHAIN, *, tokenizer: Any = None, **config: Any
) -> Engine:
    """An engine of the target's own mode; `config` are other fields of an EngineConfig."""
    usual = {"max_model_len": 64 if ON_CPU else 2048, "deterministic": target.deterministic}
    if not ON_CPU or target.ops is FAST:
        usual |= {"attention": "triton"}
    return Engine(target, drafter, spec=spec, tokenizer=tokenizer, config=EngineConfig(**{**usual, **config}))


def prompts_of(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


def mixed_params(count: int, new: int, **options: Any) -> list[SamplingParams]:
    """Greedy and seeded requests in turn."""
    return [
        SamplingParams(max_new_tokens=new, temperature=(i % 2) * 0.8, top_p=0.95, seed=i, **options)
        for i in range(count)
    ]


def read_answers(outputs: Sequence[Any]) -> list[Answer]:
    return [(out.token_ids, out.logprobs) for out in outputs]


def answers(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
    """Answers of one engine, which is closed then."""
    with engine:
        return read_answers(engine.generate(list(prompts), list(params), progress=False))


def round_ms(engine: Engine, prompts: Sequence[list[int]], draft: SpecConfig | bool | None = None) -> float:
    """Milliseconds of the device for a steady round of these requests: the best of three runs. draft: as requests'
    `speculation`."""
    rounds = []
    params = SamplingParams(max_new_tokens=2 if ON_CPU else 100, ignore_eos=True, speculation=draft)
    for _ in range(1 if ON_CPU else 3):
        outs = engine.generate(list(prompts), params, progress=False)
        seconds = sum(o.stats.draft_seconds + o.stats.verify_seconds + o.stats.other_seconds for o in outs)
        rounds.append(seconds / outs[-1].stats.rounds * 1e3)
    return min(rounds)


def prompt_ms(engine: Engine, prompt: list[int]) -> float:
    """Milliseconds of the device for a prompt: the median of five runs after two runs that are not counted."""
    params, times = SamplingParams(max_new_tokens=1), []
    for _ in range(2 if ON_CPU else 7):
        [out] = engine.generate(prompt, params, progress=False)
        times.append(out.stats.prefill_seconds * 1e3)
    return statistics.median(times[1 if ON_CPU else 2 :])


def first_token_ms(engine: Engine, prompts: Sequence[list[int]]) -> tuple[float, float]:
    """Milliseconds until the first token, the mean of these prompts, and the last one's."""
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    if not ON_CPU:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    waiting, times = engine.submit_many(list(prompts), [params] * len(prompts)), []
    while waiting:
        engine.step()
        now = (time.perf_counter() - begin) * 1e3
        left = [handle for handle in waiting if not handle.finished]
        times += [now] * (len(waiting) - len(left))
        waiting = left
    return statistics.mean(times), max(times)
