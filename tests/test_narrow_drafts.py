"""Drafters that propose less than they were asked for: a chain for a tree, fewer nodes, another number each round.

What a round computes by node is as wide as the tree that was proposed: masks, edits of logits, scores, draws.
"""

import pytest
import torch

from specdec import DraftTree, SamplingParams, SpecConfig
from specdec.draft_models.base import DraftBatch, StatelessDrafter
from specdec.draft_models.lookup import NgramDrafter
from specdec.draft_models.model_and_lookup import ModelAndLookup

from inside import capture_on_tape
from marks import deep, deep_cases
from tiny_models import random_eagle3

EOS, VOCAB, NEW = 256, 300, 14
TREE = SpecConfig(3, 2, 7)
ASKED = {
    "allowed": {"allowed_token_ids": tuple(range(60, 66))},
    "least": {"min_tokens": 9, "logit_bias": {EOS: 30.0, 7: 6.0}},
    "grammar": {"regex": "[ab]{3,30}"},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "drawn": {"temperature": 1.2, "seed": 5, "top_k": 9, "allowed_token_ids": tuple(range(60, 90))},
    "scored": {"logprobs": 2},
    "free": {},
}


class Narrow(StatelessDrafter):
    """Right drafts for texts that it knows, of `widths` nodes (up to 4) in turn; a chain, or the root branches."""

    name = "narrow"

    def __init__(self, texts: list[list[int]], widths: tuple[int, ...], *, branches: bool = False) -> None:
        self.texts, self.widths, self.branches = texts, widths, branches
        self.rounds = 0

    def propose(self, batch: DraftBatch) -> DraftTree:
        width = min(self.widths[self.rounds % len(self.widths)], batch.num_nodes, batch.num_steps + 1)
        self.rounds += 1
        tokens = torch.zeros((len(batch.root), width), dtype=torch.int64)
        for i, (row, length) in enumerate(zip(batch.history.tolist(), batch.history_len.tolist(), strict=True)):
            past = row[:length]
            rest = next((text[length:] for text in self.texts if text[:length] == past), [])
            tokens[i] = torch.tensor([past[-1], *rest[: width - 1], *[1] * width][:width])
        if not self.branches or width < 3:
            return DraftTree.chain(tokens)
        wrong = (tokens[:, 1:2] + 1) % VOCAB
        tokens = torch.cat([tokens[:, :2], wrong, tokens[:, 2:-1]], dim=1)
        return DraftTree.from_parents(tokens, torch.tensor([-1, 0, 0, 1])[:width].expand_as(tokens))


@pytest.fixture(scope="module")
def model(make_target):
    return make_target("gemma4-e2b", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def prompts(random_prompt):
    return [random_prompt(n, vocab=VOCAB) for n in (5, 13, 9, 4, 21, 8, 6)]


@pytest.fixture(scope="module")
def params():
    pytest.importorskip("llguidance")
    return [SamplingParams(max_new_tokens=NEW, **asked) for asked in ASKED.values()]


@pytest.fixture(scope="module")
def alone(model, make_engine, byte_tokenizer, prompts, params):
    """All without speculation."""
    return make_engine(model, tokenizer=byte_tokenizer).generate(prompts, params)


def drafter_of(kind, model, texts):
    if kind == "ngram":
        return NgramDrafter()
    if kind == "model and ngram":
        return ModelAndLookup(random_eagle3(model), NgramDrafter())
    widths, branches = {
        "chain of 2": ((2,), False),
        "tree of 4": ((4,), True),
        "other each round": ((2, 1, 4, 3), True),
    }[kind]
    return Narrow(texts, widths, branches=branches)


KINDS = ["ngram", "model and ngram", "chain of 2", "tree of 4", "other each round"]


@deep_cases("chain of 2-False", "other each round-False")
@pytest.mark.parametrize(
    ("kind", "captured"),
    [*((kind, False) for kind in KINDS), ("ngram", True), deep("model and ngram", True)],
    ids=str,
)
def test_a_narrow_draft_has_masks_edits_and_scores_of_its_own_nodes(
    kind, captured, model, make_engine, byte_tokenizer, prompts, params, alone, monkeypatch
):
    """A tree was asked for: masks of its 7 nodes met those of the 4 that were there, and every step raised."""
    capture_on_tape(monkeypatch, captured)
    texts = [prompt + out.token_ids for prompt, out in zip(prompts, alone, strict=True)]
    drafter = drafter_of(kind, model, texts)
    engine = make_engine(model, drafter, spec=TREE, tokenizer=byte_tokenizer)
    if drafter.has_lookup:  # all of its drafts
        engine.steps.draft_policy = None
        largest_draft = engine.steps._largest_draft
        engine.steps._largest_draft = lambda *asked: largest_draft(*asked)._replace(by_lookup=True)
    for _ in range(2 if captured else 1):  # what was captured in the first is replayed in the second
        outs = engine.generate(prompts, params)
        assert [out.token_ids for out in outs] == [out.token_ids for out in alone]
        assert [out.finish_reason for out in outs] == [out.finish_reason for out in alone]
        for out, want in zip(outs, alone, strict=True):
            scores, wanted = out.logprobs or [], want.logprobs or []
            assert [each.logprob for each in scores] == pytest.approx([each.logprob for each in wanted], abs=1e-4)
    if isinstance(drafter, Narrow):  # what is right is accepted, whatever else the request asks for
        assert all(sum(out.stats.accepted_counts) > 0 for out in outs)
    engine.table.check()
