"""What reads or moves the K/V of a target on several devices: Gemma 4's assistants, and accepted paths within pages.

An assistant runs on the first device; every rank attends for it with the K/V heads that it has. `PeerRanks` run in
Triton's interpreter (`test_tensor_parallel.py`).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_engines import TREE, WIDE, answers, engine_of, three_prompts, use_peers

from specdec import SamplingParams, SpecConfig
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter, Gemma4MTPWorker
from specdec.errors import FrozenKVError
from specdec.gpu.operations import REFERENCE
from specdec.gpu.ranks import PeerRanks, Ranks
from specdec.kvcache.frozen import own_view
from specdec.models.target import TargetModel

from marks import deep_cases
from tiny_models import FULL, SLIDING, build_target, spread

GLOBAL = {"num_global_key_value_heads": 2, "global_head_dim": 128}


@pytest.fixture(scope="module", params=["gemma4-31b", "gemma4-e2b"])
def target(request: pytest.FixtureRequest) -> TargetModel:
    torch.manual_seed(0)
    return TargetModel(spread(build_target(request.param, **WIDE, **GLOBAL)).eval(), REFERENCE, deterministic=True)


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


@deep_cases(
    "gemma4-31b-chain-dense-head",
    "gemma4-31b-tree-dense-head",
    "gemma4-31b-tree-centroids",
    "gemma4-e2b-chain-dense-head",
    "gemma4-e2b-chain-centroids",
    "gemma4-e2b-tree-centroids",
)
@pytest.mark.parametrize("ordered", [False, True], ids=["dense-head", "centroids"])
@pytest.mark.parametrize("spec", [SpecConfig(3, adaptive=False), TREE], ids=["chain", "tree"])
def test_an_assistant_drafts_the_same_and_the_target_has_the_same_bits(
    target: TargetModel,
    ordered: bool,
    spec: SpecConfig,
    drafts: list[Any],
    make_assistant: Callable[..., Any],
    random_prompt: Callable[..., list[int]],
):
    asked = three_prompts(random_prompt)
    assistant = make_assistant(target.model, ordered=ordered)
    drafter = Gemma4MTPDrafter(assistant, target)
    found = []
    for count in (1, 2):
        found.append((answers(engine_of(target, count, drafter, spec), asked), list(drafts)))
        drafts.clear()
    (alone, drafts_alone), (split, drafts_split) = found
    assert split == alone
    assert drafts_split == drafts_alone and len(drafts_alone) > 3


@deep_cases("gemma4-31b-16", "gemma4-e2b-4", "gemma4-e2b-16")
@pytest.mark.parametrize("page_size", [4, 16])
def test_accepted_paths_move_within_pages_on_every_rank(
    target: TargetModel,
    page_size: int,
    scripted: Callable[..., Any],
    tree_script: Callable[..., Any],
    random_prompt: Callable[..., list[int]],
):
    asked = three_prompts(random_prompt)
    alone = answers(engine_of(target, 1, max_batch_size=1), asked)
    truths = [prompt + tokens for prompt, (tokens, _) in zip(asked, alone, strict=True)]
    engine = engine_of(target, 2, scripted(tree_script(truths)), page_size=page_size)
    assert answers(engine, asked) == alone
    assert engine.stats().acceptance_length > 1.5


def test_a_lent_view_reaches_every_rank_and_closes_with_the_block(target: TargetModel):
    engine = engine_of(target, 2)
    store = engine.cache.stores[0]
    view = own_view(engine.cache.allocator, store)
    assert [peer.layer(0) for peer in view.peers] == [engine.cache.stores[1].layers[0]]
    view.close()
    with pytest.raises(FrozenKVError, match="whose frozen_kv block has ended"):
        view.peers[0].layer(0)


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
