"""Fewer K/V heads than ranks: several ranks store the same head, and the bits are those of one device.

On a CPU the ranks are one device, one after the other (`test_tensor_parallel.py`).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_engines import PARAMS, TREE, WIDE, answers, engine_of, three_prompts

from specdec import SpecConfig
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter, Gemma4MTPWorker
from specdec.draft_models.ngram import NgramDrafter
from specdec.gpu.operations import REFERENCE
from specdec.kvcache.layout import Full, KVLayout, LayerCache, Window, attention_fields
from specdec.models.target import TargetModel

from marks import deep, deep_cases
from tiny_models import FULL, SLIDING, build_target, spread

ONE_HEAD = {**WIDE, "num_key_value_heads": 1, "num_global_key_value_heads": 1, "global_head_dim": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-e2b": ("gemma4-e2b", ONE_HEAD),  # one head for all, of some layers another layer's
    "divided and repeated": ("gemma4-31b", {**WIDE, "num_global_key_value_heads": 2, "global_head_dim": 128}),
    "norm over all heads": ("olmo2", {**WIDE, "num_key_value_heads": 2}),
    "biases": ("qwen2", {**WIDE, "num_key_value_heads": 1}),
}


def target_of(case: str) -> TargetModel:
    family, fields = CASES[case]
    torch.manual_seed(0)
    return TargetModel(spread(build_target(family, **fields)).eval(), REFERENCE, deterministic=True)


@pytest.fixture(scope="module")
def gemma() -> TargetModel:
    return target_of("gemma4-e2b")


@pytest.fixture
def asked(random_prompt: Callable[..., list[int]]) -> list[list[int]]:
    return three_prompts(random_prompt)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [deep(2), 4])
def test_repeated_heads_have_the_bits_of_one_device(
    case: str, count: int, scripted: Callable[..., Any], tree_script: Callable[..., Any], asked: list[list[int]]
):
    """Accepted paths move within pages, too."""
    target = target_of(case)
    alone = answers(engine_of(target, 1, max_batch_size=1), asked)
    truths = [prompt + tokens for prompt, (tokens, _) in zip(asked, alone, strict=True)]
    engine = engine_of(target, count, scripted(tree_script(truths)), page_size=4, prefill_chunk=16)
    assert answers(engine, asked) == alone
    assert engine.stats().acceptance_length > 1.5


@pytest.mark.parametrize("count", [2, deep(4)])
def test_preemption_and_cached_prefixes_too(count: int, gemma: TargetModel, asked: list[list[int]]):
    alone = answers(engine_of(gemma, 1, max_batch_size=1), asked)
    tight = engine_of(gemma, count, NgramDrafter(), full_slots=60, prefix_cache=False)
    assert answers(tight, asked) == alone
    assert tight.stats().preemptions > 0

    engine = engine_of(gemma, count)
    engine.generate(asked, PARAMS)
    assert answers(engine, asked) == alone
    assert engine.stats().cached_tokens > 0


@deep_cases("2-chain-4", "4-chain-4", "2-tree-2", "2-tree-4", "4-chain-2", "4-tree-4")
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("spec", [SpecConfig(3, adaptive=False), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("count", [2, 4])
def test_an_assistant_borrows_repeated_heads(
    count: int,
    spec: SpecConfig,
    heads: int,
    gemma: TargetModel,
    make_assistant: Callable[..., Any],
    asked: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
):
    """With fewer query heads than ranks, ranks attend with the same ones."""
    drafts: list[Any] = []
    propose = Gemma4MTPWorker.propose

    def noted(worker: Gemma4MTPWorker, batch: Any) -> Any:
        tree = propose(worker, batch)
        drafts.append((tree.tokens.tolist(), tree.parents.tolist()))
        return tree

    monkeypatch.setattr(Gemma4MTPWorker, "propose", noted)
    drafter = Gemma4MTPDrafter(make_assistant(gemma.model, num_attention_heads=heads), gemma)
    found = []
    for ranks in (1, count):
        found.append((answers(engine_of(gemma, ranks, drafter, spec), asked), list(drafts)))
        drafts.clear()
    assert found[0] == found[1] and len(found[0][1]) > 3


def test_each_rank_stores_a_head_and_its_memory_is_counted(gemma: TargetModel):
    one, engine = engine_of(gemma, 1, full_slots=64, swa_slots=64), engine_of(gemma, 4, full_slots=64, swa_slots=64)
    assert {layer.k.shape[1] for store in engine.cache.stores for layer in store.layers.values()} == {1}
    assert engine.cache.bytes_by_group() == {name: 4 * size for name, size in one.cache.bytes_by_group().items()}


def test_a_share_says_in_how_many_parts_its_heads_lie():
    kinds = [(8, Full(), FULL), (2, Window(4), SLIDING), (1, Full(), FULL)]
    layout = KVLayout(tuple(LayerCache(i, i, kind, attention_fields(n, 4), r) for i, (n, r, kind) in enumerate(kinds)))
    share = layout.share(4)
    assert [(spec.num_kv_heads, spec.v.heads, spec.shares) for spec in share.layers] == [
        (2, 2, 4),
        (1, 1, 2),
        (1, 1, 1),
    ]
