"""Drafters that fit any target, in a hundred engines each: every request has the tokens of plain decoding."""

import functools
import itertools
import random
from dataclasses import replace

import pytest
from block_heads import KINDS, random_block
from mtp_checkpoints import SHAPES, publish
from random_loads import check_tokens, random_config, random_requests

from specdec import Engine, SpecConfig
from specdec.draft_models.block.block_head import FusedBlock
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.language_model import LanguageModelDrafter
from specdec.draft_models.lookup import SuffixDrafter
from specdec.draft_models.model_and_lookup import ModelAndLookup
from specdec.drafter_loading import load_any_drafter
from specdec.gpu.operations import REFERENCE
from specdec.models.target import TargetModel

from marks import usual_cases
from tiny_models import FAMILIES, GEMMA4_FAMILIES, random_eagle3

CASES = 100
FEW_TOKENS = 12
"""So few that a random head or assistant is right now and then."""
DRAFTERS = ("suffix", "language_model", "block", "eagle3", "mtp", "model and lookup", "assistant")
MODULES = ["mimo_v2-form", *sorted(SHAPES.keys() - {"mimo_v2-form", "qwen3-tuned"})]


def spec_of(rng):
    depth, topk = rng.randint(1, 6), rng.choice((1, 1, 2, 4))
    nodes = None if topk == 1 else rng.randint(2, min(24, 1 + depth * topk))
    return SpecConfig(num_steps=depth, topk=topk, num_draft_tokens=nodes)


def block_spec_of(rng):
    depth, topk = rng.randint(1, 8), rng.choice((1, 1, 2, 4, 8))
    most = 1 + topk + (depth - 1) * topk**2
    nodes = None if topk == 1 else rng.randint(min(8, most), min(128, most))
    return SpecConfig(num_steps=depth, topk=topk, num_draft_tokens=nodes)


def chosen_drafter(name, rng, model, make_target, make_assistant):
    if name == "suffix":
        return SuffixDrafter()
    if name == "mtp":
        return load_any_drafter("mtp", TargetModel(model))
    if name == "assistant":
        return Gemma4MTPDrafter(make_assistant(model, ordered=rng.random() < 0.5), TargetModel(model))
    if name in ("language_model", "model and lookup"):
        other = model if rng.random() < 0.3 else make_target(rng.choice(FAMILIES), seed=rng.randint(0, 2))
        drafter = LanguageModelDrafter(TargetModel(other), TargetModel(model))
        return drafter if name == "language_model" else ModelAndLookup(drafter, SuffixDrafter())
    if name == "eagle3":
        return random_eagle3(model, rng.choice(((None,), (None, 6), (4,))))
    kind, ops = rng.choice(list(KINDS)), rng.choice((None, REFERENCE))
    drafter = random_block(model, kind, ops=ops, block_size=9)
    assert isinstance(drafter.form, FusedBlock) == (ops is not None and kind != "dspark-gemma4"), drafter.unfused
    return drafter


@usual_cases("suffix-9", "block-6", "eagle3-0", "mtp-12", "assistant-28")  # trees, and few tokens
@pytest.mark.parametrize(("drafter", "seed"), list(itertools.product(DRAFTERS, range(CASES))))
def test_tokens_of_plain_decoding(drafter, seed, make_target, make_assistant, make_engine, random_prompt, tmp_path):
    rng = random.Random(f"{drafter} {seed}")
    family = rng.choice(GEMMA4_FAMILIES if drafter == "assistant" else FAMILIES)
    few = {"vocab_size": FEW_TOKENS} if drafter in ("assistant", "eagle3") else {}
    model = make_target(family, **few)
    if few:
        random_prompt = functools.partial(random_prompt, vocab=FEW_TOKENS)
    if drafter == "mtp":
        model = publish(MODULES[seed % len(MODULES)], tmp_path).loaded()
        random_prompt = functools.partial(random_prompt, vocab=6)
    deterministic = drafter in ("block", "mtp") and rng.random() < 0.25
    prompts, params = random_requests(rng, random_prompt)
    spec = block_spec_of(rng) if drafter == "block" else spec_of(rng)
    slots = None if seed % 2 else 90 + spec.num_nodes  # few: requests are preempted
    finished = rng.choice((0, 60, 400)) if drafter in ("suffix", "model and lookup") else 0
    config = random_config(rng, slots, finished_tokens=finished, deterministic=deterministic)
    alone = [replace(each, speculation=None) for each in params]
    plain = make_engine(model, None, max_model_len=128, deterministic=deterministic)
    want = [out.token_ids for out in plain.generate(prompts, alone)]
    chosen = chosen_drafter(drafter, rng, model, make_target, make_assistant)
    if drafter == "model and lookup":  # which draft there is is drawn, too
        spec = SpecConfig(rng.randint(1, 6), rng.choice((1, 1, 2)), adaptive=True)
    spec = replace(spec, num_steps=min(spec.num_steps, chosen.max_steps or spec.num_steps))
    engine = Engine(TargetModel(model), chosen, spec=spec, config=config)
    if engine.steps.draft_policy is not None:
        engine.steps.draft_policy.choose = lambda *_, **__: rng.choice(engine.steps.draft_policy.shapes)
    check_tokens(engine, prompts, params, want)
