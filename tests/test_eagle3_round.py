"""A head's part of a round as a device program: both backends alike, at any bound on lengths, beside padding rows."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from block_heads import random_head
from draft_scene import BACKENDS, DEVICE, LENGTHS, Scene, assert_same_round, fitted_target

from specdec.draft_models.block.block_drafter import BlockDrafter

from marks import deep, is_deep, slow
from stand_ins import Made
from tiny_models import random_eagle3

Windows = tuple[int | None, ...]

pytestmark = pytest.mark.usefixtures("kernels_run")


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
def model(make_target: Callable[..., Any]) -> Any:
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
