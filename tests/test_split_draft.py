"""What reads or moves the K/V of a target on several devices: assistants, and accepted paths within pages. Of as many
K/V heads as ranks and of fewer, where several ranks store the same head: the bits are those of one device.

An assistant runs on the first device; every rank attends for it with the K/V heads that it has. On a CPU the ranks are
one device, one after the other; `PeerRanks` run in Triton's interpreter (`test_tensor_parallel.py`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from split_engines import PARAMS, TREE, WIDE, accepted_trees, answers, engine_of, use_peers

from specdec import SamplingParams, SpecConfig
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter, Gemma4MTPWorker
from specdec.draft_models.ngram import NgramDrafter
from specdec.errors import FrozenKVError
from specdec.gpu.operations import REFERENCE
from specdec.gpu.ranks import PeerRanks, Ranks
from specdec.kvcache.frozen import own_view
from specdec.kvcache.layout import KEEP_ALL, KVLayout, LayerSpec, Retention, attention_fields
from specdec.models.target import TargetModel

from marks import deep, deep_cases
from tiny_models import FULL, SLIDING, build_target, spread

GLOBAL = {"num_global_key_value_heads": 2, "global_head_dim": 128}
ONE_HEAD = {**WIDE, **GLOBAL, "num_key_value_heads": 1, "num_global_key_value_heads": 1}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-31b": ("gemma4-31b", {**WIDE, **GLOBAL}),  # on 4 ranks heads of some layers are divided, others repeated
    "gemma4-e2b": ("gemma4-e2b", {**WIDE, **GLOBAL}),
    "one head": ("gemma4-e2b", ONE_HEAD),  # for all, of some layers another layer's
    "norm over all heads": ("olmo2", {**WIDE, "num_key_value_heads": 2}),
    "biases": ("qwen2", {**WIDE, "num_key_value_heads": 1}),
}


@cache
def target_of(name: str) -> TargetModel:
    family, fields = TARGETS[name]
    torch.manual_seed(0)
    return TargetModel(spread(build_target(family, **fields)).eval(), REFERENCE, deterministic=True)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tokens and parents of every tree that an assistant proposes."""
    seen: list[Any] = []
    propose = Gemma4MTPWorker.propose

    def noted(worker: Gemma4MTPWorker, batch: Any) -> Any:
        tree = propose(worker, batch)
        seen.append((tree.tokens.tolist(), tree.parents.tolist()))
        return tree

    monkeypatch.setattr(Gemma4MTPWorker, "propose", noted)
    return seen


CHAIN = SpecConfig(3, adaptive=False)
CENTROIDS, FEW_HEADS = {"ordered": True}, {"num_attention_heads": 2}  # fewer query heads than ranks: they share these


@deep_cases("gemma4-e2b-2-tree-assistant1", "one head-2-chain-assistant2")
@pytest.mark.parametrize(
    ("name", "count", "spec", "assistant"),
    [
        ("gemma4-31b", 2, CHAIN, CENTROIDS),
        ("gemma4-e2b", 2, TREE, {}),
        ("one head", 2, CHAIN, FEW_HEADS),
        ("one head", 4, TREE, FEW_HEADS),
        *(deep("gemma4-31b", 2, spec, more) for spec, more in ((CHAIN, {}), (TREE, {}), (TREE, CENTROIDS))),
        *(deep("gemma4-e2b", 2, spec, more) for spec, more in ((CHAIN, {}), (CHAIN, CENTROIDS), (TREE, CENTROIDS))),
        *(deep("one head", 2, spec, more) for spec, more in ((CHAIN, {}), (TREE, FEW_HEADS), (TREE, {}))),
        *(deep("one head", 4, spec, more) for spec, more in ((CHAIN, {}), (CHAIN, FEW_HEADS), (TREE, {}))),
    ],
    ids=lambda value: ("tree" if value is TREE else "chain") if isinstance(value, SpecConfig) else None,
)
def test_an_assistant_drafts_the_same_and_the_target_has_the_same_bits(
    name: str,
    count: int,
    spec: SpecConfig,
    assistant: dict[str, Any],
    drafts: list[Any],
    make_assistant: Callable[..., Any],
    three_prompts: list[list[int]],
):
    target = target_of(name)
    drafter = Gemma4MTPDrafter(make_assistant(target.model, **assistant), target)
    found = []
    for ranks in (1, count):
        found.append((answers(engine_of(target, ranks, drafter, spec), three_prompts), list(drafts)))
        drafts.clear()
    assert found[0] == found[1] and len(found[0][1]) > 3


@deep_cases("one head-4-4", "gemma4-31b-4-4")
@pytest.mark.parametrize(
    ("name", "count", "page_size"),
    [
        ("gemma4-31b", 2, 4),
        ("one head", 4, 4),
        *((name, 4, 4) for name in ("gemma4-31b", "norm over all heads", "biases")),
        *(deep(name, 2, 4) for name in ("gemma4-e2b", "one head", "norm over all heads", "biases")),
        *(deep(name, 2, 16) for name in ("gemma4-31b", "gemma4-e2b")),
    ],
)
def test_accepted_paths_move_within_pages_on_every_rank(
    name: str,
    count: int,
    page_size: int,
    scripted: Callable[..., Any],
    tree_script: Callable[..., Any],
    three_prompts: list[list[int]],
):
    engine = accepted_trees(target_of(name), count, three_prompts, scripted, tree_script, page_size=page_size)
    assert engine.stats().acceptance_length > 1.5


@pytest.mark.parametrize("count", [2, deep(4)])
def test_repeated_heads_with_preemption_and_cached_prefixes(count: int, three_prompts: list[list[int]]):
    target = target_of("one head")
    alone = answers(engine_of(target, 1, max_batch_size=1), three_prompts)
    tight = engine_of(target, count, NgramDrafter(), full_slots=60, prefix_cache=False)
    assert answers(tight, three_prompts) == alone
    assert tight.stats().preemptions > 0

    engine = engine_of(target, count)
    engine.generate(three_prompts, PARAMS)
    assert answers(engine, three_prompts) == alone
    assert engine.stats().cached_tokens > 0


def test_a_lent_view_reaches_every_rank_and_closes_with_the_block():
    engine = engine_of(target_of("gemma4-31b"), 2)
    store = engine.cache.stores[0]
    view = own_view(engine.cache.allocator, store)
    assert [peer.layer(0) for peer in view.other_ranks] == [engine.cache.stores[1].layers[0]]
    view.close()
    with pytest.raises(FrozenKVError, match="whose frozen_kv block has ended"):
        view.other_ranks[0].layer(0)


def test_what_rank_0_collects_is_as_it_was_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cpus = [torch.device("cpu")] * 2
    for kind in (Ranks, PeerRanks):
        ranks = kind(cpus)
        ranks.reserve(48)
        for _ in range(2):
            ranks.begin()
            for number in range(3):
                values = [torch.randn(5, 2, 8).to(torch.bfloat16) for _ in range(2)]
                ranks.send(values[0])
                assert ranks.collect(values).equal(torch.stack(values)), number
            ranks.send(torch.zeros(3))
            ranks.join()
            ranks.end()
        ranks.check()


def test_an_assistant_on_peers(make_assistant: Callable[..., Any], drafts: list[Any], monkeypatch: pytest.MonkeyPatch):
    """K/V move, too."""
    use_peers(monkeypatch)
    torch.manual_seed(1)
    layers = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
    small = TargetModel(build_target("gemma4-31b", **WIDE, **GLOBAL, **layers).eval(), REFERENCE)
    drafter = Gemma4MTPDrafter(make_assistant(small.model), small)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    outs = []
    for count in (1, 2):
        config = {"deterministic": False, "page_size": 4}
        with engine_of(small, count, drafter, SpecConfig(2, 2, 4, adaptive=False), **config) as engine:
            outs.append(([out.token_ids for out in engine.generate([[1, 2, 3, 4]], params)], list(drafts)))
            drafts.clear()
    assert outs[0] == outs[1] and outs[0][1]


def test_each_rank_stores_a_head_and_its_memory_is_counted():
    one, engine = (engine_of(target_of("one head"), count, full_slots=64, swa_slots=64) for count in (1, 4))
    assert {layer.k.shape[1] for store in engine.cache.stores for layer in store.layers.values()} == {1}
    assert engine.cache.bytes_by_group() == {name: 4 * size for name, size in one.cache.bytes_by_group().items()}


def test_a_share_says_in_how_many_parts_its_heads_lie():
    kinds = [(8, KEEP_ALL, FULL), (2, Retention(4), SLIDING), (1, KEEP_ALL, FULL)]
    layout = KVLayout(tuple(LayerSpec(i, i, kind, attention_fields(n, 4), r) for i, (n, r, kind) in enumerate(kinds)))
    share = layout.share(4)
    assert [(spec.k.heads, spec.v.heads, spec.shares) for spec in share.layers] == [
        (2, 2, 4),
        (1, 1, 2),
        (1, 1, 1),
    ]
