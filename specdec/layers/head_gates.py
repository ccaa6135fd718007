r"""Gates: the output of attention or of a shared expert, times the sigmoid of a product of the layer's input.

    y[t, h, :] = x[t, h, :] sigmoid(g[t, h])           g = dtype(sum_s parts[s] + bias)      `gate_heads`
    y[t, h, d] = x[t, h, d] sigmoid(g[t, 2 h + 1, d])  g the product, by heads of D columns  `gate_channels`

Everything is rounded where transformers rounds it. One launch, with one program per row and head.
"""

import torch

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, tl, trigger_next, triton, wait_for_previous
from specdec.layers.gemm.product import Product, reference_finish, sum_parts
from specdec.layers.norm import row_options


def reference_gate_heads(x: torch.Tensor, gates: Product) -> torch.Tensor:
    return x * reference_finish(gates).sigmoid()[..., None]


def reference_gate_channels(x: torch.Tensor, product: Product) -> torch.Tensor:
    _, num_heads, width = x.shape
    pairs = reference_finish(product)[:, : 2 * num_heads * width].unflatten(1, (num_heads, 2, width))
    gated: torch.Tensor = x * pairs[:, :, 1].sigmoid()
    return gated


@triton.jit
def _store_gated(p_x: tl.tensor, p_out: tl.tensor, b_gate: tl.tensor, m_d: tl.tensor, DTYPE: tl.constexpr) -> None:
    b_gate = tl.sigmoid(tl.maximum(b_gate, -80.0)).to(DTYPE).to(tl.float32)  # e^80 is a float32
    b_x = tl.load(p_x, mask=m_d, other=0.0).to(tl.float32)
    tl.store(p_out, (b_x * b_gate).to(DTYPE), mask=m_d, eviction_policy=KEEP)


@triton.jit(do_not_specialize=["num_rows", "num_heads"])  # a value of 1 would become a constant
def _gate_heads_kernel(
    p_x: tl.tensor,  # [T, H, D]
    p_parts: tl.tensor,  # [S, T, H]
    p_bias: tl.tensor,  # [H] or None
    p_out: tl.tensor,  # [T, H, D]
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    D: tl.tensor,
    s_row: tl.tensor,
    s_head: tl.tensor,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < D
    o_gate = tl.zeros([1], tl.int32) + i_head
    part_len = num_rows.to(tl.int64) * num_heads
    wait_for_previous(PDL)
    b_gate = sum_parts(p_parts, p_bias, i_row * num_heads + o_gate, o_gate, o_gate >= 0, part_len, SPLITS, DTYPE)
    p_x += i_row * s_row + i_head * s_head + o_d
    p_out += (i_row * num_heads + i_head) * D + o_d
    _store_gated(p_x, p_out, b_gate, m_d, DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_channels_kernel(
    p_x: tl.tensor,  # [T, H, D]
    p_parts: tl.tensor,  # [S, T, N]
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [T, H, D]
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    N: tl.tensor,
    s_row: tl.tensor,
    s_head: tl.tensor,
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < D
    o_n = (2 * i_head + 1) * D + o_d
    wait_for_previous(PDL)
    part_len = num_rows.to(tl.int64) * N
    b_gate = sum_parts(p_parts, p_bias, i_row * N + o_n, o_n, m_d, part_len, SPLITS, DTYPE)
    p_x += i_row * s_row + i_head * s_head + o_d
    p_out += (i_row * num_heads + i_head) * D + o_d
    _store_gated(p_x, p_out, b_gate, m_d, DTYPE)


@op(reference=reference_gate_channels)
def gate_channels(x: torch.Tensor, product: Product) -> torch.Tensor:
    """Gate x [T, H, D] by a product [T, N] that begins with H pairs of a query and a gate of D columns."""
    num_rows, num_heads, width = x.shape
    columns = product.parts.shape[2]
    assert product.parts.shape[1] == num_rows and columns >= 2 * num_heads * width, f"{product.parts.shape=} {x.shape=}"
    assert product.parts.is_contiguous() and x.stride(2) == 1 and x.dtype == product.dtype, f"{x.stride()=} {x.dtype=}"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _gate_channels_kernel[(num_rows, num_heads)](
            *(x, product.parts, product.bias, out, num_rows, num_heads, columns, x.stride(0), x.stride(1)),
            D=width,
            **row_options(product, width),
        )
    return out


@op(reference=reference_gate_heads)
def gate_heads(x: torch.Tensor, gates: Product) -> torch.Tensor:
    """Gate x [T, H, D] by gates [T, H]."""
    num_rows, num_heads, width = x.shape
    assert gates.parts.shape[1:] == (num_rows, num_heads) and gates.parts.is_contiguous(), f"{gates.parts.shape=}"
    assert x.stride(2) == 1 and x.dtype == gates.dtype, f"{x.stride()=} {x.dtype=} {gates.dtype=}"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(width))
        _gate_heads_kernel[(num_rows, num_heads, triton.cdiv(width, block))](
            *(x, gates.parts, gates.bias, out, num_rows, num_heads, width, x.stride(0), x.stride(1)),
            **row_options(gates, block, num_warps=1),
        )
    return out
