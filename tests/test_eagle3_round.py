"""EAGLE-3's part of a round as a device program: both backends alike, at any bound on lengths, beside padding rows.

The K/V of every slot that holds no committed key is NaN, and so is the null slot that padding rows read and write.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from capturable import capturable
from kv_rig import KVRig
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import DraftTree
from specdec.attention.backend import Backend
from specdec.attention.torch_backend import TorchBackend
from specdec.attention.triton_backend import TritonBackend
from specdec.draft_models.base import Binding, DraftBatch, Observation
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.eagle3.fused_head import FusedHead
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.gpu.operations import KERNELS, REFERENCE, Operations
from specdec.kvcache.table import Rows
from specdec.models.target import TargetModel

from marks import deep, deep_cases, slow

VOCAB, DRAFT_VOCAB = 24, 17
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS: dict[str, Callable[[], Backend]] = {"torch": TorchBackend, "triton": TritonBackend}
OPERATIONS: dict[str, Operations | None] = {"modules": None, "torch": REFERENCE, "kernels": KERNELS}


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


class Outcome(NamedTuple):
    """Of the real rows: the tree, the logits of each level, and what `observe` left: states, K and V by request, layer
    and position."""

    tree: DraftTree
    logits: list[torch.Tensor]
    hidden: torch.Tensor
    kept: list[torch.Tensor]


class Scene:
    """A worker over requests of some lengths whose K/V and states are a function of (seed, request, position)."""

    def __init__(
        self,
        model: Any,
        backend: str,
        lengths: Sequence[int],
        page_size: int,
        windows: Sequence[int | None],
        ops: str = "modules",
    ) -> None:
        target = TargetModel(model)
        target.ops = OPERATIONS[ops]  # of the head alone: the model is not ours to change
        torch.manual_seed(3)
        spec = Eagle3Spec(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            vocab_size=VOCAB,
            aux_layers=(0, 1),
            intermediate_size=16,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            draft_vocab_size=DRAFT_VOCAB,
            windows=tuple(windows),
        )
        head = Eagle3Head(spec).place(DEVICE, torch.float32)
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.4) if weight.dim() > 1 else weight.data.add_(0.1)
        target_ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        self.lengths, self.spec = lengths, spec
        self.rig = KVRig(
            target.layout,
            full_pages=200,
            swa_pages=200,
            page_size=page_size,
            max_requests=len(lengths) + 2,
            max_len=160,
            lookahead=12,
            device=DEVICE,
            backend=BACKENDS[backend](),
        )
        drafter = Eagle3Drafter(head.eval(), target_ids, target)
        assert drafter.unfused is None and isinstance(drafter.form, FusedHead) == (ops != "modules")
        self.worker = drafter.bind(Binding(self.rig, self.rig.backend, self.rig.store))
        table = self.rig.table
        spare = table.open_row()  # so that rows and requests have other numbers
        table.ensure_slots(spare, 9)
        self.rows = np.array([table.open_row() for _ in lengths])
        for row, length in zip(self.rows, lengths, strict=True):
            table.ensure_slots(row, length + 12)
            self.rig.commit(np.array([row]), np.array([length]))
        for kept in self.worker.store.layers.values():
            for pool in (kept.k, kept.v):
                pool.fill_(torch.nan)
                for row, length in zip(self.rows, lengths, strict=True):
                    pool[table.slots.tensor[row, :length]] = self._random(int(row), length, *pool.shape[1:])
        self.worker._hidden.fill_(torch.nan)
        for row in self.rows:
            self.worker._hidden[row] = self._random(100 + int(row), spec.hidden_size)
        self.drawn_from: list[torch.Tensor] = []
        self.rig.flush()

    def _random(self, seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)

    def batch(self, seats: Sequence[int | None], longest: int, steps: int, topk: int, num_nodes: int) -> DraftBatch:
        """seats: requests by number, None for padding."""
        table = self.rig.table
        rows = torch.tensor([table.padding_row if s is None else self.rows[s] for s in seats], device=DEVICE)
        length = torch.tensor([0 if s is None else self.lengths[s] for s in seats], device=DEVICE)
        return DraftBatch(
            rows=Rows(rows, longest),
            root=torch.tensor([0 if s is None else 3 + s for s in seats], device=DEVICE),
            history=torch.zeros((len(seats), longest + 1), dtype=torch.int64, device=DEVICE),
            history_len=length + 1,
            num_steps=steps,
            topk=topk,
            num_nodes=num_nodes,
            sample=self._sample,
            best=self._best,
        )

    def _sample(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.drawn_from.append(logits)
        return logits.argmax(-1)

    def _best(self, logits: torch.Tensor, positions: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.drawn_from.append(logits)
        scores, tokens = logits.log_softmax(-1).topk(count, dim=-1)
        return tokens, scores

    def observation(self, batch: DraftBatch, seats: Sequence[int | None], num_nodes: int) -> Observation:
        """Request i has accepted i % 3 + 1 nodes, the last ones that are possible; padding one, as a walk says."""
        accepted = [1 if s is None else s % 3 + 1 for s in seats]
        path = [[0, *range(num_nodes - n + 1, num_nodes), *[0] * (3 - n)] for n in accepted]
        states = [self._random(200 + (9 if s is None else s), num_nodes, 3 * self.spec.hidden_size) for s in seats]
        return Observation(
            rows=batch.rows,
            start=batch.history_len - 1,
            tokens=(batch.root[:, None] + torch.arange(num_nodes, device=DEVICE)) % VOCAB,
            hidden=torch.stack(states)[:, :, : self.spec.hidden_size],
            aux_states=torch.stack(states)[:, :, self.spec.hidden_size :],
            path=torch.tensor(path, device=DEVICE),
            length=torch.tensor(accepted, device=DEVICE),
            next_token=batch.root + 1,
        )

    def round(self, seats: Sequence[int | None], longest: int, steps: int, topk: int, num_nodes: int) -> Outcome:
        """Propose and observe without any work of the host; the results of the real seats, in order of request."""
        batch = self.batch(seats, longest, steps, topk, num_nodes)
        seen = self.observation(batch, seats, num_nodes)
        table, real = self.rig.table, [i for i, s in enumerate(seats) if s is not None]
        real.sort(key=lambda i: seats[i])  # type: ignore[arg-type, return-value]
        before = [pool.clone() for kept in self.worker.store.layers.values() for pool in (kept.k, kept.v)]
        DraftTree.chain(batch.root[:, None].expand(-1, num_nodes))  # a shape's first round, which makes its constants
        with capturable():
            tree = self.worker.propose(batch)
        tree.check()
        for kept, old in zip(self._pools(), before, strict=True):
            torch.testing.assert_close(kept, old, rtol=0, atol=0, equal_nan=True)
        with capturable():
            self.worker.observe(seen)
        kept = []
        written = torch.zeros(len(before[0]), dtype=torch.bool, device=DEVICE)
        written[: table.allocator.page_size] = True  # the null page
        for i in real:
            row, length = self.rows[seats[i]], self.lengths[seats[i]]  # type: ignore[call-overload]
            slots = table.slots.tensor[row, : length + int(seen.length[i])]
            kept += [pool[slots] for pool in self._pools()]
            written[slots[length:]] = True
        for pool, old in zip(self._pools(), before, strict=True):
            torch.testing.assert_close(pool[~written], old[~written], rtol=0, atol=0, equal_nan=True)
        picked = torch.tensor(real, dtype=torch.int64, device=DEVICE)
        one = DraftTree.from_parents(tree.tokens[picked], tree.parents[picked])
        logits = [level[picked] for level in self.drawn_from]
        return Outcome(one, logits, self.worker._hidden[batch.rows.index[picked]].clone(), kept)

    def _pools(self) -> list[torch.Tensor]:
        return [pool for kept in self.worker.store.layers.values() for pool in (kept.k, kept.v)]


def agree(got: Outcome, want: Outcome) -> None:
    assert got.tree.tokens.tolist() == want.tree.tokens.tolist()
    assert got.tree.parents.tolist() == want.tree.parents.tolist()
    assert torch.isfinite(got.hidden).all()
    torch.testing.assert_close(got.logits, want.logits, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(got.hidden, want.hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.kept, want.kept, atol=1e-4, rtol=1e-4)


SHAPES = {"chain": (4, 1, 5), "tree": (4, 2, 7), "two levels": (2, 3, 5), "one level": (1, 3, 4)}
LENGTHS = (9, 1, 14)


@pytest.fixture
def model(make_target: Callable[..., Any]) -> Any:
    return make_target("llama", vocab_size=VOCAB, num_hidden_layers=2).to(DEVICE)


@deep_cases("tree-(3, None, 2)-4")
@pytest.mark.parametrize(
    ("shape", "windows", "page_size"),
    [
        ("one level", (5,), 4),
        slow("chain", (None, 2), 4),
        deep("two levels", (2,), 1),
        slow("tree", (3, None, 2), 4),
        deep("tree", (None,), 1),
        deep("chain", (5,), 1),
    ],
    ids=str,
)
def test_a_round_is_the_same_however_it_runs(
    shape: str, windows: tuple[int | None, ...], page_size: int, model: Any
) -> None:
    """Torch with the true lengths and nobody beside them, against both backends in a captured round's surroundings."""
    want = Scene(model, "torch", LENGTHS, page_size, windows).round([0, 1, 2], max(LENGTHS), *SHAPES[shape])
    assert len({tuple(tokens) for tokens in want.tree.tokens.tolist()}) == len(LENGTHS)
    alone, padded = ([0, 1, 2], max(LENGTHS)), ([2, None, 0, None, 1], 150)
    for backend, ops, (seats, longest) in (
        ("torch", "modules", padded),
        ("torch", "torch", padded),
        ("triton", "modules", alone),
        ("triton", "modules", padded),
        ("triton", "kernels", alone if shape == "tree" else padded),
    ):
        got = Scene(model, backend, LENGTHS, page_size, windows, ops).round(seats, longest, *SHAPES[shape])
        agree(got, want)


@pytest.mark.parametrize("backend", ["torch", slow("triton")])
def test_padding_alone_is_a_round(backend: str, model: Any) -> None:
    """A round captured before any request has come."""
    Scene(model, backend, (), 1, (None, 3)).round([None, None], 0, *SHAPES["tree"])
    Scene(model, backend, (), 4, (None, 3)).round([None, None], 64, *SHAPES["chain"])


@pytest.mark.deep
def test_more_nodes_than_a_word_of_bits(model: Any) -> None:
    """12 nodes on each of 7 levels that are drafted from: 84 scratch keys a request."""
    shape = (8, 12, 20)
    want = Scene(model, "torch", LENGTHS, 1, (None, 4)).round([0, 1, 2], max(LENGTHS), *shape)
    agree(Scene(model, "triton", LENGTHS, 1, (None, 4)).round([0, 1, 2], 40, *shape), want)


class Made(TorchDispatchMode):
    """Counts the floating numbers in whatever operators return in storages of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.seen[out.untyped_storage().data_ptr()] = out
        return out


@pytest.mark.slow
def test_the_kernels_copy_nothing_of_the_context(model: Any) -> None:
    """A draft makes as many numbers behind 100 keys as behind 20; plain torch copies them."""
    made: dict[str, list[int]] = {}
    for backend in BACKENDS:
        for length in (20, 100):
            scene = Scene(model, backend, (length,), 4, (None, None))
            batch = scene.batch([0], length, *SHAPES["tree"])
            pools = {pool.untyped_storage().data_ptr() for pool in scene._pools()}
            with Made() as mode:
                scene.worker.propose(batch)
            numbers = [t.numel() for at, t in mode.seen.items() if at not in pools]
            made.setdefault(backend, []).append(sum(numbers))
    assert made["triton"][0] == made["triton"][1]
    assert made["torch"][1] - made["torch"][0] >= 2 * 2 * 80 * 2 * 8, "two layers of K and V, two heads of 8"
