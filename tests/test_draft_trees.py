"""Draft trees end to end: the text is that of plain decoding, whatever the tree, the window and the page size.

Windows (8) are smaller than the deepest tree (10) and than the longest prompt (40).
"""

import pytest

from specdec import SamplingParams, SpecConfig

from marks import deep_cases, each_value, pairs, usual
from tiny_models import FAMILIES, GEMMA4_FAMILIES, random_eagle3

SPECS = [SpecConfig(3, 2), SpecConfig(10, 3, 16), SpecConfig(2, 8, 64)]
LENGTHS = (1, 9, 40)
NEW = 14
FEW_TOKENS = 12  # so few that an untrained drafter is right now and then


def spec_id(value):
    return f"{value.num_steps}x{value.topk}" if isinstance(value, SpecConfig) else None


@pytest.fixture
def trees_of(make_engine, greedy_oracle, random_prompt):
    """trees_of(model, drafter, spec, page_size, ...): greedy outputs, equal to the eager forward's."""

    def check(model, drafter, spec, page_size, lengths=LENGTHS, vocab=None):
        prompts = [random_prompt(n) if vocab is None else random_prompt(n, vocab=vocab) for n in lengths]
        engine = make_engine(model, drafter, spec=spec, page_size=page_size, max_batch_size=2)
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=NEW))
        engine.table.check()
        assert [out.token_ids for out in outputs] == [
            greedy_oracle(model, prompt, NEW, out.token_ids) for prompt, out in zip(prompts, outputs, strict=True)
        ]
        return sum(sum(out.stats.accepted_counts) for out in outputs)

    return check


@deep_cases("gemma4-e2b-3x2-1-False", "gemma4-31b-3x2-16-True")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "spec", "page_size", "ordered"),
    usual(
        each_value(pairs(GEMMA4_FAMILIES, SPECS, [1, 4, 16], [False, True])),
        lambda family, *_: family != "gemma4-multimodal",
    ),
    ids=spec_id,
)
def test_greedy_trees_equal_the_eager_forward(family, spec, page_size, ordered, make_target, make_assistant, trees_of):
    """`ordered`: with a centroid head."""
    model = make_target(family)
    trees_of(model, make_assistant(model, ordered), spec, page_size)


@pytest.mark.parametrize("page_size", [1, 4])
def test_trees_of_200_nodes_equal_the_eager_forward(page_size, make_target, make_assistant, trees_of):
    """More nodes than an integer has bits, of which most lie on paths that leave the window."""
    model = make_target("gemma4-e2b", vocab_size=FEW_TOKENS)
    spec = SpecConfig(num_steps=10, topk=5, num_draft_tokens=200)
    assert trees_of(model, make_assistant(model), spec, page_size, (9, 3), FEW_TOKENS) > 0


@deep_cases("gemma4-e2b-3x2-1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "spec", "page_size"),
    usual(
        each_value(
            (family, spec, (1, 4, 16)[(i + j) % 3])
            for i, family in enumerate(FAMILIES)
            for j, spec in enumerate(SPECS[:2])
        ),
        lambda family, *_: family in ("gemma4-e2b", "llama"),
    ),
    ids=spec_id,
)
def test_eagle3_trees_equal_the_eager_forward(family, spec, page_size, make_target, trees_of):
    model = make_target(family, vocab_size=FEW_TOKENS)
    accepted = trees_of(model, random_eagle3(model), spec, page_size, vocab=FEW_TOKENS)
    assert accepted > 0 or spec.topk < 3


@deep_cases("gemma4-e2b mtp-3x2-0.7")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "spec", "temperature"),
    usual(
        each_value(
            pairs(
                ["gemma4-e2b mtp", "gemma4-e2b eagle3", "gpt_oss eagle3", "llama eagle3", "qwen2 eagle3"],
                SPECS[:2],
                [0.7, 1.3],
            )
        ),
        lambda pair, *_: pair in ("gemma4-e2b mtp", "gpt_oss eagle3"),
    ),
    ids=spec_id,
)
def test_seeded_sampling_equals_plain_decoding(
    pair, spec, temperature, make_target, make_assistant, make_engine, random_prompt
):
    name, drafter = pair.split()
    model = make_target(name, vocab_size=FEW_TOKENS) if drafter == "eagle3" else make_target(name)
    prompts = [random_prompt(n, vocab=FEW_TOKENS) for n in LENGTHS]
    params = [SamplingParams(max_new_tokens=NEW, temperature=temperature, top_p=0.9, seed=i) for i in range(3)]
    plain = make_engine(model, None).generate(prompts, params)
    assistant = make_assistant(model) if drafter == "mtp" else random_eagle3(model)
    trees = make_engine(model, assistant, spec=spec).generate(prompts, params)
    assert [out.token_ids for out in trees] == [out.token_ids for out in plain]
    greedy = make_engine(model, None).generate(prompts, SamplingParams(max_new_tokens=NEW))
    assert [out.token_ids for out in trees] != [out.token_ids for out in greedy]


def test_a_draft_is_no_larger_than_what_is_left_to_generate():
    assert SpecConfig(4, 4, 16).shortened(9) == (4, 16)
    assert SpecConfig(4, 4, 16).shortened(1) == (1, 5)
    assert SpecConfig(4, 4, 16).shortened(0) == (0, 1)
    assert SpecConfig(6).shortened(2) == (2, 3)
    assert SpecConfig(6, 1, 3).shortened(9) == (2, 3)
