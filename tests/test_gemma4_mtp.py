"""The MTP drafter computes, at every draft step of every round, what transformers' assistant computes on the true K/V.

The K/V that the reference reads come from a fresh forward of the HF target over exactly the committed tokens, so a
stale, rejected or missing key, a wrong page, window or layer shows as a difference of logits.
"""

from dataclasses import dataclass, field

import pytest
import torch
from transformers import DynamicCache

from specdec import SamplingParams, SpecConfig, SpecDecError
from specdec.attention.trees.tree_builder import TreeBuilder
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter, Gemma4MTPWorker, fit_layers
from specdec.errors import FrozenKVError, UnsupportedModelError
from specdec.models.target import TargetModel
from specdec.models.transformers_names import cache_argument

from marks import deep_cases, each_value, pairs, quick
from tiny_models import GEMMA4_FAMILIES, TWO_OWNERS, eager

STEPS = 4


@dataclass
class Round:
    """One `propose`: the tokens that each request had, its root last, and what each step was fed and gave."""

    known: list[list[int]]
    fed: list[torch.Tensor] = field(default_factory=list)  # [B] a step
    positions: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # [B, V] a step


@pytest.fixture
def spy(monkeypatch):
    """Rounds as they happen. `spy.right` replaces how many leading drafts of a round are true: rejection after r."""

    class Spy:
        def __init__(self):
            self.rounds = []
            self.whole = []  # true sequences
            self.states = []  # (frozen, drafter sees a read-only view) inside every step

    record = Spy()
    step, propose = Gemma4MTPDrafter.step, Gemma4MTPWorker.propose

    def spying_step(self, tokens, hidden, context):
        states, after = step(self, tokens, hidden, context)
        this = record.rounds[-1]
        this.fed.append(tokens[:, 0].clone())
        this.positions.append(context.plan.positions.clone())
        this.logits.append(self.logits(states)[:, 0].clone())
        worker = record.worker
        allocator = worker.binding.cache.allocator
        record.states.append((allocator.frozen, worker.view is context.view and not worker.view.writable))
        return states, after

    def spying_propose(self, batch):
        rows = zip(batch.history.tolist(), batch.history_len.tolist(), strict=True)
        record.rounds.append(Round([row[:length] for row, length in rows]))
        record.worker = self
        assert not self.binding.cache.allocator.frozen and self.view is None
        tree = propose(self, batch)
        assert not self.binding.cache.allocator.frozen and self.view is None
        for i, known in enumerate(record.rounds[-1].known):
            for whole in record.whole:
                if whole[: len(known)] == known:  # an untrained assistant is never right: help, by 0 to STEPS tokens
                    right = (len(record.rounds) + i) % (batch.num_steps + 1)
                    true = torch.tensor(whole[len(known) : len(known) + right])
                    tree.tokens[i, 1 : 1 + len(true)] = true
        return tree

    monkeypatch.setattr(Gemma4MTPDrafter, "step", spying_step)
    monkeypatch.setattr(Gemma4MTPWorker, "propose", spying_propose)
    return record


@pytest.fixture
def reference():
    """reference(target, assistant, known, fed): HF's logits [steps, V] for a request whose root is the last known."""

    @torch.no_grad()
    def logits(target, assistant, known, fed):
        committed = known[:-1]
        config = target.config.get_text_config()
        owners = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
        cache = DynamicCache()  # without a config it keeps every key of sliding layers too
        with eager(target):
            given = {"use_cache": True, "output_hidden_states": True, **cache_argument(target, cache)}
            out = target(torch.tensor([committed]), **given)
        # the last layer of each type that stores K/V. Not `return_shared_kv_states`: some
        # releases (5.23) give none for a target without shared layers
        kv = {kind: (cache.layers[i].keys, cache.layers[i].values) for i, kind in enumerate(owners)}
        assert {k.shape[2] for k, _ in kv.values()} == {len(committed)}
        hidden = out.hidden_states[-1][:, -1:]
        embed = target.get_input_embeddings()
        rows = []
        for token in fed:
            inputs = torch.cat([embed(torch.tensor([[token]])), hidden], dim=-1)
            step = assistant(
                inputs_embeds=inputs,
                position_ids=torch.tensor([[len(committed)]]),
                shared_kv_states=kv,
                attention_mask=None,
            )
            hidden = step.last_hidden_state
            rows.append(step.logits[0, 0])
        return torch.stack(rows)

    return logits


@deep_cases("gemma4-moe-(3, 17, 45)-4-False", "gemma4-e2b-(45,)-4-True")
@pytest.mark.parametrize(
    ("family", "lengths", "page_size", "ordered"),
    each_value(
        quick(
            pairs(GEMMA4_FAMILIES, [(1,), (45,), (3, 17, 45)], [1, 4], [False, True]),
            lambda family, lengths, *_: family == "gemma4-e2b" and lengths != (45,),
        )
    ),
    ids=str,
)
def test_every_step_equals_transformers(
    family, lengths, page_size, ordered, make_target, make_assistant, make_engine, greedy_oracle, random_prompt,
    spy, reference,
):  # fmt: skip
    target = make_target(family)
    assistant = make_assistant(target, ordered)
    assistant.set_attn_implementation("eager")
    prompts = [random_prompt(n) for n in lengths]
    want = [greedy_oracle(target, p, 24) for p in prompts]
    spy.whole = [p + w for p, w in zip(prompts, want, strict=True)]
    engine = make_engine(target, assistant, num_steps=STEPS, page_size=page_size, prefill_chunk=7)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=24))
    assert [out.token_ids for out in outputs] == want
    emitted = [out.stats.acceptance_length for out in outputs]
    assert all(1 < length < STEPS + 1 for length in emitted)  # there were rejections of every size
    assert set(spy.states) == {(True, True)}, "the cache is frozen inside a step, and the view only reads"
    for this in spy.rounds:
        for i, known in enumerate(this.known):
            fed = [int(step[i]) for step in this.fed]
            assert fed[0] == known[-1]
            assert {int(step[i]) for step in this.positions} == {len(known) - 1}
            got = torch.stack([step[i] for step in this.logits])
            expected = reference(target, assistant, known, fed)
            chosen = got > -torch.inf
            if ordered:
                config = assistant.config
                per_step = config.centroid_intermediate_top_k * target.config.get_text_config().vocab_size
                assert chosen.sum(-1).tolist() == [per_step // config.num_centroids] * len(fed)
            else:
                assert chosen.all()
            torch.testing.assert_close(got[chosen], expected[chosen], atol=1e-4, rtol=1e-4)
            assert got.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_every_level_of_a_tree_goes_on_from_the_states_of_its_own_path(
    make_target, make_assistant, make_engine, random_prompt, reference, monkeypatch
):
    """Three levels of two nodes: the logits at each node are those of transformers along the path to it."""
    target, prompt = make_target("gemma4-e2b"), random_prompt(9)
    assistant = make_assistant(target)
    assistant.set_attn_implementation("eager")
    levels, origins = [], []  # tokens fed and their logits, [M, V]; whose children the next level's are
    step, add_level = Gemma4MTPDrafter.step, TreeBuilder.add_level

    def spying_step(self, tokens, hidden, context):
        states, after = step(self, tokens, hidden, context)
        levels.append((tokens[0].tolist(), self.logits(states)[0]))
        return states, after

    def spying_add_level(self, *scored):
        beam = add_level(self, *scored)
        origins.append(beam.origin[0].tolist())
        return beam

    monkeypatch.setattr(Gemma4MTPDrafter, "step", spying_step)
    monkeypatch.setattr(TreeBuilder, "add_level", spying_add_level)
    make_engine(target, assistant, spec=SpecConfig(3, 2, 7)).generate(prompt, SamplingParams(max_new_tokens=5))
    [root] = levels[0][0]
    paths = [[root]]
    for level, (tokens, logits) in enumerate(levels[:3]):  # of the first draft
        if level:
            paths = [[*paths[above], token] for above, token in zip(origins[level - 1], tokens, strict=True)]
        expected = [reference(target, assistant, [*prompt, root], path)[-1] for path in paths]
        torch.testing.assert_close(logits, torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert {tuple(path[:2]) for path in paths} == {(root, paths[0][1]), (root, paths[1][1])}


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


@pytest.mark.parametrize("operation", ["alloc", "commit", "write"])
def test_a_step_cannot_change_the_cache(
    operation, make_target, make_assistant, make_engine, random_prompt, monkeypatch
):
    target = make_target("gemma4-e2b")
    engine = make_engine(target, make_assistant(target))
    table, worker, step = engine.table, engine.state.worker, Gemma4MTPDrafter.step

    def meddling(self, tokens, hidden, context):
        if operation == "alloc":
            table.allocator.alloc(1)
        elif operation == "commit":
            table.commit_chunk_on_host(table.active_rows, table.active_rows * 0 + 1)
        else:
            worker.view.writable_layer(0)
        return step(self, tokens, hidden, context)

    monkeypatch.setattr(Gemma4MTPDrafter, "step", meddling)
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
