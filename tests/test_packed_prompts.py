"""Prompts packed in any company have the tokens and the log-probabilities that each has alone, in every family."""

import random

import pytest

from specdec import SamplingParams

from marks import deep, examples
from tiny_models import FAMILIES

PACKS = examples(2, 20)
"""Random loads of each family; in depth more than 200 in all."""


@pytest.mark.parametrize(
    "family", [family if family in ("gemma4-e2b", "gpt_oss") else deep(family) for family in FAMILIES]
)
def test_random_packs_are_as_lone_prompts(family, make_target, make_engine, random_prompt) -> None:
    """In float64, so that rounding hides nothing: a sum of float32 is apart by up to 1e-4 in another order."""
    draw = random.Random(family)
    model = make_target(family, fresh=True).double()  # others have the shared one after this
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped products have no float64
    sizes = {"max_model_len": 96, "prefix_cache": False}
    lone = make_engine(model, max_batch_size=1, prefill_chunk=64, **sizes)
    packed = make_engine(model, max_batch_size=6, prefill_chunk=draw.randint(3, 20), max_prefill_tokens=29, **sizes)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=0)
    for seed in range(PACKS):
        prompts = [
            random_prompt(draw.choice([1, 2, 7, 19, 33, 50]), seed=9 * seed + i) for i in range(draw.randint(2, 6))
        ]
        together = packed.generate(prompts, params)
        for prompt, out in zip(prompts, together, strict=True):
            [alone] = lone.generate([prompt], params)
            assert out.token_ids == alone.token_ids
            for one, other in zip(out.logprobs, alone.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
        packed.table.check()
