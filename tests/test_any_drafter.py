"""Drafters that fit any target, in a hundred engines each: every request has the tokens of plain decoding."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.language_model import LanguageModelDrafter
from specdec.draft_models.suffix import SuffixDrafter
from specdec.models.target import TargetModel

from marks import deep
from tiny_models import FAMILIES

CASES = 100
ALWAYS = 3
"""So many of them belong to `make test`; the others are deep."""


def spec_of(rng):
    depth, topk = rng.randint(1, 6), rng.choice((1, 1, 2, 4))
    nodes = None if topk == 1 else rng.randint(2, min(24, 1 + depth * topk))
    return SpecConfig(num_steps=depth, topk=topk, num_draft_tokens=nodes)


@pytest.mark.parametrize("drafter", ["suffix", "language_model"])
@pytest.mark.parametrize("seed", [*range(ALWAYS), *(deep(seed) for seed in range(ALWAYS, CASES))])
def test_tokens_of_plain_decoding(seed, drafter, make_target, make_engine, random_prompt):
    rng = random.Random(f"{drafter} {seed}")
    model = make_target(rng.choice(FAMILIES))
    shared = random_prompt(rng.randint(0, 20)) if rng.random() < 0.7 else []
    prompts = [[*shared, *random_prompt(rng.randint(1, 30), seed=i)] for i in range(6)]
    params = [
        SamplingParams(
            max_new_tokens=rng.randint(1, 30),
            temperature=rng.choice((0.0, 0.9)),
            seed=i,
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            speculation=rng.choice((None, None, None, False, SpecConfig(1))),
        )
        for i in range(len(prompts))
    ]
    slots = rng.choice((None, 110))
    config = EngineConfig(
        max_model_len=128,
        max_batch_size=rng.choice((1, 3, 8)),
        page_size=rng.choice((1, 4)),
        prefill_chunk=rng.choice((4, 16, 64)),
        prefix_cache=rng.random() < 0.7,
        full_slots=slots,
        swa_slots=slots,
    )
    alone = [replace(each, speculation=None) for each in params]
    want = [out.token_ids for out in make_engine(model, None, max_model_len=128).generate(prompts, alone)]
    target = TargetModel(model)
    chosen = SuffixDrafter()
    if drafter == "language_model":
        other = model if rng.random() < 0.3 else make_target(rng.choice(FAMILIES), seed=rng.randint(0, 2))
        chosen = LanguageModelDrafter(TargetModel(other), target)
    engine = Engine(target, chosen, spec=spec_of(rng), config=config)
    assert [out.token_ids for out in engine.generate(prompts, params)] == want
    with ThreadPoolExecutor(3) as threads:  # again, by three threads, some of it found in the prefix cache
        again = list(
            threads.map(lambda i: engine.generate([prompts[i]], [params[i]])[0].token_ids, range(len(prompts)))
        )
    assert again == want
    engine.table.check()
