"""Every drafter keeps the rules of the protocol; those that fit any target give the tokens of plain decoding in a
hundred engines each; and one may propose less than it was asked for: a chain for a tree, fewer nodes, another number
each round. What a round computes by node is as wide as the tree that was proposed."""

import dataclasses
import functools
import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from block_heads import KINDS, random_block
from kv_rig import FROZEN_EXTRA_KEYS
from mtp_checkpoints import SHAPES, publish
from random_loads import check_tokens, random_config, random_requests

from specdec import DraftTree, Engine, SamplingParams, SpecConfig
from specdec.draft_models.base import DraftBatch, Drafter, Observation, StatelessDrafter
from specdec.draft_models.block.block_head import FusedBlock
from specdec.draft_models.conformance import check_drafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.language_model import LanguageModelDrafter
from specdec.draft_models.lookup import ModelAndLookup, NgramDrafter, SuffixDrafter
from specdec.gpu.operations import REFERENCE
from specdec.kvcache.frozen import frozen_kv
from specdec.loading.drafter_loading import load_any_drafter
from specdec.models.target import TargetModel

from engine_internals import capture_on_cpu
from marks import deep, deep_cases, each_value, examples, pairs, usual_cases
from tiny_families import random_eagle3
from tiny_models import FAMILIES, GEMMA4_FAMILIES

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


# less than was asked for: masks, edits of logits, scores and draws are those of the proposed nodes


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


def narrow_drafter(kind, model, texts):
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


NARROW = ["ngram", "model and ngram", "chain of 2", "tree of 4", "other each round"]


@deep_cases("chain of 2-False", "other each round-False")
@pytest.mark.parametrize(
    ("kind", "captured"),
    [*((kind, False) for kind in NARROW), ("ngram", True), deep("model and ngram", True)],
    ids=str,
)
def test_a_narrow_draft_has_masks_edits_and_scores_of_its_own_nodes(
    kind, captured, model, make_engine, byte_tokenizer, prompts, params, alone, monkeypatch
):
    """A tree was asked for: masks of its 7 nodes met those of the 4 that were there, and every step raised."""
    capture_on_cpu(monkeypatch, captured)
    texts = [prompt + out.token_ids for prompt, out in zip(prompts, alone, strict=True)]
    drafter = narrow_drafter(kind, model, texts)
    engine = make_engine(model, drafter, spec=TREE, tokenizer=byte_tokenizer)
    if drafter.has_lookup:  # all of its drafts
        engine.steps.draft_policy = None
        full_or_covering_draft = engine.steps._full_or_covering_draft
        engine.steps._full_or_covering_draft = lambda *asked: full_or_covering_draft(*asked)._replace(by_lookup=True)
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


# any target: in a hundred random engines each, every request has the tokens of plain decoding


CASES = 100
FEW_TOKENS = 12
"""So few that a random head or assistant is right now and then."""
DRAWN = ("suffix", "language_model", "block", "eagle3", "mtp", "model and lookup", "assistant")
MODULES = ["mimo_v2-form", *sorted(SHAPES.keys() - {"mimo_v2-form", "qwen3-tuned"})]


def drawn_spec(rng):
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
@pytest.mark.parametrize(("drafter", "seed"), list(itertools.product(DRAWN, range(CASES))))
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
    spec = block_spec_of(rng) if drafter == "block" else drawn_spec(rng)
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
