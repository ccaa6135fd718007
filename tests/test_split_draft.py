"""Drafters of a target on several devices: they draft the same, and the target's bits are those of one device.

An assistant runs on the first device; every rank attends for it with the K/V heads that it has. On a CPU the ranks are
one device, one after the other; `PeerRanks` run in Triton's interpreter (`test_tensor_parallel.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import publish
from split_engines import DETERMINISTIC, PARAMS, TREE, answers, engine_of, new_target, target_of, use_peers

from specdec import Engine, EngineConfig, SpecConfig
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter, Gemma4MTPWorker
from specdec.draft_models.heads.feedback_drafts import FeedbackWorker
from specdec.errors import FrozenKVError
from specdec.gpu.ranks import PeerRanks, Ranks
from specdec.kvcache.frozen import own_view
from specdec.kvcache.layout import KEEP_ALL, KVLayout, LayerSpec, Retention, attention_fields

from marks import deep, examples, pairs
from tiny_families import FULL, SLIDING, VOCAB


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tokens and parents of every tree that an assistant or an MTP module proposes."""
    seen: list[Any] = []
    for kind in (Gemma4MTPWorker, FeedbackWorker):

        def noted(worker: Any, batch: Any, propose: Any = kind.propose) -> Any:
            tree = propose(worker, batch)
            seen.append((tree.tokens.tolist(), tree.parents.tolist()))
            return tree

        monkeypatch.setattr(kind, "propose", noted)
    return seen


SPECS = {"chain": SpecConfig(3, adaptive=False), "tree": TREE}
CENTROIDS, FEW_HEADS = {"ordered": True}, {"num_attention_heads": 2}  # fewer query heads than ranks: they share these
IN_DEPTH = {"gemma4-31b": CENTROIDS, "gemma4-e2b": CENTROIDS, "one head": FEW_HEADS}


@pytest.mark.parametrize(
    ("name", "count", "shape", "assistant"),
    [
        ("gemma4-31b", 2, "chain", CENTROIDS),
        ("one head", 4, "tree", FEW_HEADS),
        *(deep(name, *case) for name, more in IN_DEPTH.items() for case in pairs([2, 4], [*SPECS], [{}, more])),
    ],
)
def test_an_assistant_drafts_the_same_and_the_target_has_the_same_bits(
    name: str,
    count: int,
    shape: str,
    assistant: dict[str, Any],
    drafts: list[Any],
    make_assistant: Callable[..., Any],
    random_prompt: Callable[..., list[int]],
):
    target, prompts = target_of(name), [random_prompt(18), random_prompt(3)]
    drafter = Gemma4MTPDrafter(make_assistant(target.model, **assistant), target)
    found = []
    for ranks in (1, count):
        found.append((answers(engine_of(target, ranks, drafter, SPECS[shape]), prompts), list(drafts)))
        drafts.clear()
    assert found[0] == found[1] and len(found[0][1]) > 3


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
@pytest.mark.parametrize("family", ["qwen3_5", *map(deep, ("deepseek_v3", "qwen3_next", "qwen3_5_moe"))])
def test_modules_draft_the_same_and_the_target_has_the_same_bits(
    family: str, drafts: list[Any], tmp_path: Path, three_prompts: list[list[int]]
):
    """MTP modules run on the first device."""
    publish(family, tmp_path, vocab_size=VOCAB)
    found = []
    for count in (1, 2):
        config = EngineConfig(tensor_parallel=count, device="cpu", **DETERMINISTIC)
        engine = Engine.from_pretrained(tmp_path, "mtp", spec=TREE, config=config)
        found.append((answers(engine, three_prompts), list(drafts)))
        drafts.clear()
    assert found[0] == found[1] and len(found[0][1]) > 3


def test_a_lent_view_reaches_every_rank_and_closes_with_the_block():
    engine = engine_of(target_of("gemma4-31b"), 2)
    store = engine.cache.stores[0]
    view = own_view(engine.cache.allocator, store)
    assert [peer.layer(0) for peer in view.other_ranks] == [engine.cache.stores[1].layers[0]]
    view.close()
    with pytest.raises(FrozenKVError, match="whose frozen_kv block has ended"):
        view.other_ranks[0].layer(0)


@pytest.mark.cpu
def test_rank_0_collects_tensors_unchanged_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch):
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
    monkeypatch.setattr("split_engines.PARAMS", [replace(PARAMS[0], max_new_tokens=examples(3, 10))])
    small = new_target("gemma4-31b", num_hidden_layers=2, layer_types=[SLIDING, FULL])
    drafter = Gemma4MTPDrafter(make_assistant(small.model), small)
    outs = []
    for count in (1, 2):
        engine = engine_of(small, count, drafter, SpecConfig(2, 2, 4, adaptive=False), page_size=4)
        outs.append((answers(engine, [[1, 2, 3, 4]]), list(drafts)))
        drafts.clear()
    assert outs[0] == outs[1] and outs[0][1]


def test_a_share_says_in_how_many_parts_its_heads_lie():
    kinds = [(8, KEEP_ALL, FULL), (2, Retention(4), SLIDING), (1, KEEP_ALL, FULL)]
    layout = KVLayout(tuple(LayerSpec(i, i, kind, attention_fields(n, 4), r) for i, (n, r, kind) in enumerate(kinds)))
    share = layout.share(4)
    assert [(spec.k.heads, spec.v.heads, spec.shares) for spec in share.layers] == [
        (2, 2, 4),
        (1, 1, 2),
        (1, 1, 1),
    ]
