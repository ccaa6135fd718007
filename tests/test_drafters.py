"""Every drafter keeps the rules of the protocol; prompt lookup proposes what its definition says."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from block_heads import KINDS, random_block

from specdec import DraftTree, SamplingParams, SpecConfig
from specdec.draft_models.base import Drafter, Observation
from specdec.draft_models.conformance import check_drafter
from specdec.draft_models.lookup import NgramDrafter
from specdec.kvcache.frozen import frozen_kv
from specdec.kvcache.table import FROZEN_EXTRA_KEYS

from marks import each_value, examples, pairs, usual_cases
from stand_ins import history_batch
from tiny_models import random_eagle3

# prompt lookup


def lookup(*histories, steps=4, max_ngram=3):
    """The drafts of each history."""
    tree = NgramDrafter(max_ngram).propose(history_batch(histories, steps))
    tree.check()
    assert tree.tokens[:, 0].tolist() == [h[-1] for h in histories]
    return tree.tokens[:, 1:].tolist()


@pytest.mark.parametrize(
    ("history", "drafts"),
    [
        ([1, 2, 3, 9, 8, 7, 6, 1, 2, 3], [9, 8, 7, 6]),
        ([1, 2, 3, 1, 2, 3], [1, 2, 3, 1]),  # runs into the end: goes on with period 3
        ([5, 7, 7], [7, 7, 7, 7]),  # period 1
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        ([1, 2, 3, 4, 5, 6], [6, 6, 6, 6]),  # no match: the newest token again
        ([4], [4, 4, 4, 4]),
        ([4, 4], [4, 4, 4, 4]),
        ([4, 5], [5, 5, 5, 5]),
        ([4, 5, 4], [5, 4, 5, 4]),
        ([1, 2, 3, 1], [2, 3, 1, 2]),
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([3, 8, 3, 9, 0, 3], [9, 0, 3, 9]),  # the latest occurrence of 3
        ([1, 2, 5, 0, 9, 2, 6, 0, 1, 2], [5, 0, 9, 2]),  # the longer match before the later one
        ([7, 1, 2, 3, 5, 8, 1, 2, 3, 6, 7, 1, 2, 3], [6, 7, 1, 2]),  # three tokens are enough: the later of the two
    ],
    ids=str,
)
def test_lookup(history, drafts):
    assert lookup(history) == [drafts]


def test_lookup_length_is_a_setting():
    history = [1, 2, 5, 0, 9, 2, 6, 0, 1, 2]
    assert lookup(history, max_ngram=1) == [[6, 0, 1, 2]]
    assert lookup(history, max_ngram=2) == lookup(history, max_ngram=5) == [[5, 0, 9, 2]]


@usual_cases("2", "5")
@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5, 8])
def test_lookup_is_the_same_alone_and_in_a_batch(max_ngram):
    """Also against a slow implementation of the definition, for every length from 1."""

    def slow(tokens, steps=4):
        for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == tokens[-size:]:
                    copy = list(tokens)
                    for _ in range(steps):
                        copy.append(copy[start + size + len(copy) - len(tokens)])
                    return copy[len(tokens) :]
        return [tokens[-1]] * steps

    rng = np.random.default_rng(0)
    histories = [rng.integers(0, 3, length).tolist() for length in (1, 2, 3, 4, 5, 6, 7, 9, 14, 30) for _ in range(4)]
    together = lookup(*histories, max_ngram=max_ngram)
    assert together == [slow(h) for h in histories]
    assert together == [lookup(h, max_ngram=max_ngram)[0] for h in histories]


# the protocol


class Checked(Drafter):
    """A drafter whose worker is checked at every round of an engine."""

    target = None  # the engine's

    def __init__(self, drafter):
        self.inner, self.name, self.aux_layers = drafter, drafter.name, drafter.aux_layers
        self.kv_layout, self.extra_keys, self.reread = drafter.kv_layout, drafter.extra_keys, drafter.reread
        self.view = None
        self.rounds = 0

    def bind(self, binding):
        self.binding, self.worker = binding, self.inner.bind(binding)
        return self

    def observe(self, seen):
        self.worker.observe(seen)

    def observe_prompts(self, seen):
        self.worker.observe_prompts(seen)

    def propose(self, batch):
        self.rounds += 1
        cache, store = self.binding.cache, self.binding.target_store
        return check_drafter(self.worker, batch, cache, self.target, target_store=store, aux_layers=self.aux_layers)


@pytest.fixture
def drafter_of(make_assistant, make_engine, make_target, scripted, tree_script):
    def make(name, model):
        if name == "trees":
            return scripted(tree_script([]))
        if name == "eagle3":
            return random_eagle3(model)
        if name in KINDS:
            return random_block(model, name)
        module = name
        if name == "language_model":
            module = make_target("gemma4-e2b", seed=3)
        elif name.startswith("mtp"):
            module = make_assistant(model, ordered=name == "mtp-centroid")
        return make_engine(model, module).drafter

    return make


DRAFTERS = [
    *("ngram", "suffix", "language_model", "mtp", "mtp-centroid", "trees"),
    *("eagle3", "dflash", "jetspec", "dspark-rnn"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "page_size", "temperature", "topk"), each_value(pairs(DRAFTERS, [1, 4], [0.0, 1.0], [1, 3]))
)
def test_conformance(
    name, page_size, temperature, topk, make_target, make_engine, greedy_oracle, random_prompt, drafter_of
):
    """Requests that join and leave, on a target with sliding layers; heads have K/V of their own."""
    model = make_target("gemma4-e2b")
    drafter = Checked(drafter_of(name, model))
    spec = SpecConfig(4, topk, None if topk == 1 else 9)
    engine = make_engine(model, drafter, page_size=page_size, max_batch_size=2, spec=spec)
    drafter.target = engine.target
    prompts, new = [random_prompt(n) for n in (1, 9, 30, 50)[: examples(3, 4)]], examples(8, 12)
    params = SamplingParams(max_new_tokens=new, temperature=temperature, seed=5)
    outputs = engine.generate(prompts, params)
    assert drafter.rounds >= 4
    if not temperature:
        assert [out.token_ids for out in outputs] == [greedy_oracle(model, p, new) for p in prompts]


# the check itself finds what it is there for


@pytest.fixture
def round_of(make_target, make_engine, random_prompt, scripted):
    """(batch, engine) of a live round, whose drafter proposes nothing yet."""
    caught = []

    class Catch(scripted):
        extra_keys = FROZEN_EXTRA_KEYS  # for any drafter that a test hands the batch to

        def propose(self, batch):
            caught.append(batch)
            raise InterruptedError

    engine = make_engine(make_target("gemma4-e2b"), Catch(None))
    stream = engine.stream(random_prompt(12), SamplingParams(max_new_tokens=8))
    next(stream)
    with torch.inference_mode(), pytest.raises(InterruptedError):
        engine.steps._decode(engine.scheduler.next_decode())
    yield caught[0], engine
    stream.close()


def faulty(fault, engine):
    good = NgramDrafter()
    allocator, table, store = engine.table.allocator, engine.table, engine.cache.stores[0]
    calls, kept_open = [], []

    def propose(batch):
        tree = good.propose(batch)
        calls.append(batch)
        if fault == "root":
            return DraftTree.chain(tree.tokens + 1)
        if fault == "vocabulary":
            return DraftTree.chain(tree.tokens + torch.tensor([0, 0, 0, 90]))
        if fault == "wide":
            return DraftTree.chain(torch.cat([tree.tokens, tree.tokens], dim=1))
        if fault == "siblings":
            return DraftTree.from_parents(tree.tokens * 0 + batch.root, torch.tensor([[-1, 0, 0, 0]]))
        if fault == "depth":
            return dataclasses.replace(tree, depth=tree.depth + 1)
        if fault == "dtype":
            return DraftTree.chain(tree.tokens.int())
        if fault == "random":
            return DraftTree.chain(tree.tokens + torch.tensor([0, 0, 0, len(calls)]) % 90)
        if fault == "frozen":
            kept_open.append(frozen_kv(allocator, store, SimpleNamespace(view=None), ()))
            kept_open[-1].__enter__()
        if fault == "writes":
            store.layers[1].k[3] += 1
        if fault == "allocates":
            table.ensure_slots(0, int(table.capacity[0]) + 1)
        if fault == "history":
            batch.history[0, 0] += 1
        return tree

    def observe(seen: Observation):
        if fault == "observe":
            store.layers[1].v[3] += 1

    return SimpleNamespace(view=None, propose=propose, observe=observe)


FAULTS = {
    "none": None,
    "root": "not the root",
    "vocabulary": "outside the vocabulary",
    "wide": "at most 4 may be verified",
    "siblings": "equal siblings",
    "depth": "not the root|depth disagrees",
    "dtype": "expected int64",
    "random": "other tokens for the same batch",
    "frozen": "left the cache frozen",
    "writes": "changed K of layer 1",
    "allocates": "changed capacity",
    "history": "changed history|other tokens",
    "observe": "changed V of layer 1",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_drafter_finds(fault, round_of):
    batch, engine = round_of
    worker = faulty(fault, engine)
    options = {"target_store": engine.cache.stores[0]}
    with torch.inference_mode():
        if FAULTS[fault] is None:
            assert check_drafter(worker, batch, engine.cache, engine.target, **options).num_nodes == 4
            return
        with pytest.raises(AssertionError, match=FAULTS[fault]):
            check_drafter(worker, batch, engine.cache, engine.target, **options)
    engine.table.allocator._frozen_for.clear()
