"""The MTP drafter computes, at every draft step of every round, what transformers' assistant computes on the true K/V.

The K/V that the reference reads come from a fresh forward of the HF target over exactly the committed tokens, so a
stale, rejected or missing key, a wrong page, window or layer shows as a difference of logits.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dense_drafts import assert_best, paths_of
from transformers import DynamicCache

from specdec import SamplingParams, SpecConfig, SpecDecError
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter, fit_layers
from specdec.errors import FrozenKVError, UnsupportedModelError
from specdec.models.target import TargetModel
from specdec.modules.transformers_names import cache_argument

from marks import deep, examples, pairs, quick, usual_cases
from tiny_families import TWO_OWNERS
from tiny_models import GEMMA4_FAMILIES, eager
from watched_drafts import watch_proposals

STEPS = 4


class Reference:
    """An assistant of transformers along a path, on K/V and a state of a fresh forward over the text but its root."""

    def __init__(self, target: Any, assistant: Any) -> None:
        self.target, self.assistant = target, assistant
        assistant.set_attn_implementation("eager")

        self.known: dict[tuple[int, ...], tuple[Any, torch.Tensor]] = {}

    @torch.no_grad()
    def committed(self, text: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
        """K and V by type of layer, and the last state."""
        if text not in self.known:
            config = self.target.config.get_text_config()
            owners = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
            cache = DynamicCache()  # without a config it keeps every key of sliding layers too
            with eager(self.target):
                given = {"use_cache": True, "output_hidden_states": True, **cache_argument(self.target, cache)}
                out = self.target(torch.tensor([text]), **given)
            # the last layer of each type that stores K/V. Not `return_shared_kv_states`: some
            # releases (5.23) give none for a target without shared layers
            kv = {kind: (cache.layers[i].keys, cache.layers[i].values) for i, kind in enumerate(owners)}
            assert {k.shape[2] for k, _ in kv.values()} == {len(text)}
            self.known[text] = kv, out.hidden_states[-1][:, -1:]
        return self.known[text]

    @torch.no_grad()
    def logits(self, text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        kv, hidden = self.committed(tuple(text[:-1]))
        given = {"position_ids": torch.tensor([[len(text) - 1]]), "shared_kv_states": kv, "attention_mask": None}
        embed = self.target.get_input_embeddings()
        for token in (text[-1], *path):
            step = self.assistant(inputs_embeds=torch.cat([embed(torch.tensor([[token]])), hidden], dim=-1), **given)
            hidden = step.last_hidden_state
        logits: torch.Tensor = step.logits[0, 0]
        return logits


@usual_cases("gemma4-e2b-(1,)-1-False", "gemma4-31b-(3, 17, 45)-1-True", "gemma4-multimodal-(1,)-4-True")
@pytest.mark.parametrize(
    ("family", "lengths", "page_size", "ordered"),
    quick(
        pairs(GEMMA4_FAMILIES, [(1,), (45,), (3, 17, 45)], [1, 4], [False, True]),
        lambda family, *_: family == "gemma4-e2b",
    ),
    ids=str,
)
def test_every_step_equals_transformers(
    family, lengths, page_size, ordered, make_target, make_assistant, make_engine, greedy_oracle, random_prompt
):
    target = make_target(family, vocab_size=12)  # so few tokens that a random assistant is right now and then
    assistant = make_assistant(target, ordered)
    prompts = [random_prompt(n, vocab=12) for n in lengths]
    engine = make_engine(target, assistant, num_steps=STEPS, page_size=page_size, prefill_chunk=7)
    seen = watch_proposals(engine)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=24))
    assert [out.token_ids for out in outputs] == [greedy_oracle(target, prompt, 24) for prompt in prompts]
    assert any(1 < out.stats.acceptance_length < STEPS + 1 for out in outputs)
    assert {int((row > -torch.inf).sum()) for each in seen for row in each.logits} == {3 if ordered else 12}
    assert_best(Reference(target, assistant), seen[:: 1 + len(seen) // examples(8, 24)], 1, 1e-4)


def test_every_level_of_a_tree_goes_on_from_the_states_of_its_own_path(
    make_target, make_assistant, make_engine, random_prompt
):
    """Three levels of two nodes."""
    target = make_target("gemma4-e2b")
    assistant = make_assistant(target)
    engine = make_engine(target, assistant, spec=SpecConfig(3, 2, 9))
    seen = watch_proposals(engine)
    engine.generate(random_prompt(9), SamplingParams(max_new_tokens=9))
    assert any(len({path[0] for path in paths_of(each) if len(path) == 2}) == 2 for each in seen)
    assert_best(Reference(target, assistant), seen, 2, 1e-4)


@pytest.mark.parametrize("page_size", [deep(1), 4])
def test_trees_of_200_nodes_equal_the_eager_forward(
    page_size, make_target, make_assistant, make_engine, greedy_oracle, random_prompt
):
    """More nodes than an integer has bits, of which most lie on paths that leave the window."""
    target, prompts = make_target("gemma4-e2b", vocab_size=12), [random_prompt(n, vocab=12) for n in (9, 3)]
    engine = make_engine(target, make_assistant(target), spec=SpecConfig(10, 5, 200), page_size=page_size)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=14))
    engine.table.check()
    assert [out.token_ids for out in outputs] == [greedy_oracle(target, prompt, 14) for prompt in prompts]
    assert sum(sum(out.stats.accepted_counts) for out in outputs) > 0


def test_a_failing_step_thaws_the_cache(
    make_target, make_assistant, make_engine, greedy_oracle, random_prompt, monkeypatch
):
    target, prompt = make_target("gemma4-e2b"), random_prompt(9)
    engine = make_engine(target, make_assistant(target))
    with monkeypatch.context() as broken:
        broken.setattr(engine.drafter, "logits", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(prompt, SamplingParams(max_new_tokens=5))
    assert engine.state.worker.view is None and not engine.table.allocator.frozen
    engine.table.check()
    assert engine.table.allocator.primary.held_pages == 0
    [out] = engine.generate(prompt, SamplingParams(max_new_tokens=5))
    assert out.token_ids == greedy_oracle(target, prompt, 5)


def test_a_step_cannot_change_the_cache(make_target, make_assistant, make_engine, random_prompt, monkeypatch):
    """`test_frozen_kv.py` has all that a frozen cache refuses."""
    target = make_target("gemma4-e2b")
    engine = make_engine(target, make_assistant(target))
    monkeypatch.setattr(Gemma4MTPDrafter, "step", lambda *_: engine.table.allocator.alloc(1))
    with pytest.raises(FrozenKVError, match=r"frozen"):
        engine.generate(random_prompt(9), SamplingParams(max_new_tokens=5))


def test_layers_read_the_last_layer_of_their_type_that_stores_kv(make_target, make_assistant):
    shared = make_target("gemma4-e2b", **TWO_OWNERS)  # sliding, full, sliding; then kv-shared: sliding, sliding, full
    assert fit_layers(make_assistant(shared), TargetModel(shared)) == ((2, 1), (8, None))
    assert fit_layers(make_assistant(shared, ordered=True), TargetModel(shared)) == ((2, 2, 2, 1), (8, 8, 8, None))
    dense = make_target("gemma4-31b")  # sliding, sliding, full
    assert fit_layers(make_assistant(dense), TargetModel(dense)) == ((1, 2), (8, None))


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"head_dim": 12}, ["size 12", "size 8", "sliding_attention"]),
        ({"global_head_dim": 32}, ["size 32", "size 16", "full_attention"]),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, ["3 query heads", "2 kv heads"]),
        ({"sliding_window": 16}, ["16", "8"]),
    ],
    ids=["sliding-head-dim", "full-head-dim", "heads", "window"],
)
def test_misfit_names_both_values(changes, values, make_target, make_assistant, make_engine):
    """`test_bad_input.py` has other widths, vocabularies and layer types."""
    target = make_target("gemma4-31b")
    with pytest.raises(UnsupportedModelError) as error:
        make_engine(target, make_assistant(target, **changes))
    assert all(value in str(error.value) for value in values), str(error.value)
    assert isinstance(error.value, SpecDecError) and isinstance(error.value, ValueError)


def test_tokens_that_centroids_cannot_share_are_refused_before_a_round_draws(make_target, make_assistant, make_engine):
    target = make_target("gemma4-31b", vocab_size=16)
    with pytest.raises(UnsupportedModelError, match="it divides 16 tokens among 12 centroids, of which it takes 3"):
        make_engine(target, make_assistant(target, ordered=True))
