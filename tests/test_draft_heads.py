"""Heads that draft, of EAGLE-3 and of blocks: their part of a round as a device program, alike on both backends at any
bound on lengths; depths that do not exist, prefix hits, a literal tree, and what rows of a block see.

`test_drafters.py` has their tokens in engines."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from block_heads import random_block, random_head
from draft_scene import BACKENDS, DEVICE, LENGTHS, Scene, assert_same_round, fitted_target

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention.draft_block import DraftPlan, NodeOrder, TorchDraftBlock
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.errors import ConfigError
from specdec.models.target import TargetModel

from marks import deep, is_deep, slow
from tiny_families import random_eagle3
from watched_drafts import Made, watch_proposals

Windows = tuple[int | None, ...]


def scene(
    model: Any, kind: str, backend: str, lengths: Sequence[int], page_size: int, windows: Windows, ops: str = "modules"
) -> Scene:
    target = fitted_target(model, ops)
    if kind == "eagle3":
        sizes = {"aux_layers": (0, 1), "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
        drafter: Any = random_eagle3(target, windows, **sizes)
    else:
        drafter = BlockDrafter(random_head(target, kind, windows=windows), target)
    return Scene(target, drafter, backend, lengths, page_size)


SHAPES = {
    "chain": (4, 1, 5),
    "tree": (4, 2, 7),
    "wide tree": (4, 3, 9),
    "two levels": (2, 3, 5),
    "one level": (1, 3, 4),
    "small tree": (2, 2, 4),
}


@pytest.fixture
def model(make_target: Callable[..., Any], kernels_run: None) -> Any:
    return make_target("llama", vocab_size=24, num_hidden_layers=2).to(DEVICE)


@pytest.mark.parametrize(
    ("kind", "shape", "windows", "page_size"),
    [
        ("eagle3", "small tree", (None, 2), 4),
        deep("eagle3", "one level", (5,), 4),
        deep("eagle3", "two levels", (2,), 1),
        deep("eagle3", "tree", (3, None, 2), 4),
        deep("eagle3", "chain", (5,), 1),
        deep("dflash", "wide tree", (None, 5), 4),
        deep("jetspec", "chain", (None, 5), 1),
        ("dspark", "small tree", (None, 5), 1),
        deep("speculators", "chain", (4, 4), 1),
        deep("dspark-rnn", "wide tree", (None, 5), 4),
        deep("dspark-gated", "chain", (None, 5), 4),
    ],
    ids=str,
)
def test_a_round_is_the_same_however_it_runs(
    kind: str, shape: str, windows: Windows, page_size: int, model: Any
) -> None:
    """Torch with the true lengths and no other row, against both backends in a captured round's surroundings."""
    want = scene(model, kind, "torch", LENGTHS, page_size, windows).round([0, 1, 2], max(LENGTHS), *SHAPES[shape])
    assert len({tuple(tokens) for tokens in want.tokens}) == len(LENGTHS)
    alone, padded = ([0, 1, 2], max(LENGTHS)), ([2, None, 0, 1], 70)
    for backend, ops, (seats, longest) in (
        ("torch", "torch", padded),
        *([("torch", "modules", padded)] if kind == "eagle3" else []),
        *([("triton", "modules", padded), ("triton", "modules", alone)] if is_deep() else []),
        ("triton", "kernels", alone if shape == "tree" else padded),
    ):
        got = scene(model, kind, backend, LENGTHS, page_size, windows, ops).round(seats, longest, *SHAPES[shape])
        assert_same_round(got, want)


@pytest.mark.parametrize("backend", ["torch", slow("triton")])
def test_padding_alone_is_a_round(backend: str, model: Any) -> None:
    """A round captured before any request has come."""
    scene(model, "eagle3", backend, (), 1, (None, 3)).round([None, None], 0, *SHAPES["tree"])
    scene(model, "eagle3", backend, (), 4, (None, 3)).round([None, None], 64, *SHAPES["chain"])


@pytest.mark.deep
def test_more_nodes_than_a_word_of_bits(model: Any) -> None:
    """12 nodes on each of 7 levels that are drafted from: 84 scratch keys a request."""
    shape = (8, 12, 20)
    want = scene(model, "eagle3", "torch", LENGTHS, 1, (None, 4)).round([0, 1, 2], max(LENGTHS), *shape)
    assert_same_round(scene(model, "eagle3", "triton", LENGTHS, 1, (None, 4)).round([0, 1, 2], 40, *shape), want)


@pytest.mark.slow
def test_the_kernels_copy_nothing_of_the_context(model: Any) -> None:
    """A draft makes as many numbers after 100 keys as after 20; plain torch copies them."""
    made: dict[str, list[int]] = {}
    for backend in BACKENDS:
        for length in (20, 100):
            alone = scene(model, "eagle3", backend, (length,), 4, (None, None))
            batch = alone.batch([0], length, *SHAPES["tree"])
            pools = {pool.untyped_storage().data_ptr() for pool, _ in alone.pools()}
            with Made() as mode:
                alone.worker.propose(batch)
            numbers = [t.numel() for at, t in mode.seen.items() if at not in pools and t.is_floating_point()]
            made.setdefault(backend, []).append(sum(numbers))
    assert made["triton"][0] == made["triton"][1]
    assert made["torch"][1] - made["torch"][0] >= 2 * 2 * 80 * 2 * 8, "two layers of K and V, two heads of 8"


# blocks


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


def scripted_scene(model: Any, rows: list[list[float]]) -> Scene:
    """One request, and a head whose row d has these probabilities for tokens 0, 1, .."""
    scripted = scene(model, "dflash", "torch", (9,), 4, (None, 5))
    vocab = scripted.target.vocab_size
    logits = torch.full((1, len(rows), vocab), -1e4)
    for level, row in enumerate(rows):
        logits[0, level, : len(row)] = torch.tensor(row).log()
    scripted.drafter.form.logits = lambda states: logits[:, : states.shape[1]]
    return scripted


@pytest.mark.cpu
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
    two = scene(make_target("llama"), "dflash", "torch", (3, 2), 1, (None, 5))
    batch = two.batch([0, 1], 3, 3, 1, 4)
    draft = DraftPlan(two.rig.table, batch.rows, batch.positions()[:1], 3, (None, 2), order)
    assert draft.key_positions().tolist() == [[3, 4, 5], [2, 3, 4]]
    block = TorchDraftBlock(two.worker.store, draft)
    block.enter_level(None)
    T, F = True, False
    full = [[T, F, F], [T, T, F], [T, T, T]] if order is NodeOrder.CAUSAL else [[T, T, T]] * 3
    windowed = [[T, F, F], [T, T, F], [F, T, T]] if order is NodeOrder.CAUSAL else [[T, T, T], [T, T, T], [F, T, T]]
    assert block.seen(0)[0].tolist() == [[T, T, T, *row] for row in full]
    assert block.seen(0)[1].tolist() == [[T, T, F, *row] for row in full]
    # through a window of 2 the first row sees one committed key, and rows after it see none
    assert block.seen(1)[0].tolist() == [[F, F, first, *row] for first, row in zip((T, F, F), windowed, strict=True)]
