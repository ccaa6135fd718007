r"""Turns the merged QKV product into rotated queries and stored keys and values, in one launch.

    cos[t, j] = dtype(cos(pos_t f_j) c),   sin[t, j] = dtype(sin(pos_t f_j) c)      `rotary`, once per kind of layer
    q_h = rope(q_norm(y_q,h)),   k_h = rope(k_norm(y_k,h)),   v_h = v_norm(y_v,h)         each norm may be absent
    rope(z)_a = z_a cos_j - z_b sin_j,   rope(z)_b = z_b cos_j + z_a sin_j
                                         a, b = j, j + R/2, or 2 j, 2 j + 1 (`interleaved`);   j < R/2
                                         both D - R further on (`last`)
    pool_k[slots[t]] = k[t],   pool_v[slots[t]] = v[t]

y is the product [T, (Hq + Hkv) D + Hkv DV]: query heads, key heads, then value heads, whose values are scaled last. If
attention is gated by channel, each query head is followed by its gate, which is not read here (`head_gates.py`). Layers
that share another layer's K/V have only query heads. Layers that use keys as values have no value heads, and v_norm
reads the raw keys. Rotation covers R <= D channels; R may be 0. Slots index the pools; padding rows have slot 0. Keys
and values are also returned, for attention that reads a forward's own rows. There is one program per row and head. The
frequencies f and the attention factor c come from a transformers rotary module whose frequencies do not depend on the
sequence; both halves of a head share them.
"""

from typing import NamedTuple

import torch

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, TL_DTYPES, pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.kvcache.fp8_pool import Fp8Pool
from specdec.kvcache.layer_context import Destination
from specdec.kvcache.store import reference_store_kv, store_kv
from specdec.layers.gemm.product import Product, reference_finish, sum_parts
from specdec.layers.norm import ABSENT, Norm, reference_rms_norm, row_options


class Heads(NamedTuple):
    """How the columns of a merged QKV product divide, and the operations on each head."""

    num_q: int
    num_kv: int  # 0: this layer has no own keys
    head_dim: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    values_are_keys: bool = False
    interleaved: bool = False
    last: bool = False  # the last channels rotate, not the first
    narrow_v_dim: int | None = None  # size of a value head; None: head_dim
    v_scale: float = 1.0
    gated: bool = False  # each query head is followed by a gate of equal size

    @property
    def v_dim(self) -> int:
        return self.head_dim if self.narrow_v_dim is None else self.narrow_v_dim

    @property
    def sections(self) -> list[int]:
        """Columns of queries, keys and values in the product."""
        keys = [self.num_kv * self.head_dim] if self.num_kv else []
        values = [] if self.values_are_keys or not self.num_kv else [self.num_kv * self.v_dim]
        return [self.num_q * self.head_dim * (2 if self.gated else 1), *keys, *values]

    @property
    def width(self) -> int:
        return sum(self.sections)


class Rotary(NamedTuple):
    """Rotary tables: cos, sin [T, R / 2] in the model's dtype, rounded as in transformers."""

    cos: torch.Tensor
    sin: torch.Tensor


class RotatedQKV(NamedTuple):
    """Queries, keys and values: q [T, Hq, D]; k [T, Hkv, D] and v [T, Hkv, DV], None for a layer without them."""

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None


def reference_rotary(positions: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype) -> Rotary:
    angles = positions.float()[:, None] * frequencies.float()
    return Rotary((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


def reference_rope_store(
    product: Product, heads: Heads, rotary: Rotary, destination: Destination | None = None
) -> RotatedQKV:
    value = reference_finish(product)
    parts = [columns.unflatten(-1, (-1, heads.head_dim)) for columns in value.split(heads.sections, -1)[:2]]
    parts[0] = parts[0][:, ::2] if heads.gated else parts[0]
    q, k = parts if heads.num_kv else (*parts, parts[0][:, :0])  # [T, heads, D]
    v = k if heads.values_are_keys else value[:, sum(heads.sections[:2]) :].unflatten(-1, (-1, heads.v_dim))
    q, k, v = (
        x if gain is None else reference_rms_norm(x, gain)
        for x, gain in ((q, heads.q_norm), (k, heads.k_norm), (v, heads.v_norm))
    )
    q, k = (reference_rotate(x, rotary, heads) for x in (q, k))
    if not heads.num_kv:
        return RotatedQKV(q, None, None)
    v = v if heads.v_scale == 1.0 else v * heads.v_scale
    if destination is not None:
        reference_store_kv(destination, k, v)
    return RotatedQKV(q, k, v)


def reference_rotate(x: torch.Tensor, rotary: Rotary, heads: Heads) -> torch.Tensor:
    """Rotate x [T, heads, D]."""
    cos, sin = (table.float()[:, None] for table in rotary)  # [T, 1, R / 2]
    half = cos.shape[-1]
    before = heads.head_dim - 2 * half if heads.last else 0  # channels before those that rotate
    kept, turned, rest = x.split([before, 2 * half, heads.head_dim - 2 * half - before], dim=-1)
    turned = turned.float()
    a, b = (turned[..., ::2], turned[..., 1::2]) if heads.interleaved else turned.chunk(2, dim=-1)
    rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1 if heads.interleaved else -2).flatten(-2)
    return torch.cat([kept, rotated.to(x.dtype), rest], dim=-1)


@triton.jit(do_not_specialize=["factor"])
def _rotary_kernel(
    p_positions: tl.tensor,  # [T]
    p_frequencies: tl.tensor,  # [R / 2]
    p_cos: tl.tensor,  # [T, R / 2]
    p_sin: tl.tensor,
    half: tl.tensor,
    s_positions: tl.tensor,
    factor: tl.tensor,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_frequency = tl.load(p_frequencies + o, mask=o < half, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    b_angle = tl.load(p_positions + i_t * s_positions).to(tl.float32) * b_frequency
    tl.store(p_cos + i_t * half + o, (tl.cos(b_angle) * factor).to(DTYPE), mask=o < half, eviction_policy=KEEP)
    tl.store(p_sin + i_t * half + o, (tl.sin(b_angle) * factor).to(DTYPE), mask=o < half, eviction_policy=KEEP)


@triton.jit
def _store_head(
    p_head: tl.tensor,
    o_a: tl.tensor,
    o_b: tl.tensor,
    b_a: tl.tensor,
    b_b: tl.tensor,
    m_a: tl.tensor,
    m_b: tl.tensor,
) -> None:
    tl.store(p_head + o_a, b_a, mask=m_a, eviction_policy=KEEP)
    tl.store(p_head + o_b, b_b, mask=m_b, eviction_policy=KEEP)


@triton.jit(do_not_specialize=["part_len", "eps_q", "eps_k", "eps_v"])
def _rope_store_kernel(
    p_parts: tl.tensor,  # [S, T, width]
    p_bias: tl.tensor,  # [width] or None
    p_q_norm: tl.tensor,  # [D] or None
    p_k_norm: tl.tensor,
    p_v_norm: tl.tensor,
    p_cos: tl.tensor,  # [T, R / 2]
    p_sin: tl.tensor,
    p_slots: tl.tensor,  # [T] or None
    p_pool_k: tl.tensor,  # [slots, Hkv, D] or None
    p_pool_v: tl.tensor,  # [slots, Hkv, DV] or None
    p_q: tl.tensor,  # [T, Hq, D]
    p_k: tl.tensor,  # [T, Hkv, D]
    p_v: tl.tensor,
    part_len: tl.tensor,
    eps_q: tl.tensor,
    eps_k: tl.tensor,
    eps_v: tl.tensor,
    s_cos: tl.tensor,
    s_sin: tl.tensor,
    s_slots: tl.tensor,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    V_SCALE: tl.constexpr,
    ROTATED: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LAST: tl.constexpr,
    GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_q, is_v = i_h < NUM_Q, i_h >= NUM_Q + NUM_KV
    # channels a rotate with channels b; for other channels the angle is 0
    HALF: tl.constexpr = ROTATED // 2
    REST: tl.constexpr = (HEAD_DIM - ROTATED) // 2
    o = tl.arange(0, BLOCK)
    m = o < HALF + REST
    o_h = i_h + tl.zeros([BLOCK], tl.int32)  # a vector: the interpreter cannot mix masks with scalars
    m_q, m_v = m & (o_h < NUM_Q), m & (o_h >= NUM_Q + NUM_KV)
    m_k = m & (o_h >= NUM_Q) & (o_h < NUM_Q + NUM_KV)
    o_a, o_b = o, HALF + o
    if INTERLEAVED:
        o_a, o_b = 2 * o, 2 * o + 1
    if REST > 0:
        o_a = tl.where(o < HALF, o_a, HALF + o)
        o_b = tl.where(o < HALF, o_b, HALF + REST + o)
    if LAST:
        o_a, o_b = (o_a + HEAD_DIM - ROTATED) % HEAD_DIM, (o_b + HEAD_DIM - ROTATED) % HEAD_DIM
    b_wa, b_wb = tl.full([BLOCK], 1.0, tl.float32), tl.full([BLOCK], 1.0, tl.float32)
    if p_q_norm is not None:
        b_wa *= tl.load(p_q_norm + o_a, mask=m_q, other=1.0).to(tl.float32)
        b_wb *= tl.load(p_q_norm + o_b, mask=m_q, other=1.0).to(tl.float32)
    if p_k_norm is not None:
        b_wa *= tl.load(p_k_norm + o_a, mask=m_k, other=1.0).to(tl.float32)
        b_wb *= tl.load(p_k_norm + o_b, mask=m_k, other=1.0).to(tl.float32)
    if p_v_norm is not None:
        b_wa *= tl.load(p_v_norm + o_a, mask=m_v, other=1.0).to(tl.float32)
        b_wb *= tl.load(p_v_norm + o_b, mask=m_v, other=1.0).to(tl.float32)
    if PLUS_ONE:  # also for heads without a norm, whose weights are not read
        b_wa, b_wb = 1.0 + b_wa, 1.0 + b_wb
    wait_for_previous(PDL)

    m_rotated = (o < HALF) & (o_h < NUM_Q + NUM_KV)
    b_cos = tl.load(p_cos + i_t * s_cos + o, mask=m_rotated, other=1.0).to(tl.float32)
    b_sin = tl.load(p_sin + i_t * s_sin + o, mask=m_rotated, other=0.0).to(tl.float32)
    o_column = i_h * HEAD_DIM
    if VALUES_ARE_KEYS:
        o_column = tl.where(is_v, i_h - NUM_KV, i_h) * HEAD_DIM
    if GATED:
        o_column += tl.minimum(i_h, NUM_Q) * HEAD_DIM  # skip the gates of earlier queries
    m_a, m_b = m, m
    if V_DIM != HEAD_DIM:
        o_column = tl.where(is_v, o_column - (i_h - NUM_Q - NUM_KV) * (HEAD_DIM - V_DIM), o_column)
        m_a, m_b = m & ((o_h < NUM_Q + NUM_KV) | (o_a < V_DIM)), m & ((o_h < NUM_Q + NUM_KV) | (o_b < V_DIM))
    o_row = i_t * WIDTH + o_column
    b_a = sum_parts(p_parts, p_bias, o_row + o_a, o_column + o_a, m_a, part_len, SPLITS, DTYPE)
    b_b = sum_parts(p_parts, p_bias, o_row + o_b, o_column + o_b, m_b, part_len, SPLITS, DTYPE)
    if Q_NORM or K_NORM or V_NORM:
        eps = tl.where(is_q, eps_q, tl.where(is_v, eps_v, eps_k))
        b_scale = tl.rsqrt((tl.sum(b_a * b_a, 0) + tl.sum(b_b * b_b, 0)) / HEAD_DIM + eps)
        b_na, b_nb = b_a * b_scale, b_b * b_scale
        if ROUND_FIRST:
            b_na, b_nb = b_na.to(DTYPE).to(tl.float32), b_nb.to(DTYPE).to(tl.float32)
        b_na, b_nb = (b_na * b_wa).to(DTYPE).to(tl.float32), (b_nb * b_wb).to(DTYPE).to(tl.float32)
        if (is_q and Q_NORM) or (is_v and V_NORM) or (i_h >= NUM_Q and i_h < NUM_Q + NUM_KV and K_NORM):
            b_a, b_b = b_na, b_nb
    b_ra = (b_a * b_cos - b_b * b_sin).to(DTYPE)
    b_rb = (b_b * b_cos + b_a * b_sin).to(DTYPE)

    if is_q:
        _store_head(p_q + (i_t * NUM_Q + i_h) * HEAD_DIM, o_a, o_b, b_ra, b_rb, m, m)
    elif NUM_KV > 0:
        i_kv = (i_h - NUM_Q) % NUM_KV
        o_new = i_t * NUM_KV + i_kv  # head
        o_pool = o_new  # unused without slots
        if p_slots is not None:
            o_pool = tl.load(p_slots + i_t * s_slots).to(tl.int64) * NUM_KV + i_kv
        if is_v:
            if V_SCALE != 1.0:
                b_ra, b_rb = (b_a * V_SCALE).to(DTYPE), (b_b * V_SCALE).to(DTYPE)
            _store_head(p_v + o_new * V_DIM, o_a, o_b, b_ra, b_rb, m_a, m_b)
            if p_slots is not None:
                _store_head(p_pool_v + o_pool * V_DIM, o_a, o_b, b_ra, b_rb, m_a, m_b)
        else:
            _store_head(p_k + o_new * HEAD_DIM, o_a, o_b, b_ra, b_rb, m, m)
            if p_slots is not None:
                _store_head(p_pool_k + o_pool * HEAD_DIM, o_a, o_b, b_ra, b_rb, m, m)


@op(reference=reference_rotary)
def rotary(positions: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype) -> Rotary:
    """Make the tables for positions [T] and frequencies [R / 2]."""
    num_rows, half = len(positions), len(frequencies)
    cos, sin = torch.empty((2, num_rows, half), dtype=dtype, device=positions.device)
    if cos.numel():  # no frequencies: nothing rotates
        _rotary_kernel[(num_rows, triton.cdiv(half, 64))](
            *(positions, frequencies.contiguous(), cos, sin, half, positions.stride(0), factor),
            DTYPE=TL_DTYPES[dtype],
            BLOCK=64,
            num_warps=1,
            **pdl_options(positions.device),
        )
    return Rotary(cos, sin)


@op(reference=reference_rope_store)
def rope_store(product: Product, heads: Heads, rotary: Rotary, destination: Destination | None = None) -> RotatedQKV:
    """Norm and rotate; if there is a destination (with contiguous pools), store."""
    parts, bias, dtype = product
    _, num_rows, width = parts.shape
    rotated = 2 * rotary.cos.shape[1]
    assert heads.v_dim == heads.head_dim or not (heads.v_norm or heads.values_are_keys), f"{heads=}"
    assert heads.v_dim <= heads.head_dim, f"{heads=}"
    gains = (heads.q_norm, heads.k_norm, heads.v_norm)
    given = [gain for gain in gains if gain is not None]
    assert parts.is_contiguous() and width == heads.width, f"{parts.shape=} {heads=}"
    assert rotary.cos.shape == rotary.sin.shape and len(rotary.cos) == num_rows, f"{rotary.cos.shape=} {parts.shape=}"
    assert rotated <= heads.head_dim and heads.head_dim % 2 == 0, f"{rotated=} {heads=}"
    assert rotary.cos.stride(1) == rotary.sin.stride(1) == 1, f"{rotary.cos.stride()=}"
    assert len({gain[2:] for gain in given}) <= 1 and not any(gain.centred for gain in given), f"{gains=}"
    assert not any(gain.plus_one and (gain.weight is None or gain.round_first) for gain in given), f"{gains=}"
    q = parts.new_empty((num_rows, heads.num_q, heads.head_dim), dtype=dtype)
    k = parts.new_empty((num_rows, heads.num_kv, heads.head_dim), dtype=dtype)
    v = parts.new_empty((num_rows, heads.num_kv, heads.v_dim), dtype=dtype)
    if not heads.num_kv:
        destination = None
    apart = destination is not None and isinstance(destination.pool_k, Fp8Pool)  # a separate kernel rounds
    pool_k, pool_v, slots = (None, None, None) if destination is None or apart else destination
    if pool_k is not None and pool_v is not None and slots is not None:
        assert pool_k.shape[1:] == k.shape[1:] and pool_v.shape[1:] == v.shape[1:], f"{pool_k.shape=} {pool_v.shape=}"
        assert pool_k.is_contiguous() and pool_v.is_contiguous() and slots.shape == (num_rows,), f"{slots.shape=}"
        assert pool_k.dtype == pool_v.dtype == dtype, f"{pool_k.dtype=} {dtype=}"
    attended = RotatedQKV(q, k, v) if heads.num_kv else RotatedQKV(q, None, None)
    if num_rows == 0:
        return attended
    q_norm, k_norm, v_norm = (gain or ABSENT for gain in gains)
    _rope_store_kernel[(num_rows, heads.num_q + 2 * heads.num_kv)](
        *(parts, bias, q_norm.weight, k_norm.weight, v_norm.weight, rotary.cos, rotary.sin, slots, pool_k, pool_v),
        *(q, k, v, num_rows * width, q_norm.eps, k_norm.eps, v_norm.eps),
        *(rotary.cos.stride(0), rotary.sin.stride(0), 0 if slots is None else slots.stride(0)),
        NUM_Q=heads.num_q,
        NUM_KV=heads.num_kv,
        WIDTH=width,
        HEAD_DIM=heads.head_dim,
        V_DIM=heads.v_dim,
        V_SCALE=heads.v_scale,
        ROTATED=rotated,
        VALUES_ARE_KEYS=heads.values_are_keys,
        Q_NORM=heads.q_norm is not None,
        K_NORM=heads.k_norm is not None,
        V_NORM=heads.v_norm is not None,
        ROUND_FIRST=any(gain.round_first for gain in given),
        PLUS_ONE=any(gain.plus_one for gain in given),
        INTERLEAVED=heads.interleaved,
        LAST=heads.last,
        GATED=heads.gated,
        **row_options(product, heads.head_dim // 2, num_warps=1),
    )
    if destination is not None and apart:
        store_kv(destination, k, v)
    return attended
