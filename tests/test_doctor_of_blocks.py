"""The doctor names a wrong MASK id and wrong taps of a block drafter and only that, nothing in a healthy pair, and its
dense form of blocks is what the worker computes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from block_heads import random_head

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.doctor import diagnose
from specdec.doctor.changes import changed_block, possible_masks
from specdec.doctor.dense_drafts import dense_drafts, record
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.models.bundled import HELD_OUT_PROBLEMS
from specdec.models.published import BLOCK_PAIRS
from specdec.text.prompt_files import read_prompts

from marks import deep_cases, examples

SPEC = SpecConfig(4)
TOKENS = examples(24, 32)

pytestmark = pytest.mark.usefixtures("bundled_once")


@pytest.fixture(scope="module")
def engine():
    with Engine.from_pretrained("tiny-gemma4", None, spec=SPEC, config=EngineConfig(max_batch_size=8)) as engine:
        yield engine


def diagnosed(engine, drafter, prompts=None, **options):
    with Engine(engine.target, drafter, tokenizer=engine.tokenizer, spec=SPEC, config=engine.config) as pair:
        return diagnose(pair, prompts, **options)


def causes(diagnosis):
    return [finding.cause for finding in diagnosis.findings]


BLOCK_MASK, WRONG_MASK = 2047, 77
"""The drafter below is the last row of the table; and what its config may say instead."""


@pytest.fixture(scope="module")
def block(engine):
    """block(**changes): a drafter of random layers whose lm_head is fitted to its states on the doctor's own prompts,
    with these fields of its spec changed."""
    target = engine.target
    head = random_head(target, "deepspec-dflash", std=0.1, mask_token=BLOCK_MASK, aux_layers=(4, 9), windows=(None, 24))
    head.embed_tokens.weight.data.copy_(target.embed.weight)
    drafter = BlockDrafter(head, target)
    prompts = [engine.chat_prompt(problem.text) for problem in read_prompts(HELD_OUT_PROBLEMS, 8)]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
    states, tokens = [], []
    with pytest.MonkeyPatch.context() as spying, torch.inference_mode():
        logits = drafter.plain.logits
        spying.setattr(drafter.plain, "logits", lambda rows: states.append(rows) or logits(rows))
        for output in outputs:
            text = record(target, output.prompt_token_ids, output.token_ids)
            roots = dense_drafts(drafter, text, SPEC.num_steps).roots
            tokens.append(text.tokens[roots[:, None] + 1 + torch.arange(SPEC.num_steps)])
        x, y = torch.cat(states).flatten(0, 1), torch.cat(tokens).flatten()
        wanted = torch.nn.functional.one_hot(y, target.vocab_size).float()
        ridge = 1e-3 * x.pow(2).mean() * torch.eye(x.shape[1])
        fitted = 60 * torch.linalg.solve(x.T @ x + ridge, x.T @ wanted).T
    head.lm_head.weight.data.copy_(fitted)

    return lambda **changes: changed_block(drafter, target, **changes)


@pytest.mark.deep
def test_nothing_is_named_in_a_healthy_block_pair(block, engine):
    found = diagnosed(engine, block(), max_new_tokens=TOKENS)
    assert causes(found) == [] and found.healthy
    assert found.reference.holds and found.reference.same_token and found.reference.difference < 1e-4
    assert found.acceptance.length > 1.5
    assert found.read["MASK"] == str(BLOCK_MASK)
    assert {trial.cause for trial in found.trials} >= {"MASK id", "taps"}


@deep_cases("taps one later")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "cause", "do"),
    [
        ({"mask_token": WRONG_MASK}, "MASK id", f"mask_token_id: {BLOCK_MASK} "),
        ({"aux_layers": (5, 10)}, "taps", "target_layer_ids: [3, 8]"),
    ],
    ids=["MASK", "taps one later"],
)
def test_a_seeded_cause_of_a_block_pair_is_named_and_only_that(changes, cause, do, block, engine):
    found = diagnosed(engine, block(**changes), max_new_tokens=TOKENS)
    assert causes(found) == [cause]
    [finding] = found.findings
    assert do in finding.do
    assert finding.after > finding.before


@deep_cases("dflash", "dspark")
@pytest.mark.parametrize("kind", ["dflash", "jetspec", "dspark", "dspark-rnn"])
def test_the_dense_form_of_blocks_is_the_workers(kind, engine):
    drafter = BlockDrafter(random_head(engine.target, kind), engine.target)
    found = diagnosed(engine, drafter, [[2, 5, 9], [2, 7], [2, 8], [2, 11]], max_new_tokens=8, causes=())
    assert found.reference.holds and found.reference.difference < 1e-4


def test_ids_that_may_be_a_mask():
    class Tokenizer(SimpleNamespace):
        def __len__(self):
            return 90

    tokenizer = Tokenizer(pad_token_id=3, mask_token_id=None, added_tokens_decoder={5: "<|MASK|>", 6: "<eos>"})
    assert possible_masks(tokenizer, SimpleNamespace(eos_token_id=[1, 2]), 96) == [3, 5, 90, 95, 0]
    assert possible_masks(None, SimpleNamespace(pad_token_id=200), 96) == [95, 0]


def test_the_page_of_block_drafters_names_every_pair_with_its_figure():
    """Names that a row of the page shortens, `_8b_`, are looked for by their beginning."""
    page = (Path(__file__).parent.parent / "docs/block_drafters.md").read_text("utf-8")
    for pair in BLOCK_PAIRS:
        assert pair.drafter.rpartition("/")[2].partition("_8b_")[0].partition("_14b_")[0] in page, pair
        assert pair.accepts is None or f"{pair.accepts.length}" in page, pair
