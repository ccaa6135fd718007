"""Attention in which a row's bits depend on its own path only: on its query and the keys it sees, not on other rows.

`PathAttention` runs one of two functions over the keys that `own_keys` found once per forward, group and window:

    tree_attention            kernels, which cut the keys by absolute position (`kernels/tree_attention.py`)
    deterministic_attention   plain torch, which computes each row alone: no operation sees the keys of another row

Rows of one path (a chain, a run of a prompt) share one gather of K/V; a row's keys are then a slice of it. Invariant:
every tensor that a row's operations get has a shape, strides and an alignment that follow from its own path.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from specdec.attention.dense import dense_attention
from specdec.attention.kernels.own_keys import ALIGN, OwnKeys, PathKeys
from specdec.attention.plan import Attend, KVPlan, PackTables
from specdec.kvcache.fp8_pool import FieldPool, read_rows
from specdec.kvcache.layer_context import ScoreOptions
from specdec.kvcache.layout import GroupId


@dataclass(frozen=True, slots=True)
class PathAttention:
    """An `Attend` of `plan.py`: `tree_attention` or `deterministic_attention` over the keys of `path`."""

    function: Callable[..., torch.Tensor]
    path: PathKeys

    @classmethod
    def from_plan(
        cls,
        function: Callable[..., torch.Tensor],
        find_own_keys: Callable[..., OwnKeys],
        plan: KVPlan,
        group: GroupId,
        window: int | None,
    ) -> "PathAttention":
        """Attention under a plan of trees, runs or frozen queries. find_own_keys: `own_keys` or its reference."""
        assert not isinstance(plan.prefix, PackTables)
        table = plan.prefix.table(group)
        write = None if plan.write is None else plan.write_slots(group).view(plan.positions.shape)
        tree = plan.tree
        parents = None if tree is None or tree.is_chain else tree.parents
        own = find_own_keys(table, write, parents, None if tree is None else tree.max_depth)
        if window is not None:
            window += plan.window_shift
        return cls(function, PathKeys(table, own, plan.positions, plan.block_len, window, plan.first_key))

    def __call__(self, query: torch.Tensor, pool_k: torch.Tensor, pool_v: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.function(query, pool_k, pool_v, self.path, **options)


def deterministic_attention(
    query: torch.Tensor, pool_k: FieldPool, pool_v: FieldPool, path: PathKeys, **options: Unpack[ScoreOptions]
) -> torch.Tensor:
    """See `tree_attention`; `path.own` from `reference_own_keys`. It reads lengths on the host."""
    table, own, positions, block_len, window, first_key = path
    committed_len = table.committed_len
    oldest = oldest_keys(positions, table.begin[:, None].expand_as(positions), window, first_key)
    newest = positions if own.path_len else (committed_len - 1)[:, None].expand_as(positions)
    if block_len is not None:
        rows = torch.arange(positions.shape[1], device=positions.device)
        newest = torch.where(rows < block_len[:, None], newest, -1)
    committed, own_base = table.slots(), committed_len // ALIGN * ALIGN
    out = query.new_zeros((*positions.shape, query.shape[1], pool_v.shape[2]))
    for b, (begin, base) in enumerate(zip(table.begin.tolist(), own_base.tolist(), strict=True)):
        begin = min(begin, base)
        for line, own_slots in enumerate(own.slots[b]):
            rows_of_line = slice(None) if own.run_end is None else slice(line, line + 1)
            slots = torch.cat([committed[b, : base - begin], own_slots])
            first, stop = (oldest[b, rows_of_line] - begin).tolist(), (newest[b, rows_of_line] - begin + 1).tolist()
            out[b, rows_of_line] = rows_alone(query[b, :, rows_of_line], pool_k, pool_v, slots, first, stop, **options)
    return out


def exact_run(
    slots: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, window: int | None, first_key: int = 0
) -> Attend:
    """Attention of one run like `deterministic_attention`, from slots and positions of its keys [1, L] and positions
    [1, N] of its queries."""
    oldest = oldest_keys(positions, keys[:, :1].expand_as(positions), window, first_key)
    first, stop = (oldest - keys[:, :1])[0].tolist(), (positions - keys[:, :1] + 1)[0].tolist()

    def attend(
        query: torch.Tensor, pool_k: FieldPool, pool_v: FieldPool, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        return rows_alone(query[0], pool_k, pool_v, slots[0], first, stop, **options)[None]

    return attend


def oldest_keys(positions: torch.Tensor, begin: torch.Tensor, window: int | None, first_key: int) -> torch.Tensor:
    """Position of the oldest key that each query sees, [B, N]. begin: position of the first key that exists."""
    if window is not None:
        begin = torch.maximum(begin, positions - window + 1)
    return torch.maximum(begin, positions.clamp(max=first_key)) if first_key else begin


def rows_alone(
    query: torch.Tensor,
    pool_k: FieldPool,
    pool_v: FieldPool,
    slots: torch.Tensor,
    first: Sequence[int],
    stop: Sequence[int],
    **options: Unpack[ScoreOptions],
) -> torch.Tensor:
    """Attend with each of n rows alone: query [Hq, n, D] -> [n, Hq, DV]. Row i sees the keys at `slots[first[i] :
    stop[i]]`; if there are none, its result is 0."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros((query.shape[1], query.shape[0], pool_v.shape[2]))
    seeing = [i for i in range(len(out)) if first[i] < stop[i]]
    if not seeing:
        return out
    begin = min(first[i] for i in seeing)
    gathered = slots[begin : max(stop[i] for i in seeing)]
    keys, values = (read_rows(pool, gathered).to(dtype) for pool in (pool_k, pool_v))  # [L, Hkv, D]
    for i in seeing:
        row = query[:, i : i + 1].to(dtype, copy=True)[None]
        k, v = (x[first[i] - begin : stop[i] - begin] for x in (keys, values))
        if first[i] > begin:
            k, v = k.clone(), v.clone()  # as if the gather began with them: an address may affect bits
        out[i] = dense_attention(row, k.transpose(0, 1)[None], v.transpose(0, 1)[None], **options)[0, 0]
    return out
