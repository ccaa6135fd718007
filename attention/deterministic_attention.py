"""`tree_attention` in plain torch, for the CPU, with the same cut of keys: a row's bits depend on its own path only.

    tiles   BLOCK_K keys at multiples of BLOCK_K by position, each a softmax of its own: maximum, sum, accumulator
    a row   scale its tiles to their common maximum, add them in ascending order, then add the sink

Every product is a batched [ROWS, D] x [D, BLOCK_K] or [ROWS, BLOCK_K] x [BLOCK_K, D]: its bits depend neither on the
number of products nor on a row's place among ROWS. Everything else is one operation per element, without fused or
vectorised sums. All rows of a request share its complete committed tiles; each node of a tree gathers the later keys
for itself. It computes in float32, or in float64 for float64 inputs. The host reads lengths, so it cannot be captured.
"""

import torch
from torch.nn.functional import pad

from specdec.attention.kernels.own_keys import ALIGN, OwnKeys, PathKeys
from specdec.attention.kernels.page_table import PageTable
from specdec.kvcache.fp8_pool import FieldPool, read_rows

BLOCK_K = ALIGN
ROWS = 16

_SMALLEST = {torch.float32: -87.0, torch.float64: -708.0}  # lower scores give subnormal weights

SoftmaxState = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Softmax state of J key tiles: maximum and sum [J, B, Hkv, R], accumulator [J, B, Hkv, R, D]."""


def deterministic_attention(
    query: torch.Tensor,
    pool_k: FieldPool,
    pool_v: FieldPool,
    path: PathKeys,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tree_attention`; `path.own` from `reference_own_keys`."""
    table, own, positions, block_len, window, first_key = path
    committed_len = table.committed_len
    batch, num_heads, num_rows, _ = query.shape
    kv_heads = pool_k.shape[1]
    group = num_heads // kv_heads
    dtype = torch.promote_types(query.dtype, torch.float32)
    low = table.begin[:, None].expand_as(positions)  # [B, N] the oldest and the newest key that a row sees
    high = positions if own.path_len else (committed_len - 1)[:, None].expand_as(positions)
    if window is not None:
        low = torch.maximum(low, positions - window + 1)
    if first_key:
        low = torch.maximum(low, positions.clamp(max=first_key))
    if block_len is not None:
        high = torch.where(torch.arange(num_rows, device=query.device) < block_len[:, None], high, -1)
    oldest, newest = low.amin(1), high.amax(1)  # [B]
    own_base = committed_len // BLOCK_K * BLOCK_K
    is_tree = own.run_end is not None
    shared_newest = torch.minimum(newest, own_base - 1) if is_tree else newest
    first_tile = oldest // BLOCK_K
    num_tiles = int((shared_newest // BLOCK_K - first_tile).amax()) + 1 if batch else 0
    key_pos = (first_tile[:, None] + torch.arange(max(num_tiles, 0), device=query.device))[:, :, None] * BLOCK_K
    key_pos = key_pos + torch.arange(BLOCK_K, device=query.device)  # [B, J, BLOCK_K]
    pos = torch.maximum(torch.minimum(key_pos.flatten(1), shared_newest[:, None]), oldest[:, None])  # clamped
    slots = _slots(pos, own, table, own_base).view_as(key_pos)
    keys, values = (_tiles(pool, slots, shared_newest >= oldest, dtype) for pool in (pool_k, pool_v))

    q = query.to(dtype).unflatten(1, (kv_heads, group)).transpose(2, 3)  # [B, Hkv, N, G, D]
    sink = None if sinks is None else sinks.to(dtype).view(kv_heads, 1, group).expand(-1, num_rows, -1).flatten(1)
    rows = _pad_rows(q.flatten(2, 3), 2)  # [B, Hkv, R, D]
    row_low, row_high = (
        _pad_rows(x.repeat_interleave(group, 1), 1, value) for x, value in ((low, 1 << 40), (high, -1))
    )
    states: list[SoftmaxState] = []
    outs: list[torch.Tensor] = []
    for begin in range(0, rows.shape[2], ROWS):
        some = slice(begin, begin + ROWS)
        tiles = slice(None)
        if not is_tree:  # only tiles that some row sees; others change nothing
            from_tile = int((row_low[:, some].amin(1) // BLOCK_K - first_tile).amin().clamp(min=0))
            to_tile = int((row_high[:, some].amax(1) // BLOCK_K - first_tile).amax()) + 1
            tiles = slice(from_tile, max(from_tile, to_tile))
        pos = key_pos.transpose(0, 1)[tiles, :, None, None]  # [J, B, 1, 1, BLOCK_K]
        visible = (pos >= row_low[:, None, some, None]) & (pos <= row_high[:, None, some, None])
        if is_tree:
            visible = visible & (pos < own_base[:, None, None, None])
        state = _tile_states(rows[:, :, some], keys[tiles], values[tiles], visible, scaling, softcap)
        if is_tree:
            states.append(state)
        else:
            outs.append(_fold(state, None if sink is None else _pad_rows(sink, 1)[:, some]))
    if is_tree:
        shared = [torch.cat(parts, 3)[:, :, :, : num_rows * group] for parts in zip(*states, strict=True)]
        own_states = _own_states(q, pool_k, pool_v, own, low, high, own_base, scaling, softcap)
        both = [torch.cat(parts) for parts in zip(shared, own_states, strict=True)]
        outs = [_fold((both[0], both[1], both[2]), sink)]
    packed = torch.cat(outs, 2)[:, :, : num_rows * group]
    out: torch.Tensor = packed.unflatten(2, (num_rows, group))  # [B, Hkv, N, G, D]
    return out.transpose(1, 2).flatten(2, 3).to(query.dtype).contiguous()


def _slots(pos: torch.Tensor, own: OwnKeys, table: PageTable, own_base: torch.Tensor) -> torch.Tensor:
    """The slots of the keys at positions [B, L]."""
    slots = table.slots()
    slots = slots.long() if slots.shape[1] else own_base.new_zeros(len(slots), 1)
    committed = slots.gather(1, (pos - table.begin[:, None]).clamp(0, slots.shape[1] - 1))
    owned = own.slots[:, 0].long().gather(1, (pos - own_base[:, None]).clamp(0, own.slots.shape[2] - 1))
    return torch.where(pos < own_base[:, None], committed, owned)


def _tiles(pool: FieldPool, slots: torch.Tensor, exist: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[X, J, BLOCK_K] slots -> [J, X, Hkv, BLOCK_K, D]; 0 for keys that do not exist, since their slots hold
    anything."""
    tiles = read_rows(pool, slots.flatten()).view(*slots.shape, *pool.shape[1:]).permute(1, 0, 3, 2, 4)
    tiles = tiles.to(dtype).contiguous()
    return tiles if bool(exist.all()) else tiles.masked_fill(~exist[:, None, None, None], 0.0)


def _own_states(
    q: torch.Tensor,
    pool_k: FieldPool,
    pool_v: FieldPool,
    own: OwnKeys,
    low: torch.Tensor,
    high: torch.Tensor,
    own_base: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> SoftmaxState:
    """Softmax state of each node's own tiles, for queries q [B, Hkv, N, G, D] -> [J, B, Hkv, N * G, ...]."""
    batch, _, num_nodes, group, _ = q.shape
    num_tiles = max(1, int(((high - own_base[:, None]) // BLOCK_K).amax()) + 1)
    columns = torch.arange(num_tiles * BLOCK_K, device=q.device)
    exist = high >= own_base[:, None]  # [B, N]
    oldest = (low - own_base[:, None]).clamp(min=0)[:, :, None]
    column = torch.minimum(columns, (high - own_base[:, None])[:, :, None]).maximum(oldest)  # [B, N, W]
    slots = own.slots.long().gather(2, column.clamp(0, own.slots.shape[2] - 1)).view(-1, num_tiles, BLOCK_K)
    keys, values = (_tiles(pool, slots, exist.flatten(), q.dtype) for pool in (pool_k, pool_v))
    pos = own_base[:, None, None] + columns
    visible = (pos >= low[:, :, None]) & (pos <= high[:, :, None])  # [B, N, W]
    visible = visible.view(-1, num_tiles, BLOCK_K).transpose(0, 1)[:, :, None, None]
    rows = _pad_rows(q.transpose(1, 2).flatten(0, 1), 2)  # [B * N, Hkv, R, D]
    parts = [_tile_states(some, keys, values, visible, scaling, softcap) for some in rows.split(ROWS, 2)]

    def by_request(x: torch.Tensor) -> torch.Tensor:
        """[J, B * N, Hkv, R, ...] -> [J, B, Hkv, N * G, ...]"""
        nodes: torch.Tensor = x[:, :, :, :group].unflatten(1, (batch, num_nodes))
        return nodes.transpose(2, 3).flatten(3, 4)

    maximum, total, acc = (by_request(torch.cat(part, 3)) for part in zip(*parts, strict=True))
    return maximum, total, acc


def _tile_states(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> SoftmaxState:
    """q [X, Hkv, ROWS, D], keys and values [J, X, Hkv, BLOCK_K, D], visible [J, X, 1, ROWS or 1, BLOCK_K]."""
    shape = keys.shape[:3]
    q, keys, values = q.expand(shape[0], -1, -1, -1, -1).flatten(0, 2), keys.flatten(0, 2), values.flatten(0, 2)
    scores = torch.bmm(q, keys.transpose(1, 2)).unflatten(0, shape).mul_(scaling)  # [J, X, Hkv, ROWS, BLOCK_K]
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    maximum = scores.masked_fill_(~visible, -torch.inf).amax(-1)
    scores.sub_(_finite(maximum)[..., None])
    scores.masked_fill_(scores < _SMALLEST[scores.dtype], -torch.inf)  # a subnormal takes 60 times as long as a 0
    weights = scores.exp_().flatten(0, 2)
    ones = weights.new_ones(1, BLOCK_K, ROWS).expand(len(weights), -1, -1)
    total = torch.bmm(weights, ones)[..., 0]
    return maximum, total.unflatten(0, shape), torch.bmm(weights, values).unflatten(0, shape)


def _fold(state: SoftmaxState, sink: torch.Tensor | None) -> torch.Tensor:
    """Add up the tiles of each row, oldest first, then sink [Hkv, R] -> [B, Hkv, R, D]; 0 for a row that sees
    nothing."""
    maximum, sums, accs = state  # scaled in place
    if not len(maximum):
        return accs.sum(0)  # no tiles: zeros
    top = maximum.amax(0)
    top = _finite(top if sink is None else torch.maximum(top, sink))
    scale = torch.exp(maximum - top)
    sums, accs = sums.mul_(scale), accs.mul_(scale[..., None])
    total, acc = sums[0], accs[0]
    for tile in range(1, len(maximum)):
        total += sums[tile]
        acc += accs[tile]
    if sink is not None:
        total = total + torch.exp(sink - top)
    return acc / torch.where(total == 0, 1.0, total)[..., None]


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == -torch.inf, 0.0, x)


def _pad_rows(x: torch.Tensor, dim: int, value: int = 0) -> torch.Tensor:
    """Pad `dim` to whole row tiles."""
    missing = -x.shape[dim] % ROWS
    return pad(x, (0,) * (2 * (x.dim() - 1 - dim)) + (0, missing), value=value) if missing else x
