"""The checkpoints in the package: what they are, that they solve problems, and that the drafter knows its target.

Acceptance is asserted: a drafter that reads the wrong K/V, position or window still gives the right text, only slowly.
"""

import json
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.gemma4_mtp import constructible_assistants
from specdec.evaluation.accuracy_report import final_number
from specdec.models.published import BUNDLED_DIR, BUNDLED_NAMES, HELD_OUT_PROBLEMS
from specdec.text.prompt_files import read_prompts

from marks import examples

SOLVED = examples(5, 8)
FEW = 3  # of them, where acceptance differs by so much that all would show no more
MTP_ACCEPTANCE = 4.5  # of 5; all 200 held-out problems give 4.80
EAGLE3_ACCEPTANCE, TOLERANCE = 2.928, 0.015  # of the first 24, in float32; other kernels may flip a tie or two
HARD = [  # not from the generator's templates: less predictable, so that a tree has something to add
    "A snail climbs 5 feet up a 30 foot wall each day and slips back 2 feet each night. How far is it after 4 days?",
    "Half of the 24 birds on a wire fly away, then a third of the rest. How many birds are still on the wire?",
    "My grandmother baked 3 dozen cookies. We ate 10 at once and 8 more after dinner. How many did she have left?",
]
pytestmark = pytest.mark.usefixtures("bundled_once")


def run(prompts, drafter="tiny-gemma4-mtp", **spec):
    config = EngineConfig(max_batch_size=len(prompts))
    with Engine.from_pretrained("tiny-gemma4", drafter, spec=SpecConfig(**spec), config=config) as engine:
        outputs = engine.generate([engine.chat_prompt(p) for p in prompts], SamplingParams(max_new_tokens=160))
        return outputs, engine.stats()


@pytest.fixture(scope="module")
def problems():
    return read_prompts(HELD_OUT_PROBLEMS)


@pytest.fixture(scope="module")
def solved(problems):
    return run([problem.text for problem in problems[:SOLVED]])


def test_the_models_are_small():
    size = {name: sum(file.stat().st_size for file in (BUNDLED_DIR / name).iterdir()) for name in BUNDLED_NAMES}
    assert size.pop("smollm2-135m-eagle3") <= 20e6
    assert sum(size.values()) <= 25e6


@pytest.mark.deep
def test_the_smollm2_head_fits_a_target_of_its_shape():
    """The target is not shipped, so a random one stands in, of the same width, depth and vocabulary."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=32, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    engines = [
        Engine.from_pretrained(model, drafter, config=EngineConfig(max_batch_size=1, max_model_len=64))
        for drafter in ("smollm2-135m-eagle3", None)
    ]
    drafts, plain = (engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8)) for engine in engines)
    assert engines[0].drafter.aux_layers == (2, 15, 27)
    assert drafts[0].token_ids == plain[0].token_ids


def test_the_target_has_every_feature_of_its_family():
    config = AutoConfig.from_pretrained(BUNDLED_DIR / "tiny-gemma4")
    sliding = config.layer_types.count("sliding_attention")
    assert config.model_type == "gemma4_text"
    assert sliding >= 3 * config.layer_types.count("full_attention") > 0
    assert config.num_kv_shared_layers > 0
    assert config.hidden_size_per_layer_input > 0
    assert config.sliding_window <= 64
    assert len({config.per_layer_config[i].head_dim for i in range(config.num_hidden_layers)}) == 2


def test_held_out_problems_are_200_and_their_arithmetic_is_right(problems):
    assert len({problem.text for problem in problems}) == 200
    for line in HELD_OUT_PROBLEMS.read_text().splitlines():
        answer = json.loads(line)["answer"]
        for expression, value in re.findall(r"<<([\d+\-*/(). ]+)=(-?[\d.]+)>>", answer):
            assert eval(expression) == pytest.approx(float(value)), answer
        assert final_number(answer) is not None


@pytest.mark.slow
def test_the_bundled_target_solves_most_held_out_problems(problems, solved):
    right = [final_number(out.text) == final_number(p.answer) for out, p in zip(solved[0], problems, strict=False)]
    assert sum(right) >= 0.6 * SOLVED


def test_the_drafter_is_accepted(solved):
    assert solved[1].acceptance_length >= MTP_ACCEPTANCE


@pytest.mark.deep
def test_a_tree_is_accepted_further_than_a_chain():
    chain, chain_stats = run(HARD, num_steps=4)
    tree, tree_stats = run(HARD, num_steps=4, topk=4, num_draft_tokens=16)
    assert [out.token_ids for out in tree] == [out.token_ids for out in chain]
    assert tree_stats.acceptance_length >= chain_stats.acceptance_length + 0.4


@pytest.mark.slow
def test_the_eagle3_head_is_accepted_and_a_tree_further(problems, solved):
    prompts = [problem.text for problem in problems[: examples(2, FEW)]]
    chain, chain_stats = run(prompts, "tiny-gemma4-eagle3", num_steps=4)
    tree, tree_stats = run(prompts, "tiny-gemma4-eagle3", num_steps=4, topk=4, num_draft_tokens=16)
    plain = [out.token_ids for out in solved[0][: len(prompts)]]
    assert [out.token_ids for out in chain] == [out.token_ids for out in tree] == plain
    assert chain_stats.acceptance_length >= 2.5
    assert tree_stats.acceptance_length >= chain_stats.acceptance_length + 0.4


@pytest.mark.deep
def test_the_eagle3_head_is_accepted_as_when_it_was_trained(problems):
    """Within a narrow bound: states of one layer later or earlier cost this head little."""
    length = run([problem.text for problem in problems[:24]], "tiny-gemma4-eagle3")[1].acceptance_length
    assert length == pytest.approx(EAGLE3_ACCEPTANCE, abs=TOLERANCE)


@pytest.mark.slow
def test_transformers_gives_the_same_text_with_the_same_pair(problems, solved):
    names = ("tiny-gemma4", "tiny-gemma4-mtp")
    with constructible_assistants():
        model, assistant = (AutoModelForCausalLM.from_pretrained(BUNDLED_DIR / name).float() for name in names)
    ids = torch.tensor([solved[0][0].prompt_token_ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, max_new_tokens=160)
    assert out[0, ids.shape[1] :].tolist() == solved[0][0].token_ids
