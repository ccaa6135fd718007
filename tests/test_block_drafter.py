"""Block drafters in engines: depths that do not exist, prefix hits, a literal tree, and what rows of a block see.

`test_any_drafter.py` has their tokens, and `test_eagle3_round.py` their rounds on both backends."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from block_heads import random_block, random_head
from draft_scene import Scene, fitted_target

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention.kernels.draft_block import CopiedDraftBlock, DraftPlan, NodeOrder
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.errors import ConfigError
from specdec.models.target import TargetModel

from stand_ins import watch_proposals


def test_more_steps_than_a_block_drafts_are_refused(make_target: Callable[..., Any]) -> None:
    """They were cut without a word: rounds verified nodes that nothing had drafted."""
    model = make_target("llama")
    for kind, most in (("dflash", 5), ("dspark", 6)):  # of blocks of 6
        drafter = random_block(model, kind)
        Engine(TargetModel(model), drafter, spec=SpecConfig(most)).close()
        with pytest.raises(ConfigError, match=rf"num_steps={most + 1}.* at most {most} tokens.*num_steps={most}\)"):
            Engine(TargetModel(model), drafter, spec=SpecConfig(most + 1))


def test_a_small_block_drafts_as_deep_as_it_can_where_no_depth_is_asked_for(make_target: Callable[..., Any]) -> None:
    """An engine that was given no `spec` asked it for 4 drafts, and refused it."""
    model = make_target("llama")
    with Engine(TargetModel(model), random_block(model, block_size=4)) as engine:
        assert engine.spec.num_steps == 3


def test_a_prefix_hit_drafts_what_a_fresh_prompt_does(
    make_target: Callable[..., Any], random_prompt: Callable[..., Any]
) -> None:
    model, prompt = make_target("llama"), random_prompt(40)
    config = EngineConfig(max_model_len=128, page_size=4, prefill_chunk=7)
    with Engine(TargetModel(model), random_block(model), spec=SpecConfig(5), config=config) as engine:
        seen, firsts = watch_proposals(engine), []
        for _ in range(2):
            seen.clear()
            engine.generate([prompt], SamplingParams(max_new_tokens=9, ignore_eos=True))
            firsts.append(seen[0].logits)
        assert engine.stats().cached_tokens > 30
    torch.testing.assert_close(firsts[1], firsts[0], atol=1e-5, rtol=1e-5)


# trees


def scene(model: Any, lengths: Sequence[int]) -> Scene:
    target = fitted_target(model)
    return Scene(target, BlockDrafter(random_head(target, "dflash"), target), "torch", lengths)


def scripted_scene(model: Any, rows: list[list[float]]) -> Scene:
    """One request, and a head whose row d has these probabilities for tokens 0, 1, .."""
    scripted = scene(model, (9,))
    vocab = scripted.target.vocab_size
    logits = torch.full((1, len(rows), vocab), -1e4)
    for level, row in enumerate(rows):
        logits[0, level, : len(row)] = torch.tensor(row).log()
    scripted.drafter.form.logits = lambda states: logits[:, : states.shape[1]]
    return scripted


def test_a_literal_tree(make_target: Callable[..., Any]) -> None:
    """
    row      candidates       root 3 -+- 0 (.9) -+- 1 (.63) -+- 2 (.504)
    1        0 .9   1 .1              |          |           +- 0 (.126)
    2        1 .7   0 .3              |          +- 0 (.27) --- 2 (.216)
    3        2 .8   0 .2              +- 1 (.1)
    """
    scripted = scripted_scene(make_target("llama"), [[0.9, 0.1], [0.3, 0.7], [0.2, 0.0, 0.8]])
    tree = scripted.worker.propose(scripted.batch([0], 9, 3, 2, 7))
    assert tree.tokens.tolist() == [[3, 0, 1, 0, 2, 0, 2]]
    assert tree.parents.tolist() == [[-1, 0, 1, 1, 2, 2, 3]]
    chain = scripted.worker.propose(scripted.batch([0], 9, 3, 1, 4))
    assert chain.tokens.tolist() == [[3, 0, 1, 2]]


# what rows of a block see


@pytest.mark.parametrize("order", [NodeOrder.CAUSAL, NodeOrder.MUTUAL])
def test_rows_see_each_other_both_ways_or_up_to_themselves(order: NodeOrder, make_target: Callable[..., Any]) -> None:
    two = scene(make_target("llama"), (3, 2))
    batch = two.batch([0, 1], 3, 3, 1, 4)
    draft = DraftPlan(two.rig.table, batch.rows, batch.positions()[:1], 3, (None, 2), order)
    assert draft.key_positions().tolist() == [[3, 4, 5], [2, 3, 4]]
    block = CopiedDraftBlock(two.worker.store, draft)
    block.enter_level(None)
    T, F = True, False
    full = [[T, F, F], [T, T, F], [T, T, T]] if order is NodeOrder.CAUSAL else [[T, T, T]] * 3
    windowed = [[T, F, F], [T, T, F], [F, T, T]] if order is NodeOrder.CAUSAL else [[T, T, T], [T, T, T], [F, T, T]]
    assert block._seen(None)[0].tolist() == [[T, T, T, *row] for row in full]
    assert block._seen(None)[1].tolist() == [[T, T, F, *row] for row in full]
    # through a window of 2 the first row sees one committed key, and rows after it see none
    assert block._seen(2)[0].tolist() == [[first, *row] for first, row in zip((T, F, F), windowed, strict=True)]
