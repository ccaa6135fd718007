"""Runs a drafter's part of a round alone: a worker over requests of given lengths, with random K/V and states.

K/V and states depend on (request, position) only. Slots without a committed key hold NaN, and so does the null slot,
which padding rows read and write.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from capturable import capturable
from kv_rig import KVRig

from specdec import DraftTree
from specdec.attention.backend import TorchBackend, TritonBackend
from specdec.draft_models.base import Binding, DraftBatch, Observation
from specdec.gpu.operations import KERNELS, REFERENCE, Operations
from specdec.kvcache.layout import GroupId, PrimaryLoc
from specdec.kvcache.table import Rows
from specdec.models.target import TargetModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPERATIONS: dict[str, Operations | None] = {"modules": None, "torch": REFERENCE, "kernels": KERNELS}
BACKENDS = {"torch": TorchBackend, "triton": TritonBackend}
LENGTHS = (9, 1, 14)
Seats = Sequence[int | None]
"""Requests by number in the rows of a batch, None for padding."""


class Outcome(NamedTuple):
    """Results of the real rows, in order of request. logits: by level of the tree. kept: committed K and V by request,
    pool and position. hidden: the states that EAGLE-3 keeps."""

    tokens: list[list[int]]
    parents: list[list[int]]
    logits: list[torch.Tensor]
    kept: list[torch.Tensor]
    hidden: list[torch.Tensor]


def fitted_target(model: Any, ops: str = "modules") -> TargetModel:
    """Build a target whose drafters run with these operations; the model itself is not fused."""
    target = TargetModel(model)
    target.ops = OPERATIONS[ops]
    return target


class Scene:
    """A worker of a drafter over requests of these lengths."""

    def __init__(
        self, target: TargetModel, drafter: Any, backend: str, lengths: Sequence[int] = LENGTHS, page_size: int = 4
    ) -> None:
        assert drafter.unfused is None and (drafter.form is not drafter.plain) == (target.ops is not None)
        self.lengths, self.target, self.drafter = lengths, target, drafter
        self.rig = KVRig(
            target.layout,
            pages=200,
            page_size=page_size,
            max_requests=len(lengths) + 2,
            max_len=160,
            lookahead=12,
            drafts=drafter.kv_layout,
            device=DEVICE,
            backend=BACKENDS[backend](),
        )
        self.worker = drafter.bind(Binding(self.rig, self.rig.backend, self.rig.store))
        table = self.rig.table
        table.ensure_slots(table.open_row(), 9)  # so that rows and requests have other numbers
        self.rows = np.array([table.open_row() for _ in lengths])
        for row, length in zip(self.rows, lengths, strict=True):
            table.ensure_slots(row, length + 12)
            self.rig.commit(np.array([row]), np.array([length]))
        for pool, group in self.pools():
            pool.fill_(torch.nan)
            for row, length in zip(self.rows, lengths, strict=True):
                pool[self.slots(group, int(row), length)] = self._random(int(row), length, *pool.shape[1:])
        for state in self.states():
            state.fill_(torch.nan)
            for row in self.rows:
                state[row] = self._random(100 + int(row), state.shape[1])
        self.drawn_from: list[torch.Tensor] = []
        self.rig.flush()

    def pools(self) -> list[tuple[torch.Tensor, GroupId]]:
        """The worker's own pools, and the group of each."""
        return [(pool, kept.group) for kept in self.worker.store.layers.values() for pool in (kept.k, kept.v)]

    def copies(self) -> list[torch.Tensor]:
        return [pool.clone() for pool, _ in self.pools()]

    def slots(self, group: GroupId, row: int, length: int) -> torch.Tensor:
        """Slots of the first `length` tokens of a row in a group."""
        table = self.rig.table
        return table.allocator.translate(group, PrimaryLoc(table.slots.tensor[row, :length]))

    def states(self) -> list[torch.Tensor]:
        """The states [rows, H] that an EAGLE-3 worker keeps for each row."""
        return [*self.worker._last.flatten(0, 1)] if hasattr(self.worker, "_last") else []

    def _random(self, seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)

    def batch(self, seats: Seats, longest: int, steps: int, topk: int, num_nodes: int) -> DraftBatch:
        table = self.rig.table
        rows = torch.tensor([table.padding_row if s is None else self.rows[s] for s in seats], device=DEVICE)
        length = torch.tensor([0 if s is None else self.lengths[s] for s in seats], device=DEVICE)

        def sample(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            assert logits.shape[:2] == positions.shape
            self.drawn_from.append(logits)
            return logits.argmax(-1)

        def best(logits: torch.Tensor, positions: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            assert logits.shape[:2] == positions.shape
            self.drawn_from.append(logits)
            scores, tokens = logits.log_softmax(-1).topk(count, dim=-1)
            return tokens, scores

        return DraftBatch(
            rows=Rows(rows, longest),
            root=torch.tensor([0 if s is None else 3 + s for s in seats], device=DEVICE),
            read_history=lambda: torch.zeros((len(seats), longest + 1), dtype=torch.int64, device=DEVICE),
            history_len=length + 1,
            num_steps=steps,
            topk=topk,
            num_nodes=num_nodes,
            sample=sample,
            best=best,
        )

    def observation(self, batch: DraftBatch, seats: Seats) -> Observation:
        """Build an observation: request i has accepted its last i % 3 + 1 nodes, padding one, as a walk says."""
        nodes, width = batch.num_nodes, self.target.hidden_size
        accepted = [1 if s is None else s % 3 + 1 for s in seats]
        path = [[0, *range(nodes - n + 1, nodes), *[0] * (3 - n)] for n in accepted]
        states = torch.stack([self._random(200 + (9 if s is None else s), nodes, 3 * width) for s in seats])
        return Observation(
            rows=batch.rows,
            start=batch.history_len - 1,
            tokens=(batch.root[:, None] + torch.arange(nodes, device=DEVICE)) % self.target.vocab_size,
            hidden=states[:, :, :width],
            aux_states=states[:, :, width:],
            path=torch.tensor(path, device=DEVICE),
            length=torch.tensor(accepted, device=DEVICE),
            next_token=batch.root + 1,
        )

    def round(self, seats: Seats, longest: int, steps: int, topk: int, num_nodes: int) -> Outcome:
        """Propose and observe. Fails on host work, and on a write outside the rows' own new slots."""
        batch = self.batch(seats, longest, steps, topk, num_nodes)
        seen = self.observation(batch, seats)
        before = self.copies()
        for size in (1 + steps, num_nodes):  # a shape's first round, which makes its constants
            DraftTree.chain(batch.root[:, None].expand(-1, size))
        with capturable():
            tree = self.worker.propose(batch)
        tree.check()
        torch.testing.assert_close(self.copies(), before, rtol=0, atol=0, equal_nan=True)
        with capturable():
            self.worker.observe(seen)
        kept = []
        real = sorted((seat, i) for i, seat in enumerate(seats) if seat is not None)
        for seat, i in real:
            length = self.lengths[seat] + int(seen.length[i])
            kept += [pool[self.slots(group, int(self.rows[seat]), length)] for pool, group in self.pools()]
        for (pool, group), old in zip(self.pools(), before, strict=True):
            written = torch.zeros(len(pool), dtype=torch.bool, device=DEVICE)
            written[: self.rig.table.allocator.page_size] = True  # the null page
            for seat, i in real:
                slots = self.slots(group, int(self.rows[seat]), self.lengths[seat] + int(seen.length[i]))
                written[slots[self.lengths[seat] :]] = True
            torch.testing.assert_close(pool[~written], old[~written], rtol=0, atol=0, equal_nan=True)
        picked = torch.tensor([i for _, i in real], dtype=torch.int64, device=DEVICE)
        tokens, parents = (nodes[picked].tolist() for nodes in (tree.tokens, tree.parents))
        hidden = [state[batch.rows.index[picked]].clone() for state in self.states()]
        return Outcome(tokens, parents, [level[picked] for level in self.drawn_from], kept, hidden)


def assert_same_round(got: Outcome, want: Outcome) -> None:
    assert (got.tokens, got.parents) == (want.tokens, want.parents)
    torch.testing.assert_close(got.logits, want.logits, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(got.hidden, want.hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.kept, want.kept, atol=1e-4, rtol=1e-4)
    assert all(bool(x.isfinite().all()) for x in (*got.hidden, *got.kept))
