"""Kernels of recurrent layers against plain torch, over random prompts, chains, trees and commits; and their bits."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kv_rig import DraftTree, HybridAllocator, RequestTable, ints

from specdec.attention.backend import Backend
from specdec.attention.pack import Pack
from specdec.attention.plan import KVPlan, plan_packed, plan_verify
from specdec.attention.torch_backend import TorchBackend
from specdec.attention.triton_backend import TritonBackend
from specdec.gpu.triton_shim import INTERPRETED
from specdec.kvcache.cache import KVCache
from specdec.kvcache.frozen import own_view
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.layout import CacheField, CacheGroups, KVLayout, LayerCache, Records, StateShape
from specdec.kvcache.recurrent_state import FOLD
from specdec.models.recurrent_layers import normed

from marks import deep

pytest.importorskip("triton")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.usefixtures("kernels_run")
DELTA = {"heads": 2, "key_heads": 1, "k_dim": 8, "v_dim": 12, "corrected": True}
MAMBA = {"heads": 2, "key_heads": 2, "k_dim": 16, "v_dim": 40, "corrected": False}  # two tiles of values
TAPS, CHANNELS, LOOKAHEAD = 3, 24, 40
Rows = list[dict[str, Any]]


def record_layer(number: int, shape: dict[str, Any]) -> LayerCache:
    heads, k_dim, v_dim = shape["heads"], shape["k_dim"], shape["v_dim"]
    records = (("k", shape["key_heads"], k_dim), ("u", heads, v_dim), ("g", heads, 1))
    fields = CacheField("inputs", 1, CHANNELS), *(CacheField(*record, dtype=torch.float32) for record in records)
    state = StateShape(heads, k_dim, v_dim, TAPS, CHANNELS)
    return LayerCache(number, number, "linear_attention", fields, Records(), state=state)


class Scene:
    """A cache of a recurrent layer and a short convolution, and what forwards over it give."""

    def __init__(self, backend: Backend, shape: dict[str, Any], page_size: int) -> None:
        self.backend, self.shape = backend, shape
        alone = replace(record_layer(1, shape), fields=(CacheField("inputs", 1, CHANNELS),), layer_type="conv")
        alone = replace(alone, state=StateShape(0, 0, 0, TAPS, CHANNELS))
        layout = KVLayout((record_layer(0, shape), alone))
        groups = CacheGroups.of_layouts([layout.for_rounds(LOOKAHEAD)])
        allocator = HybridAllocator(groups, [600 // page_size] * 2, page_size=page_size, device=DEVICE)
        self.table = RequestTable(allocator, max_requests=4, max_len=200, lookahead=LOOKAHEAD, extra_keys=0)
        self.cache = KVCache(allocator, self.table, backend)
        self.store = self.cache.add_store(layout, torch.float32)
        self.view = own_view(allocator, self.store)
        draw = torch.Generator().manual_seed(5)
        self.weight = torch.randn(CHANNELS, TAPS + 1, generator=draw).to(DEVICE)
        self.bias = torch.randn(CHANNELS, generator=draw).to(DEVICE)

    def forward(self, plan: KVPlan, rows: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """rows: of each layer -> outputs of all layers [T, ...]."""
        context, outs = self.backend.recurrence(plan, self.view), []
        for layer, given in enumerate(rows):
            x = {name: tensor.to(DEVICE) for name, tensor in given.items()}
            outs.append(context.convolve(layer, x["inputs"], self.weight, self.bias if layer else None))
            if layer == 0:
                outs.append(context.recur(layer, Recurrence(x["q"], x["k"], x["v"], x["g"], x.get("beta"))))
        return [out.cpu() for out in outs]

    def read(self, rows: np.ndarray, length: np.ndarray, given: Any, *, padding: int = 3) -> list[torch.Tensor]:
        """Read runs of these rows, in a pack with padding."""
        start = self.table.committed_len.host[rows]
        self.table.ensure_all_slots(rows, start + length + LOOKAHEAD)
        padded = [np.append(x, y) for x, y in ((rows, self.table.padding_row), (start, 0), (length, 0))]
        pack = Pack.of(*(torch.from_numpy(x).to(DEVICE) for x in padded), int(length.sum()) + padding)
        outs = self.forward(plan_packed(self.backend, self.table, pack), given)
        self.table.commit_chunk_on_host(rows, length)
        return [out[: int(length.sum())] for out in outs]

    def verify(self, rows: np.ndarray, tree: DraftTree, given: Any) -> list[torch.Tensor]:
        """Run a tree for each of these rows, and for one of padding."""
        self.table.ensure_all_slots(rows, self.table.committed_len.host[rows] + LOOKAHEAD)
        padded = np.append(rows, self.table.padding_row)
        tree = DraftTree.from_parents(tree.tokens.to(DEVICE), tree.parents.to(DEVICE))
        outs = self.forward(plan_verify(self.backend, self.table, self.table.rows(padded), tree), given)
        return [out[: len(rows) * tree.num_nodes] for out in outs]

    def commit(self, rows: np.ndarray, length: np.ndarray, path: np.ndarray) -> None:
        on_device = self.table.rows(rows), *(torch.from_numpy(x).to(DEVICE) for x in (length, path))
        move = self.table.commit_on_device(*on_device)
        if move is not None:
            self.cache.move(move)
        self.table.commit_on_host(rows, length, path)
        self.table.evict_unseen(rows)

    def keep(self, row: int) -> list[torch.Tensor]:
        """The states of a row after its last whole block, as a copy for the prefix cache has them."""
        length = int(self.table.committed_len.host[row]) // FOLD * FOLD
        self.backend.fold(self.table, self.store, row, length)
        states = [kept.state for kept in self.store.layers.values() if kept.state is not None]
        assert int(states[0].folded_len[row]) == length
        return [tensor[row].cpu().clone() for state in states for tensor in state[:2]] if length else []


def random_rows(shape: dict[str, Any], count: int, seed: int) -> Rows:
    """What both layers make of `count` rows."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(count, *sizes, generator=draw)

    made: Rows = []
    for _ in range(2):
        one = {
            "inputs": normal(CHANNELS),
            "q": normed(normal(shape["key_heads"], shape["k_dim"])),
            "k": normed(normal(shape["key_heads"], shape["k_dim"])),
            "v": normal(shape["heads"], shape["v_dim"]),
            "g": -torch.rand(count, shape["heads"], generator=draw) * 0.3,
            "beta": torch.rand(count, shape["heads"], generator=draw),
        }
        if not shape["corrected"]:
            del one["beta"]
        made.append(one)
    return made


def chosen(rows: Rows, index: Sequence[int]) -> Rows:
    return [{name: x[torch.tensor(index)] for name, x in one.items()} for one in rows]


def joined(*parts: Rows) -> Rows:
    return [{name: torch.cat([part[i][name] for part in parts]) for name in parts[0][i]} for i in range(2)]


def require_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)


def random_parents(draw: random.Random, num_nodes: int, *, deep: bool) -> list[int]:
    return [-1, *(max(0, n - draw.choice((1, 1, 2))) if deep else draw.randrange(n) for n in range(1, num_nodes))]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


@pytest.mark.parametrize("seed", [0, *map(deep, range(1, 8))])
@pytest.mark.parametrize(("shape", "page_size"), [(DELTA, 1), (MAMBA, 4), (DELTA, 16)], ids=["1", "mamba-4", "16"])
def test_kernels_are_plain_torch(shape, page_size, seed) -> None:
    """Prompts in chunks, chains and trees that cross a fold, accepted paths that are permuted or moved, copies."""
    draw = random.Random(seed)
    oracle, scene = (Scene(backend, shape, page_size) for backend in (TorchBackend(), TritonBackend()))
    for one in (oracle, scene):
        assert [one.table.open_row() for _ in range(2)] == [0, 1]
    rows = np.arange(2)
    for step, num_nodes in enumerate((0, 0, 1, 18, draw.choice((4, 33)))):
        if num_nodes == 0:
            length = ints(*(draw.randrange(1, 29) for _ in rows))
            given = random_rows(shape, int(length.sum()) + 3, seed * 100 + step)
            require_close(*(one.read(rows, length, given) for one in (scene, oracle)))
            continue
        parents = [random_parents(draw, num_nodes, deep=draw.random() < 0.6) for _ in range(3)]
        given = random_rows(shape, 3 * num_nodes, seed * 100 + step)
        tree = DraftTree.from_parents(torch.zeros(3, num_nodes, dtype=torch.int64), torch.tensor(parents))
        require_close(*(one.verify(rows, tree, given) for one in (scene, oracle)))
        paths = [path_to(parents[row], draw.randrange(num_nodes)) for row in rows]
        length = ints(*(draw.randrange(1, len(path) + 1) for path in paths))
        padded = np.array([path + [0] * (num_nodes - len(path)) for path in paths])
        for one in (oracle, scene):
            one.commit(rows, length, padded)
        if step % 2:
            require_close(*(one.keep(0) for one in (scene, oracle)))


# bits


def as_prompt(scene: Scene, text: Rows, cuts: Sequence[int]) -> list[torch.Tensor]:
    """Outputs of a text, read in chunks that end at `cuts`."""
    row, outs, done = scene.table.open_row(), [], 0
    for end in cuts:
        given = joined(chosen(text, range(done, end)), random_rows(scene.shape, 3, 9))
        outs.append(scene.read(ints(row), ints(end - done), given))
        done = end
    return [torch.cat(parts) for parts in zip(*outs, strict=True)]


def as_answer(scene: Scene, text: Rows, begin: int, num_nodes: int, seed: int) -> list[torch.Tensor]:
    """Outputs of a text whose tokens from `begin` on are verified in trees, next to wrong nodes and another row."""
    draw, count = random.Random(seed), len(text[0]["g"])
    outs = [as_prompt(scene, text, [begin])]
    row, other = scene.table.open_row() - 1, scene.table.active_rows[-1]
    scene.read(ints(other), ints(7), random_rows(scene.shape, 10, seed))
    while begin < count:
        parents, right = [-1], [0]
        for node in range(1, num_nodes):
            goes_on = draw.random() < 0.7 and begin + len(right) < count
            parents.append(right[-1] if goes_on else draw.randrange(node))
            if goes_on:
                right.append(node)
        wrong = random_rows(scene.shape, 3 * num_nodes, draw.randrange(1000))
        index = [num_nodes + i for i in range(3 * num_nodes)]
        for place, node in enumerate(right):
            index[node] = place
        own = chosen(text, [min(begin + i, count - 1) for i in range(num_nodes)])
        given = chosen(joined(own, wrong), index)
        tree = DraftTree.from_parents(torch.zeros(3, num_nodes, dtype=torch.int64), torch.tensor([parents] * 3))
        found = scene.verify(ints(row, other), tree, given)
        kept = draw.randrange(1, len(right) + 1)
        outs.append([out[torch.tensor(right[:kept])] for out in found])
        path = np.array([right[:kept] + [0] * (num_nodes - kept)] * 2)
        scene.commit(ints(row, other), ints(kept, 1), path)
        begin += kept
    return [torch.cat(parts) for parts in zip(*outs, strict=True)]


@pytest.mark.parametrize("shape", [DELTA, MAMBA], ids=["delta", "mamba"])
def test_a_token_has_the_same_bits_as_prompt_and_as_answer(shape) -> None:
    text = random_rows(shape, 70, 3)
    whole = as_prompt(Scene(TritonBackend(), shape, 4), text, [70])
    found = [as_prompt(Scene(TritonBackend(), shape, 4), text, cuts) for cuts in ([5, 16, 37, 70], [33, 34, 70])]
    for begin, num_nodes in ((3, 1), (20, 5), (33, 18)):
        found.append(as_answer(Scene(TritonBackend(), shape, 1), text, begin, num_nodes, seed=begin))
    for other in found:
        assert all(torch.equal(x, y) for x, y in zip(other, whole, strict=True))


def test_a_copy_has_the_same_bits_whenever_it_is_made() -> None:
    text = random_rows(DELTA, 70, 3)
    scenes = [Scene(TritonBackend(), DELTA, 4) for _ in range(2)]
    as_prompt(scenes[0], text, [70])
    as_answer(scenes[1], text, 9, 4, seed=1)
    copies = [scene.keep(0) for scene in scenes]
    assert all(torch.equal(x, y) for x, y in zip(*copies, strict=True))
