r"""Attention in plain torch: the CPU path, and the reference for every kernel.

Query i of a forward sees key j under one rule, whatever the forward is:

    visible(i, j) = known(i, j)  and  q_i - p_j < window         window None: no limit
    out_i         = sum_j softmax_j( cap(scaling * q_i . k_j) ) v_j,   cap(x) = c tanh(x / c)

known(i, j) says whether key j exists for query i: always in the committed prefix; in a tree, if j is i or its ancestor;
in a chunk or a run of a pack, if j <= i. Windows count positions: in a tree the depth, never the node's index. A model
with attention sinks adds one learnt logit per head to the softmax's denominator.

`dense_attention` computes this. `VisibleKeys` says which keys a forward sees: in trees and chunks request by request,
in packs run by run (`runs_attention`; `masked_runs` within a capture). Two functions attend to them:

    attend_together   all rows of a request in one operation
    attend_alone      row by row, so that a row's bits depend on its own path only: on its query and the keys it sees.
                      Its path alone decides the shape, strides and alignment of every tensor that it is computed with,
                      and a head's bits are the same on a rank that has fewer heads. Kernels have this property too,
                      with another order of sums (`kernels/tree_attention.py`).

Keys are read from the pools, after the forward has stored its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F

from specdec.attention.kernels.page_table import PageTable
from specdec.attention.plan import Attend, KVPlan, Pack, PackTables, RunSlots
from specdec.kvcache.fp8_pool import FieldPool, read_rows
from specdec.kvcache.layer_context import ScoreOptions
from specdec.kvcache.layout import NULL_SLOT, GroupId


def visible(
    query_pos: torch.Tensor, key_pos: torch.Tensor, known: torch.Tensor, window: int | None, first_key: int = 0
) -> torch.Tensor:
    """Which keys each query sees, [B, N, L]: query_pos [B, N], key_pos [B, L], known [B, L] or [B, N, L] bool."""
    seen = known if known.dim() == 3 else known[:, None].expand(-1, query_pos.shape[1], -1)
    if window is not None:
        seen = seen & (query_pos[:, :, None] - key_pos[:, None, :] < window)
    if first_key:
        seen = seen & (key_pos[:, None, :] >= query_pos.clamp(max=first_key)[:, :, None])
    return seen


def bias_of(seen: torch.Tensor) -> torch.Tensor:
    """Bias added to scores: 0 where seen [B, N, L], else -inf -> [B, 1, N, L] float32, broadcast over heads."""
    bias = torch.zeros(seen.shape, dtype=torch.float32, device=seen.device)
    return bias.masked_fill_(~seen, -torch.inf)[:, None]


def dense_attention(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend: query [B, Hq, N, D], k [B, Hkv, L, D], v [B, Hkv, L, DV], bias [B, 1, N, L] (None: each query sees each
    key), sinks [Hq] -> [B, N, Hq, DV] in v's dtype.

    Keys that no query sees must be finite, since their weight 0 is multiplied with V. The result of a query that sees
    no key is 0 or NaN.
    """
    dtype = v.dtype
    if softcap is None and sinks is None:
        if query.device.type == "cpu" and dtype.itemsize < 4:  # the fused operator is several times slower in 16 bits
            query, k, v = query.float(), k.float(), v.float()
        bias = None if bias is None else bias.to(query.dtype)
        fused = F.scaled_dot_product_attention(query, k, v, attn_mask=bias, scale=scaling, enable_gqa=True)
        return fused.to(dtype).transpose(1, 2)
    # without torch's fused operator; the softmax runs in float32, or in float64 for float64 inputs
    batch, num_rows, num_kv_heads = len(query), query.shape[2], k.shape[1]
    grouped = query.unflatten(1, (num_kv_heads, -1))
    scores = torch.matmul(grouped, k[:, :, None].transpose(-1, -2)) * scaling  # [B, Hkv, G, N, L]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores = scores + bias[:, :, None]
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sink = sinks.to(scores.dtype).view(1, num_kv_heads, -1, 1, 1).expand(batch, -1, -1, num_rows, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    out = torch.matmul(weights.to(dtype), v[:, :, None])  # [B, Hkv, G, N, DV]
    return out.flatten(1, 2).transpose(1, 2)


class VisibleKeys(NamedTuple):
    """The keys that queries of one forward see, in all layers of one group and window.

    slots: [B, L] in the layers' group, by position: the prefix, then the N tokens of the forward if they have keys.
    seen: mask [B, N, L]. The forward's own K/V are read from the slots that it has just written, so one gather serves
    prefix and block. A masked column gathers a key of the same request, so a NaN in another request's slot cannot leak
    through a zero weight.
    """

    slots: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def from_plan(cls, plan: KVPlan, group: GroupId, window: int | None) -> "VisibleKeys":
        """The keys that layers of one group and window (None: full attention) see under a plan without a pack."""
        assert not isinstance(plan.prefix, PackTables)
        if window is not None:
            window += plan.window_shift
        slots, key_pos, committed = prefix_keys(plan.prefix.table(group))
        seen = visible(plan.positions, key_pos, committed, window, plan.first_key)  # [B, N, L]
        if plan.write is not None:
            batch, num_queries = plan.positions.shape
            in_order = plan.positions[:, :, None] >= plan.positions[:, None]
            known = in_order if plan.tree is None else plan.tree.ancestors
            own = visible(plan.positions, plan.positions, known, window, plan.first_key)
            seen = torch.cat([seen, own], dim=-1)
            own_slots = plan.write_slots(group).view(batch, num_queries)
            own_slots = torch.where(own_slots == NULL_SLOT, own_slots[:, :1], own_slots)  # padding
            slots = torch.cat([torch.where(committed, slots, own_slots[:, :1]), own_slots], dim=1)
        return cls(slots, seen)


def attend_together(keys: VisibleKeys) -> Attend:
    """Attention of all rows of a request in one operation."""
    bias = bias_of(keys.seen)

    def attend(
        query: torch.Tensor, pool_k: FieldPool, pool_v: FieldPool, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        k, v = (read_rows(pool, keys.slots).transpose(1, 2) for pool in (pool_k, pool_v))
        return dense_attention(query, k, v, bias, **options)

    return attend


def attend_alone(keys: VisibleKeys, block_len: torch.Tensor | None = None) -> Attend:
    """Attention of each row alone; the host reads which keys it sees. block_len [B]: number of rows before padding
    (None: all). A row that sees no key is 0, and so is padding."""
    seen = keys.seen
    if block_len is not None:
        seen = seen & (torch.arange(seen.shape[1], device=seen.device) < block_len[:, None])[:, :, None]
    by_request = []
    for slots, by_row in zip(keys.slots, seen, strict=True):
        seen_by_any = by_row.any(0)
        by_request.append((slots[seen_by_any], [_columns(row) for row in by_row[:, seen_by_any]]))

    def attend(
        query: torch.Tensor, pool_k: FieldPool, pool_v: FieldPool, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        dtype, num_heads = torch.promote_types(query.dtype, torch.float32), query.shape[1]
        out = query.new_zeros((len(query), query.shape[2], num_heads, pool_v.shape[2]))
        group_size, sinks = num_heads // pool_k.shape[1], options.get("sinks")
        # bits of a batched product depend on the batch size, but not those of torch's operator in one thread, if every
        # head of K and V begins at a multiple of 16 bytes
        is_aligned = all(pool.shape[2] * dtype.itemsize % 16 == 0 for pool in (pool_k, pool_v))
        keeps_bits = is_aligned and sinks is None and options.get("softcap") is None and torch.get_num_threads() == 1
        heads_at_once = num_heads if keeps_bits else 1
        for b, (slots, rows) in enumerate(by_request):
            keys_values = [read_rows(pool, slots).to(dtype) for pool in (pool_k, pool_v)]  # [L, Hkv, D]
            for first in range(0, num_heads, heads_at_once):
                heads = slice(first, first + heads_at_once)
                groups = slice(first // group_size, -(-heads.stop // group_size))
                own = [x[:, groups].clone(memory_format=torch.contiguous_format) for x in keys_values]
                head_options: ScoreOptions = {**options, "sinks": None if sinks is None else sinks[heads]}
                for n, columns in enumerate(rows):
                    if columns is not None:
                        row = query[b, heads, n, None].to(dtype, copy=True, memory_format=torch.contiguous_format)
                        k, v = (x[columns].transpose(0, 1)[None] for x in own)
                        out[b, n, heads] = dense_attention(row[None], k, v, **head_options)[0, 0]
        return out

    return attend


def _columns(seen: torch.Tensor) -> slice | torch.Tensor | None:
    """Columns that a row sees, of seen [L]. If they are the first n, nothing is copied. Others are copied to an address
    with the same alignment, since alignment may affect bits. None: the row sees no key."""
    columns = seen.nonzero()[:, 0]
    if len(columns) == 0:
        return None
    return slice(len(columns)) if int(columns[-1]) < len(columns) else columns


def prefix_keys(table: PageTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The committed keys of a table: their slots, their positions, and the mask of columns that hold a key, each
    [B, L]. The other columns have the slot of a key of the same request."""
    slots = table.slots()
    key_pos = table.begin[:, None] + torch.arange(slots.shape[1], device=slots.device)
    committed = key_pos < table.committed_len[:, None]
    return torch.where(committed, slots, slots[:, :1]), key_pos, committed


def runs_attention(
    make: Callable[[VisibleKeys], Attend], pack: Pack, lines: RunSlots, window: int | None, first_key: int = 0
) -> Attend:
    """Attention over the T places of a pack: over each run alone, as over one request. make: `attend_together` or
    `attend_alone`. Results of places of no run are 0."""
    runs, begin = list[tuple[slice, Attend]](), 0
    for number in range(len(pack.rows)):
        length, start = int(pack.length[number]), int(pack.start[number])
        places = slice(begin, begin + length)
        begin += length
        if length and bool(pack.exists[places.start]):
            positions = torch.arange(start, start + length, device=pack.start.device)[None]
            oldest = 0 if window is None else max(0, start - window + 1)
            keys = torch.arange(oldest, start + length, device=positions.device)
            slots = lines.slots_at(torch.full_like(keys, number), keys)[None]
            seen = visible(positions, keys[None], positions[:, :, None] >= keys, window, first_key)
            runs.append((places, make(VisibleKeys(slots, seen))))

    def attend(query: torch.Tensor, pool_k: FieldPool, pool_v: FieldPool, **options: Any) -> torch.Tensor:
        out = query.new_zeros((1, query.shape[2], query.shape[1], pool_v.shape[2]))
        for places, attend_run in runs:
            out[:, places] = attend_run(query[:, :, places], pool_k, pool_v, **options)
        return out

    return attend


def masked_runs(pack: Pack, lines: RunSlots, window: int | None, first_key: int = 0) -> Attend:
    """`runs_attention` without a length read on the host, so it can be captured. All T places attend to every run, and
    a place keeps the result of its own run only; so it takes R times as long."""
    runs = list[tuple[torch.Tensor, VisibleKeys]]()
    columns = torch.arange(lines.slots.shape[1], device=pack.start.device)
    for number in range(len(pack.rows)):
        keys = columns if lines.begin is None else columns + lines.begin[number]
        first, end = pack.start[number], pack.start[number] + pack.length[number]
        oldest = torch.zeros_like(first) if window is None else (first - window + 1).clamp(min=0)
        inside = keys.maximum(oldest).minimum((end - 1).clamp(min=0))  # a key that no query sees may be NaN
        mine = pack.exists & (pack.run_of == number)
        positions = torch.where(mine, pack.positions, end - 1)[None]
        known = (positions[:, :, None] >= keys) & (keys == inside)  # [1, T, L]
        slots = lines.slots_at(torch.full_like(columns, number), inside)[None]
        runs.append((mine[:, None, None], VisibleKeys(slots, visible(positions, keys[None], known, window, first_key))))

    def attend(query: torch.Tensor, pool_k: FieldPool, pool_v: FieldPool, **options: Any) -> torch.Tensor:
        out = query.new_zeros((1, query.shape[2], query.shape[1], pool_v.shape[2]))
        for mine, keys in runs:
            out = torch.where(mine, attend_together(keys)(query, pool_k, pool_v, **options), out)
        return out

    return attend
