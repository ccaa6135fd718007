"""Runs one recurrent layer and one short convolution over a small cache, with texts as prompts and as answers.

For tests of kernels, and for `python -m bench recurrent`.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from kv_rig import DraftTree, KVRig, ints

from specdec.attention.backend import Backend
from specdec.attention.plan import KVPlan, Pack, plan_packed
from specdec.gpu.triton_shim import INTERPRETED
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.layout import NULL_SLOT, RECORDS, CacheField, KVLayout, LayerSpec
from specdec.kvcache.recurrent_state import FOLD, RecurrentState, StateShape
from specdec.layers.gated_delta import unit_length

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TAPS, LOOKAHEAD = 3, 40
Rows = list[dict[str, torch.Tensor]]
"""Inputs of both layers for the rows of a forward."""


class Shape(NamedTuple):
    """Sizes of a layer. corrected: the layer has beta."""

    heads: int
    key_heads: int
    k_dim: int
    v_dim: int
    channels: int
    corrected: bool = True

    def layer(self) -> LayerSpec:
        records = (("k", self.key_heads, self.k_dim), ("u", self.heads, self.v_dim), ("g", self.heads, 1))
        fields = self.inputs, *(CacheField(*record, dtype=torch.float32) for record in records)
        state = StateShape(self.heads, self.k_dim, self.v_dim, TAPS, self.channels)
        return LayerSpec(0, 0, "linear_attention", fields, RECORDS, state=state)

    def convolution(self) -> LayerSpec:
        return LayerSpec(1, 1, "conv", (self.inputs,), RECORDS, state=StateShape(0, 0, 0, TAPS, self.channels))

    @property
    def inputs(self) -> CacheField:
        return CacheField("inputs", 1, self.channels)

    def random_rows(self, count: int, seed: int, device: torch.device | str = "cpu") -> Rows:
        draw = torch.Generator(device).manual_seed(seed)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(count, *sizes, generator=draw, device=device)

        def made() -> dict[str, torch.Tensor]:
            rows = {
                "inputs": normal(self.channels),
                "q": unit_length(normal(self.key_heads, self.k_dim)),
                "k": unit_length(normal(self.key_heads, self.k_dim)),
                "v": normal(self.heads, self.v_dim),
                "g": -torch.rand(count, self.heads, generator=draw, device=device) * 0.3,
            }
            beta = torch.rand(count, self.heads, generator=draw, device=device)
            return {**rows, "beta": beta} if self.corrected else rows

        return [made(), made()]


class Scene:
    """The two layers on one backend, with a request table."""

    def __init__(
        self,
        backend: Backend,
        shape: Shape,
        page_size: int,
        *,
        device: torch.device = DEVICE,
        max_len: int = 200,
        max_requests: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.backend, self.shape, self.device = backend, shape, device
        self.rig = KVRig(
            KVLayout((shape.layer(), shape.convolution())),
            pages=max_requests * (max_len + LOOKAHEAD + page_size) // page_size,
            page_size=page_size,
            max_requests=max_requests,
            max_len=max_len,
            lookahead=LOOKAHEAD,
            extra_keys=0,
            dtype=dtype,
            device=device,
            backend=backend,
        )
        self.table, self.store, self.view = self.rig.table, self.rig.store, self.rig.view
        for state in self.states:  # what an earlier request left in the rows
            state.matrices.fill_(torch.nan)
            state.inputs.fill_(torch.nan)
            state.folded_len.fill_(FOLD)
        for kept in self.store.layers.values():
            for pool in kept.fields:
                pool[NULL_SLOT] = torch.nan
        draw = torch.Generator().manual_seed(5)
        self.weight = torch.randn(shape.channels, TAPS + 1, generator=draw).to(device, dtype)
        self.bias = torch.randn(shape.channels, generator=draw).to(device, dtype)

    @property
    def states(self) -> list[RecurrentState]:
        return [kept.state for kept in self.store.layers.values() if kept.state is not None]

    def forward(self, plan: KVPlan, rows: Rows) -> list[torch.Tensor]:
        """Run both layers. Returns their outputs [T, ...]."""
        context, outs = self.backend.recurrence(plan, self.view), []
        for layer, given in enumerate(rows):
            x: dict[str, Any] = {name: tensor.to(self.device) for name, tensor in given.items()}
            x["inputs"] = x["inputs"].to(self.weight.dtype)
            outs.append(context.convolve(layer, x["inputs"], self.weight, self.bias if layer else None))
            if layer == 0:
                outs.append(context.recur(layer, Recurrence(x["q"], x["k"], x["v"], x["g"], x.get("beta"))))
        return [out.cpu() for out in outs]

    def read(self, rows: np.ndarray, length: np.ndarray, given: Rows, *, padding: int = 3) -> list[torch.Tensor]:
        """Read runs of these rows, in a pack with padding whose outputs are 0, and commit them."""
        start = self.table.committed_len.host[rows]
        self.table.ensure_slots(rows, start + length + LOOKAHEAD)
        padded = [np.append(x, y) for x, y in ((rows, self.table.padding_row), (start, 0), (length, 0))]
        pack = Pack.from_lengths(*(torch.from_numpy(x).to(self.device) for x in padded), int(length.sum()) + padding)
        outs = self.forward(plan_packed(self.backend, self.table, pack), given)
        self.table.commit_chunk_on_host(rows, length)
        assert not any(out[int(length.sum()) :].any() for out in outs)
        return [out[: int(length.sum())] for out in outs]

    def verify(self, rows: np.ndarray, parents: Sequence[Sequence[int]], given: Rows) -> list[torch.Tensor]:
        """Run a tree for each of these rows, and for one of padding."""
        self.table.ensure_slots(rows, self.table.committed_len.host[rows] + LOOKAHEAD)
        found = torch.tensor(parents).to(self.device)
        tree = DraftTree.from_parents(torch.zeros_like(found), found)
        outs = self.forward(self.rig.verify(np.append(rows, self.table.padding_row), tree), given)
        return [out[: len(rows) * tree.num_nodes] for out in outs]

    def commit(self, rows: np.ndarray, length: np.ndarray, path: np.ndarray) -> None:
        self.rig.commit(rows, length, path)
        self.table.evict_unseen(rows)

    def keep(self, row: int) -> list[torch.Tensor]:
        """Return the states of a row after its last whole block, as the prefix cache would copy them."""
        length = int(self.table.committed_len.host[row]) // FOLD * FOLD
        self.backend.fold(self.table, self.store, row, length)
        assert int(self.states[0].folded_len[row]) == length
        return [tensor[row].cpu().clone() for state in self.states for tensor in state[:2]] if length else []


def in_float64(rows: Recurrence) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence token by token. Returns outputs [T, HV, DV] and the state after the last whole block of
    FOLD."""
    q, k, v, g = (x.double() for x in rows[:4])
    each = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(each, dim=1)[..., None] for x in (q, k))  # [T, HV, DK, 1]
    beta = None if rows.beta is None else rows.beta.double()[..., None, None]
    state = kept = v.new_zeros((*k.shape[1:3], v.shape[2]))
    outs, decay = [], g.exp()[..., None, None]
    for i in range(len(v)):
        state = state * decay[i]
        u = v[i, :, None]
        if beta is not None:
            u = beta[i] * (u - (state * k[i]).sum(1, keepdim=True))
        state = state + k[i] * u
        outs.append((state * q[i]).sum(1))
        kept = state if i % FOLD == FOLD - 1 else kept
    return torch.stack(outs), kept


def chosen(rows: Rows, index: Sequence[int]) -> Rows:
    return [{name: x[torch.tensor(index, dtype=torch.int64)] for name, x in one.items()} for one in rows]


def joined(*parts: Rows) -> Rows:
    return [{name: torch.cat([part[i][name] for part in parts]) for name in parts[0][i]} for i in range(2)]


def as_prompt(scene: Scene, text: Rows, cuts: Sequence[int]) -> list[torch.Tensor]:
    """Read a text in chunks that end at `cuts`. Returns its outputs."""
    row, outs, done = scene.table.open_row(), [], 0
    for end in cuts:
        given = joined(chosen(text, range(done, end)), scene.shape.random_rows(3, 9))
        outs.append(scene.read(ints(row), ints(end - done), given))
        done = end
    return [torch.cat(parts) for parts in zip(*outs, strict=True)]


def as_answer(scene: Scene, text: Rows, begin: int, num_nodes: int, seed: int) -> list[torch.Tensor]:
    """Verify a text from `begin` on in trees of `num_nodes` with wrong nodes, next to another request. Returns its
    outputs."""
    draw, count = random.Random(seed), len(text[0]["g"])
    outs = [as_prompt(scene, text, [begin])]
    other = scene.table.open_row()
    row = other - 1
    scene.read(ints(other), ints(7), scene.shape.random_rows(10, seed))
    while begin < count:
        parents, right = [-1], [0]
        for node in range(1, num_nodes):
            goes_on = draw.random() < 0.7 and begin + len(right) < count
            parents.append(right[-1] if goes_on else draw.randrange(node))
            if goes_on:
                right.append(node)
        index = [num_nodes + i for i in range(3 * num_nodes)]  # of wrong rows
        for place, node in enumerate(right):
            index[node] = place
        own = chosen(text, [min(begin + i, count - 1) for i in range(num_nodes)])
        given = chosen(joined(own, scene.shape.random_rows(3 * num_nodes, draw.randrange(1000))), index)
        found = scene.verify(ints(row, other), [parents] * 3, given)
        kept = draw.randrange(1, len(right) + 1)
        outs.append([out[torch.tensor(right[:kept])] for out in found])
        path = np.array([right[:kept] + [0] * (num_nodes - kept)] * 2)
        scene.commit(ints(row, other), ints(kept, 1), path)
        begin += kept
    return [torch.cat(parts) for parts in zip(*outs, strict=True)]
