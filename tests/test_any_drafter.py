"""Drafters that fit any target, in a hundred engines each: every request has the tokens of plain decoding."""

import random
from dataclasses import replace

import pytest
from random_loads import check_tokens, random_config, random_requests

from specdec import Engine, SpecConfig
from specdec.draft_models.language_model import LanguageModelDrafter
from specdec.draft_models.suffix import SuffixDrafter
from specdec.models.target import TargetModel

from marks import deep, deep_cases
from tiny_models import FAMILIES

CASES = 100
ALWAYS = 1
"""So many of them belong to `make test`; the others are deep."""


def spec_of(rng):
    depth, topk = rng.randint(1, 6), rng.choice((1, 1, 2, 4))
    nodes = None if topk == 1 else rng.randint(2, min(24, 1 + depth * topk))
    return SpecConfig(num_steps=depth, topk=topk, num_draft_tokens=nodes)


@deep_cases("0-language_model")
@pytest.mark.parametrize("drafter", ["suffix", "language_model"])
@pytest.mark.parametrize("seed", [*range(ALWAYS), *(deep(seed) for seed in range(ALWAYS, CASES))])
def test_tokens_of_plain_decoding(seed, drafter, make_target, make_engine, random_prompt):
    rng = random.Random(f"{drafter} {seed}")
    model = make_target(rng.choice(FAMILIES))
    prompts, params = random_requests(rng, random_prompt)
    slots = rng.choice((None, 110))
    config = random_config(rng, slots, finished_tokens=rng.choice((0, 60, 400)) if drafter == "suffix" else 0)
    alone = [replace(each, speculation=None) for each in params]
    want = [out.token_ids for out in make_engine(model, None, max_model_len=128).generate(prompts, alone)]
    target = TargetModel(model)
    chosen = SuffixDrafter()
    if drafter == "language_model":
        other = model if rng.random() < 0.3 else make_target(rng.choice(FAMILIES), seed=rng.randint(0, 2))
        chosen = LanguageModelDrafter(TargetModel(other), target)
    engine = Engine(target, chosen, spec=spec_of(rng), config=config)
    check_tokens(engine, prompts, params, want)
