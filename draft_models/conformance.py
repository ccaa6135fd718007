"""Checks that an implementation of `Drafter` keeps the rules of the protocol. For tests, inside and outside this
package.

    worker = drafter.bind(Binding(cache, backend, target_store))   # after worker.observe(...) of the last prefill
    check_drafter(worker, batch, cache, target)                    # a DraftBatch over rows with committed K/V

The rules do not concern the quality of drafts, since an engine's output does not depend on it.
"""

import torch

from specdec.attention.trees.tree import DraftTree
from specdec.draft_models.base import DraftBatch, DraftWorker, Observation, TargetInfo
from specdec.kvcache.cache import KVCache
from specdec.kvcache.fp8_pool import all_rows
from specdec.kvcache.store import KVStore


def check_drafter(
    worker: DraftWorker,
    batch: DraftBatch,
    cache: KVCache,
    target: TargetInfo,
    *,
    target_store: KVStore,
    aux_layers: tuple[int, ...] = (),
) -> DraftTree:
    """Assert the rules of the protocol for one batch. Returns the proposed tree.

    1. Each tree has at most num_nodes nodes: parents first, distinct siblings, `batch.root` as root.
    2. The same batch gives the same tree.
    3. Proposing only reads: the batch, the request table and all K/V keep their values; no slot is taken or freed.
    4. Afterwards the cache is not frozen and the worker's view is the one from before.
    5. `observe` accepts paths of any length, followed by a rejected node, and changes no K/V of the target.

    The observations repeat the newest committed tokens, with zeros as target states; the worker keeps these afterwards.
    """
    name = type(worker).__name__
    before, view = _state(batch, cache, cache.stores), worker.view
    tree = worker.propose(batch)
    _check_tree(name, tree, batch, target.vocab_size)
    again = worker.propose(batch)
    assert torch.equal(tree.tokens, again.tokens), f"{name}: other tokens for the same batch"
    assert torch.equal(tree.parents, again.parents), f"{name}: another tree for the same batch"
    assert not cache.allocator.frozen, f"{name} left the cache frozen"
    assert worker.view is view, f"{name} came back with another view"
    cache.table.check()
    _check_same(name, before, _state(batch, cache, cache.stores))

    before = _state(batch, cache, [target_store])
    committed = cache.table.committed_len.tensor[batch.rows.index]
    for length in {1, min(tree.num_nodes, int(committed.min()))}:
        worker.observe(_newest(batch, target, len(aux_layers), length, committed))
    _check_same(name, before, _state(batch, cache, [target_store]))
    return tree


def _check_tree(name: str, tree: DraftTree, batch: DraftBatch, vocab_size: int) -> None:
    num_requests, num_nodes = tree.tokens.shape
    assert num_requests == len(batch.root), f"{name}: {num_requests} trees for {len(batch.root)} requests"
    assert 1 <= num_nodes <= batch.num_nodes, f"{name}: {num_nodes} nodes, at most {batch.num_nodes} may be verified"
    for field in ("tokens", "parents", "depth"):
        dtype = getattr(tree, field).dtype
        assert dtype == torch.int64, f"{name}: {field} is {dtype}, expected int64"
    tree.check()
    assert int(tree.depth.max()) <= batch.num_steps, f"{name}: deeper than the {batch.num_steps} levels requested"
    assert torch.equal(tree.tokens[:, 0], batch.root), f"{name}: node 0 is not the root of the batch"
    inside = int(tree.tokens.min()) >= 0 and int(tree.tokens.max()) < vocab_size
    assert inside, f"{name}: a token outside the vocabulary"


def _newest(
    batch: DraftBatch, target: TargetInfo, num_states: int, length: int, committed: torch.Tensor
) -> Observation:
    """Make the observation of a round that accepted each request's newest `length` committed tokens and rejected one
    more node."""
    num_requests = len(batch.root)
    nodes = torch.arange(length + 1, device=target.device)
    start = committed - length
    zeros = torch.zeros((num_requests, length + 1, target.hidden_size), dtype=target.dtype, device=target.device)
    return Observation(
        rows=batch.rows,
        start=start,
        tokens=batch.history.gather(1, start[:, None] + nodes),
        hidden=zeros,
        aux_states=zeros.repeat(1, 1, num_states) if num_states else None,
        path=nodes.masked_fill(nodes >= length, 0).repeat(num_requests, 1),
        length=torch.full_like(batch.root, length),
        next_token=batch.root,
    )


def _state(batch: DraftBatch, cache: KVCache, stores: list[KVStore]) -> dict[str, torch.Tensor]:
    """Copy everything that a drafter may read but must not change."""
    state = {name: getattr(batch, name) for name in ("root", "history", "history_len")}
    state |= {"committed_len": cache.table.committed_len.tensor, "capacity": torch.from_numpy(cache.table.capacity)}
    state |= {"rows": batch.rows.index, "slots": cache.table.slots.tensor}
    for number, store in enumerate(stores):
        for layer, kept in store.layers.items():
            state |= {
                f"K of layer {layer}, store {number}": all_rows(kept.k),
                f"V of layer {layer}, store {number}": all_rows(kept.v),
            }
    return {name: tensor.clone() for name, tensor in state.items()}


def _check_same(name: str, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    for what, tensor in before.items():
        now = after[what]
        unwritten = tensor.isnan() & now.isnan()  # NaN of SPECDEC_SANITIZE=1
        assert bool(((tensor == now) | unwritten).all()), f"{name} changed {what}"
