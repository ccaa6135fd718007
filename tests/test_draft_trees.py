"""Draft trees end to end: the text is that of plain decoding, whatever the tree, the window and the page size."""

import pytest

from specdec import SamplingParams, SpecConfig

SPECS = [SpecConfig(3, 2), SpecConfig(10, 3, 16), SpecConfig(2, 8, 64)]
LENGTHS = (1, 9, 40)
NEW = 14


def spec_id(spec):
    return f"{spec.num_steps}x{spec.topk}"


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
@pytest.mark.parametrize("ordered", [False, True], ids=["dense", "centroid"])
def test_greedy_trees_equal_the_eager_forward(
    gemma4_family, ordered, spec, page_size, make_target, make_assistant, make_engine, greedy_oracle, random_prompt
):
    model = make_target(gemma4_family)
    prompts = [random_prompt(n) for n in LENGTHS]
    engine = make_engine(model, make_assistant(model, ordered), spec=spec, page_size=page_size, max_batch_size=2)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=NEW))
    engine.table.check()
    assert [out.token_ids for out in outputs] == [greedy_oracle(model, prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("spec", SPECS[:2], ids=spec_id)
def test_seeded_sampling_equals_plain_decoding(
    spec, temperature, make_target, make_assistant, make_engine, random_prompt
):
    model = make_target("gemma4-e2b")
    prompts = [random_prompt(n) for n in LENGTHS]
    params = [SamplingParams(max_new_tokens=NEW, temperature=temperature, top_p=0.9, seed=i) for i in range(3)]
    plain = make_engine(model, None).generate(prompts, params)
    trees = make_engine(model, make_assistant(model), spec=spec).generate(prompts, params)
    assert [out.token_ids for out in trees] == [out.token_ids for out in plain]


def test_a_draft_is_no_larger_than_what_is_left_to_generate():
    assert SpecConfig(4, 4, 16).shortened(9) == (4, 16)
    assert SpecConfig(4, 4, 16).shortened(1) == (1, 5)
    assert SpecConfig(4, 4, 16).shortened(0) == (0, 1)
    assert SpecConfig(6).shortened(2) == (2, 3)
    assert SpecConfig(6, 1, 3).shortened(9) == (2, 3)
