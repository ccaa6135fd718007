r"""Gated DeltaNet between the first and last product of its layer: three launches, a convolution and a recurrence.

    x [T, H] W_in -> q, k, v | z | b, a       one product; without b and a if these are stored in another form
    inputs = q, k, v                          `delta_inputs`, with
    g = -exp(A) softplus(a + c),  beta = sigmoid(b)
    q, k, v = act(convolution(inputs))        `delta_heads`, with
    q = q / |q| / sqrt(DK),  k = k / |k|      in float32
    o = recurrence(q, k, v, g, beta)          the context
    y = norm(o) act(z)                        `gate_norm`, one norm per head

Qwen3-Next stores the rows of W_in by key head (`groups`): q, k, v, z of each head, then b, a of each. Everything is
rounded where transformers rounds it. The kernels of the convolution and the recurrence trigger no dependent launch, so
the launch after each of them is plain.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from specdec.gpu.operations import Operations, op
from specdec.gpu.triton_shim import KEEP, TL_DTYPES, pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.kvcache.layer_context import Recurrence, RecurrentContext
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import Product, activate, reference_activate, reference_finish, sum_parts
from specdec.layers.norm import Norm, reference_rms_norm, rms_norm
from specdec.layers.packed.packed_weight import Weight
from specdec.layers.packed.weight_slices import rank_rows

COLUMNS = 1024
"""Columns per program of `delta_inputs`."""
EPSILON = 1e-6
"""The epsilon that transformers adds to the squared length of a query or a key."""


class DeltaHeads(NamedTuple):
    """Numbers and sizes of key and value heads. groups: number of groups in which the first weight's rows are
    stored."""

    num_k: int
    num_v: int
    k_dim: int
    v_dim: int
    groups: int = 1

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.num_k * self.k_dim

    @property
    def values(self) -> int:
        return self.num_v * self.v_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values

    @property
    def width(self) -> int:
        """Columns of the first product without those of b and a."""
        return self.channels + self.values

    @property
    def sections(self) -> list[int]:
        """These columns in sections, whose heads are in order."""
        return [self.keys, self.keys, self.values, self.values] if self.groups == 1 else [self.width]

    @property
    def gate_sections(self) -> list[int]:
        """Columns of b and a, likewise."""
        return [self.num_v, self.num_v] if self.groups == 1 else [2 * self.num_v]


DeltaInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""inputs [T, C] and z [T, V] in the model's dtype, g [T, HV] float32, beta [T, HV] in the model's dtype."""


class DeltaMixer(NamedTuple):
    """The part of a Gated DeltaNet between the first and the last product of its layer. It replaces attention.

    conv [C, K] and conv_bias [C] or None; decay [HV]: log of A; step_bias [HV]; gates [2 HV, H]: the rows of W_in for b
    and a; None: they are the last rows of the layer's first weight.
    """

    heads: DeltaHeads
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    activation: str
    decay: torch.Tensor
    step_bias: torch.Tensor
    norm: Norm
    gates: Weight | None

    def run(
        self, product: Product, x: torch.Tensor, layer: int, context: RecurrentContext, ops: Operations
    ) -> tuple[torch.Tensor, ...]:
        """Run convolution and recurrence: product [T, N] of x [T, H] and the layer's first weight -> outputs [T, HV,
        DV] float32 and z [T, V], for `finish`."""
        gates = product if self.gates is None else ops(linear)(x, self.gates)
        inputs, z, g, beta = ops(delta_inputs)(product, gates, self.decay, self.step_bias, self.heads)
        convolved = context.convolve(layer, inputs, self.conv, self.conv_bias)
        q, k, v = ops(delta_heads)(convolved, self.heads, self.activation)
        return context.recur(layer, Recurrence(q, k, v, g, beta)), z

    def finish(self, rows: tuple[torch.Tensor, ...], ops: Operations) -> torch.Tensor:
        """Norm and gate some rows [R, ...] of `run`'s result -> the input [R, K] of the last product."""
        out, z = rows
        return ops(gate_norm)(out, z, self.norm, self.activation)

    @property
    def sections(self) -> list[int]:
        """Rows of the layer's first weight, in sections of which each rank has an equal part."""
        return self.heads.sections + (self.heads.gate_sections if self.gates is None else [])

    def obstacle(self, count: int) -> str | None:
        """Why `count` ranks cannot divide its heads, as the end of a sentence."""
        if self.heads.num_k % count == 0 and self.heads.num_v % count == 0:
            return None
        return (
            f"has {self.heads.num_k} key heads and {self.heads.num_v} value heads of linear attention; a number of "
            "devices must divide both; use such a number, or replicas"
        )

    def share(self, rank: int, count: int) -> "DeltaMixer":
        """The heads of one rank; weights are views, in pieces (`StackedWeights`)."""
        heads = self.heads

        def own(rows: Any, sections: list[int]) -> Any:
            return None if rows is None else rank_rows(rows, sections, rank, count)

        return self._replace(
            heads=heads._replace(
                num_k=heads.num_k // count, num_v=heads.num_v // count, groups=max(heads.groups // count, 1)
            ),
            conv=own(self.conv, [heads.keys, heads.keys, heads.values]),
            conv_bias=own(self.conv_bias, [heads.keys, heads.keys, heads.values]),
            decay=own(self.decay, [heads.num_v]),
            step_bias=own(self.step_bias, [heads.num_v]),
            gates=own(self.gates, heads.gate_sections),  # so few rows that a rank cuts K as one device does
        )


def reference_delta_inputs(
    product: Product, gates: Product, decay: torch.Tensor, step_bias: torch.Tensor, heads: DeltaHeads
) -> DeltaInputs:
    columns = reference_finish(product)[:, : heads.width].unflatten(1, (heads.groups, -1))
    widths = [width // heads.groups for width in (heads.keys, heads.keys, heads.values, heads.values)]
    q, k, v, z = (part.flatten(1) for part in columns.split(widths, dim=2))
    b, a = reference_finish(gates)[:, -2 * heads.num_v :].unflatten(1, (heads.groups, 2, -1)).unbind(2)
    g = -decay.float().exp() * F.softplus(a.flatten(1).float() + step_bias.float())
    return torch.cat([q, k, v], dim=1), z, g, b.flatten(1).sigmoid()


def reference_delta_heads(
    convolved: torch.Tensor, heads: DeltaHeads, activation: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = reference_activate(convolved.float(), activation).to(convolved.dtype)
    q, k, v = x.split([heads.keys, heads.keys, heads.values], dim=1)
    q, k = (unit_length(y.unflatten(1, (heads.num_k, -1)).float()) for y in (q, k))
    return q * heads.k_dim**-0.5, k, v.unflatten(1, (heads.num_v, -1))


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Scale x [T, H, D] to length 1 per head."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + EPSILON)


def reference_gate_norm(x: torch.Tensor, z: torch.Tensor, gain: Norm, activation: str) -> torch.Tensor:
    normed = reference_rms_norm(x.to(z.dtype), gain).flatten(1)
    return (normed * reference_activate(z.float(), activation)).to(z.dtype)


@triton.jit
def _softplus(b_x: tl.tensor) -> tl.tensor:
    """log(1 + e^x), accurate even where 1 + e^x is rounded."""
    b_e = tl.exp(-tl.abs(b_x))
    b_u = 1.0 + b_e
    b_log = tl.where(b_u == 1.0, b_e, tl.log(b_u) * (b_e / tl.where(b_u == 1.0, 1.0, b_u - 1.0)))
    return tl.maximum(b_x, 0.0) + b_log


@triton.jit(do_not_specialize=["num_rows"])
def _delta_inputs_kernel(
    p_parts: tl.tensor,  # [S, T, WIDTH]
    p_gates: tl.tensor,  # [S', T, GATES_WIDTH], whose last 2 HV columns are b and a
    p_decay: tl.tensor,  # [HV]
    p_step_bias: tl.tensor,  # [HV]
    p_inputs: tl.tensor,  # [T, 2 KEYS + VALUES]
    p_z: tl.tensor,  # [T, VALUES]
    p_g: tl.tensor,  # [T, HV]
    p_beta: tl.tensor,  # [T, HV]
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    GATES_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    GATES_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    num_rows = num_rows.to(tl.int64)
    if i_block * BLOCK >= CHANNELS + VALUES:  # the last program
        o_h = tl.arange(0, HEADS_BLOCK)
        m_h = o_h < HEADS
        b_decay = -tl.exp(tl.load(p_decay + o_h, mask=m_h, other=0.0).to(tl.float32))
        b_bias = tl.load(p_step_bias + o_h, mask=m_h, other=0.0).to(tl.float32)
        wait_for_previous(PDL)
        EACH: tl.constexpr = HEADS // GROUPS
        o_b = GATES_WIDTH - 2 * HEADS + o_h // EACH * (2 * EACH) + o_h % EACH
        part_len = num_rows * GATES_WIDTH
        o_row = i_row * GATES_WIDTH + o_b
        b_b = sum_parts(p_gates, None, o_row, o_b, m_h, part_len, GATES_SPLITS, DTYPE)
        b_a = sum_parts(p_gates, None, o_row + EACH, o_b + EACH, m_h, part_len, GATES_SPLITS, DTYPE)
        b_beta = tl.sigmoid(tl.maximum(b_b, -80.0))  # e^80 is a float32
        tl.store(p_beta + i_row * HEADS + o_h, b_beta.to(DTYPE), mask=m_h, eviction_policy=KEEP)
        tl.store(p_g + i_row * HEADS + o_h, b_decay * _softplus(b_a + b_bias), mask=m_h, eviction_policy=KEEP)
    else:
        wait_for_previous(PDL)
        o = i_block * BLOCK + tl.arange(0, BLOCK)  # columns of q, k, v, z
        m = o < CHANNELS + VALUES
        o_n = o
        if GROUPS > 1:
            KEYS_EACH: tl.constexpr = KEYS // GROUPS
            VALUES_EACH: tl.constexpr = VALUES // GROUPS
            is_key = o < 2 * KEYS
            o_part = tl.where(is_key, o % KEYS, (o - 2 * KEYS) % VALUES)  # column within q, k, v or z
            width = tl.where(is_key, KEYS_EACH, VALUES_EACH)
            first = tl.where(is_key, o // KEYS * KEYS_EACH, 2 * KEYS_EACH + (o - 2 * KEYS) // VALUES * VALUES_EACH)
            o_n = o_part // width * (2 * KEYS_EACH + 2 * VALUES_EACH) + first + o_part % width
        b_x = sum_parts(p_parts, None, i_row * WIDTH + o_n, o_n, m, num_rows * WIDTH, SPLITS, DTYPE).to(DTYPE)
        tl.store(p_inputs + i_row * CHANNELS + o, b_x, mask=o < CHANNELS, eviction_policy=KEEP)
        tl.store(p_z + i_row * VALUES + o - CHANNELS, b_x, mask=m & (o >= CHANNELS), eviction_policy=KEEP)


@triton.jit
def _delta_heads_kernel(
    p_x: tl.tensor,  # [T, C]
    p_q: tl.tensor,  # [T, HK, DK]
    p_k: tl.tensor,  # [T, HK, DK]
    p_v: tl.tensor,  # [T, HV, DV]
    scale: tl.tensor,
    s_x: tl.tensor,
    NUM_K: tl.constexpr,
    NUM_V: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EPS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    if i_head < 2 * NUM_K:
        m = o < K_DIM
        b_x = tl.load(p_x + i_row * s_x + i_head * K_DIM + o, mask=m, other=0.0).to(tl.float32)
        b_x = activate(b_x, ACTIVATION).to(DTYPE).to(tl.float32)
        b_x = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) + EPS)
        if i_head < NUM_K:
            tl.store(p_q + (i_row * NUM_K + i_head) * K_DIM + o, b_x * scale, mask=m, eviction_policy=KEEP)
        else:
            tl.store(p_k + (i_row * NUM_K + i_head - NUM_K) * K_DIM + o, b_x, mask=m, eviction_policy=KEEP)
    else:
        m = o < V_DIM
        i_v = i_head - 2 * NUM_K
        b_v = tl.load(p_x + i_row * s_x + 2 * NUM_K * K_DIM + i_v * V_DIM + o, mask=m, other=0.0).to(tl.float32)
        b_v = activate(b_v, ACTIVATION)
        tl.store(p_v + (i_row * NUM_V + i_v) * V_DIM + o, b_v.to(DTYPE), mask=m, eviction_policy=KEEP)


@triton.jit(do_not_specialize=["eps"])
def _gate_norm_kernel(
    p_x: tl.tensor,  # [T, HV, DV]
    p_z: tl.tensor,  # [T, HV DV]
    p_gain: tl.tensor,  # [DV]
    p_out: tl.tensor,  # [T, HV DV]
    eps: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    o = tl.arange(0, BLOCK)
    m = o < DIM
    b_gain = tl.load(p_gain + o, mask=m, other=0.0).to(tl.float32)
    o_row = (tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)) * DIM + o
    wait_for_previous(PDL)
    b_x = tl.load(p_x + o_row, mask=m, other=0.0).to(DTYPE).to(tl.float32)
    b_z = tl.load(p_z + o_row, mask=m, other=0.0).to(tl.float32)
    b_x = rms_norm(b_x, b_gain, DIM, eps, ROUND_FIRST, DTYPE) * activate(b_z, ACTIVATION)
    tl.store(p_out + o_row, b_x.to(DTYPE), mask=m, eviction_policy=KEEP)


@op(reference=reference_delta_inputs)
def delta_inputs(
    product: Product, gates: Product, decay: torch.Tensor, step_bias: torch.Tensor, heads: DeltaHeads
) -> DeltaInputs:
    """Divide a product. product [T, N]: q, k, v and z of each of `heads.groups` groups; gates [T, M]: its last columns
    are b and a of each."""
    parts, dtype = product.parts, product.dtype
    _, num_rows, width = parts.shape
    gates_width = gates.parts.shape[2]
    assert parts.is_contiguous() and gates.parts.is_contiguous(), f"{parts.stride()=} {gates.parts.stride()=}"
    assert product.bias is None and gates.bias is None and gates.dtype == dtype, f"{product.bias=} {gates.bias=}"
    assert width >= heads.width and gates_width >= 2 * heads.num_v, f"{parts.shape=} {gates.parts.shape=} {heads=}"
    assert gates.parts.shape[1] == num_rows and heads.num_v % heads.groups == 0, f"{gates.parts.shape=} {heads=}"
    inputs, z = (parts.new_empty((num_rows, n), dtype=dtype) for n in (heads.channels, heads.values))
    g, beta = (parts.new_empty((num_rows, heads.num_v), dtype=kind) for kind in (torch.float32, dtype))
    if num_rows:
        _delta_inputs_kernel[(num_rows, triton.cdiv(heads.width, COLUMNS) + 1)](
            *(parts, gates.parts, decay, step_bias, inputs, z, g, beta, num_rows),
            WIDTH=width,
            GATES_WIDTH=gates_width,
            KEYS=heads.keys,
            VALUES=heads.values,
            HEADS=heads.num_v,
            GROUPS=heads.groups,
            DTYPE=TL_DTYPES[dtype],
            SPLITS=len(parts),
            GATES_SPLITS=len(gates.parts),
            BLOCK=COLUMNS,
            HEADS_BLOCK=triton.next_power_of_2(heads.num_v),
            num_warps=4,
            **pdl_options(parts.device),
        )
    return inputs, z, g, beta


@op(reference=reference_delta_heads)
def delta_heads(
    convolved: torch.Tensor, heads: DeltaHeads, activation: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divide convolved [T, C] -> q and k [T, HK, DK] of unit length in float32, q scaled; v [T, HV, DV] in its
    dtype."""
    num_rows, channels = convolved.shape
    assert channels == heads.channels and convolved.stride(1) == 1, f"{convolved.shape=} {convolved.stride()=} {heads=}"
    q, k = convolved.new_empty((2, num_rows, heads.num_k, heads.k_dim), dtype=torch.float32)
    v = convolved.new_empty((num_rows, heads.num_v, heads.v_dim))
    if num_rows:
        _delta_heads_kernel[(num_rows, 2 * heads.num_k + heads.num_v)](
            *(convolved, q, k, v, heads.k_dim**-0.5, convolved.stride(0)),
            NUM_K=heads.num_k,
            NUM_V=heads.num_v,
            K_DIM=heads.k_dim,
            V_DIM=heads.v_dim,
            ACTIVATION=activation,
            EPS=EPSILON,
            DTYPE=TL_DTYPES[convolved.dtype],
            BLOCK=triton.next_power_of_2(max(heads.k_dim, heads.v_dim)),
            num_warps=1,
            **pdl_options(convolved.device, after_library=True),
        )
    return q, k, v


@op(reference=reference_gate_norm)
def gate_norm(x: torch.Tensor, z: torch.Tensor, gain: Norm, activation: str) -> torch.Tensor:
    """Norm and gate: x [T, HV, DV] float32 and z [T, HV DV] -> [T, HV DV] in z's dtype."""
    num_rows, heads, dim = x.shape
    assert x.is_contiguous() and z.is_contiguous() and z.shape == (num_rows, heads * dim), f"{x.stride()=} {z.shape=}"
    assert gain.weight is not None and gain.weight.shape == (dim,) and gain.is_plain, f"{gain} for {dim=}"
    out = torch.empty_like(z)
    if num_rows:
        _gate_norm_kernel[(num_rows, heads)](
            *(x, z, gain.weight, out, gain.eps),
            HEADS=heads,
            DIM=dim,
            ACTIVATION=activation,
            ROUND_FIRST=gain.round_first,
            DTYPE=TL_DTYPES[z.dtype],
            BLOCK=triton.next_power_of_2(dim),
            num_warps=1,
            **pdl_options(z.device, after_library=True),
        )
    return out
