"""Does an implementation of `Drafter` keep the rules? For tests, also of drafters that live outside this package.

    drafter = MyDrafter(...)                # bound to `target`, started, and told (`observe`) of the last prefill
    check_drafter(drafter, batch, target)   # a DraftBatch over a request table with committed K/V

The rules hold for any guess. Whether the guesses are good is not checked: an engine's output does not depend on it.
"""

import torch

from specdec.attention.tree import DraftTree
from specdec.draft_models.base import DraftBatch, Drafter, Observation, TargetInfo


def check_drafter(drafter: Drafter, batch: DraftBatch, target: TargetInfo) -> DraftTree:
    """Assert the rules of the protocol for one batch; returns the tree that was proposed.

    1. A tree of at most num_nodes nodes a request: parents first, distinct siblings, `batch.root` on top.
    2. The same batch gives the same tree.
    3. Proposing reads: the batch, the request table and every K/V row keep their values, no slot is taken or freed.
    4. Afterwards the cache is not frozen and the drafter holds the view that it held before.
    5. `observe` takes paths of any length, a rejected node behind them, and changes no K/V of the target.

    The observations name the newest committed tokens, with target states of zeros; so does the drafter afterwards.
    """
    before, view = _state(batch), drafter.view
    tree = drafter.propose(batch)
    _check_tree(tree, batch, target.vocab_size)
    again = drafter.propose(batch)
    assert torch.equal(tree.tokens, again.tokens), f"{drafter.name}: other tokens for the same batch"
    assert torch.equal(tree.parents, again.parents), f"{drafter.name}: another tree for the same batch"
    assert not batch.table.allocator.frozen, f"{drafter.name} left the cache frozen"
    assert drafter.view is view, f"{drafter.name} came back with another view"
    batch.table.check()
    _check_same(drafter, before, _state(batch))

    committed = batch.table.committed_len[batch.rows]
    for length in {1, min(tree.num_nodes, int(committed.min()))}:
        drafter.observe(_newest(batch, drafter, target, length, torch.from_numpy(committed).to(target.device)))
    _check_same(drafter, before, _state(batch))
    return tree


def _check_tree(tree: DraftTree, batch: DraftBatch, vocab_size: int) -> None:
    num_requests, num_nodes = tree.tokens.shape
    assert num_requests == len(batch.rows), f"{num_requests} trees for {len(batch.rows)} requests"
    assert 1 <= num_nodes <= batch.num_nodes, f"{num_nodes} nodes, at most {batch.num_nodes} may be verified"
    for name in ("tokens", "parents", "depth"):
        assert getattr(tree, name).dtype == torch.int64, f"{name} is {getattr(tree, name).dtype}, int64 is wanted"
    tree.check()
    assert torch.equal(tree.tokens[:, 0], batch.root), "node 0 is not the root of the batch"
    assert int(tree.tokens.min()) >= 0 and int(tree.tokens.max()) < vocab_size, "a token outside the vocabulary"


def _newest(
    batch: DraftBatch, drafter: Drafter, target: TargetInfo, length: int, committed: torch.Tensor
) -> Observation:
    """As if the newest `length` committed tokens of each request had just been accepted, and one more node rejected."""
    nodes = torch.arange(length + 1, device=target.device)
    start = committed - length
    zeros = torch.zeros((len(batch.rows), length + 1, target.hidden_size), dtype=target.dtype, device=target.device)
    return Observation(
        table=batch.table,
        rows=batch.rows,
        row_index=batch.row_index,
        start=start,
        tokens=batch.history.gather(1, start[:, None] + nodes),
        hidden=zeros,
        taps=zeros.repeat(1, 1, len(drafter.taps)) if drafter.taps else None,
        path=nodes.masked_fill(nodes >= length, 0).repeat(len(batch.rows), 1),
        length=torch.full_like(batch.root, length),
        next_token=batch.root,
    )


def _state(batch: DraftBatch) -> dict[str, torch.Tensor]:
    """Copies of all that a drafter may read and must not change."""
    state = {name: getattr(batch, name) for name in ("row_index", "root", "history", "history_len")}
    state |= {name: torch.from_numpy(getattr(batch.table, name)) for name in ("committed_len", "capacity")}
    state |= {"rows": torch.from_numpy(batch.rows), "slots": batch.table.slots.tensor}
    for space, pool in batch.table.allocator.pools.items():
        for kind, layers in (("K", pool.k), ("V", pool.v)):
            state |= {f"{space.value} {kind} of layer {layer}": rows for layer, rows in layers.items()}
    return {name: tensor.clone() for name, tensor in state.items()}


def _check_same(drafter: Drafter, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), f"{drafter.name} changed {name}"
