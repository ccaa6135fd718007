r"""Norms over the whole width of queries and keys (OLMo 2), before heads are told apart, in one launch.

    y = dtype(sum_s parts[s] + bias)                the merged QKV product: queries, keys, values
    z = [ norm_q(y_q) | norm_k(y_k) | y_v ]         norm: see `norm.py`

One program a row and third: no result depends on the number of rows.
"""

import torch

from specdec.gpu.dependent_launch import TL_DTYPES, pdl_options, trigger_next, wait_for_previous
from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, tl, triton
from specdec.layers.norm import Gain, reference_rms_norm, rms_norm, row_block
from specdec.layers.product import Product, reference_finish, sum_parts


def reference_qk_norm(product: Product, q_gain: Gain, k_gain: Gain) -> Product:
    """product [T, Q + 2 K], whose queries have the width Q of q_gain and keys the width K of k_gain -> the same."""
    assert q_gain.weight is not None and k_gain.weight is not None
    widths = len(q_gain.weight), len(k_gain.weight)
    q, k, v = reference_finish(product).split([*widths, widths[1]], dim=-1)
    return Product.of(torch.cat([reference_rms_norm(q, q_gain), reference_rms_norm(k, k_gain), v], dim=-1))


@triton.jit(do_not_specialize=["num_rows", "eps_q", "eps_k"])
def _qk_norm_kernel(
    p_parts: tl.tensor,  # [S, T, Q + 2 K]
    p_bias: tl.tensor,  # [Q + 2 K] or None
    p_q_gain: tl.tensor,  # [Q]
    p_k_gain: tl.tensor,  # [K]
    p_out: tl.tensor,  # [T, Q + 2 K]
    num_rows: tl.tensor,
    Q: tl.tensor,
    K: tl.tensor,
    eps_q: tl.tensor,
    eps_k: tl.tensor,
    ROUND_FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row, i_third = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = Q + 2 * K
    width = tl.where(i_third == 0, Q, K)
    first = tl.where(i_third == 0, 0, Q + (i_third - 1) * K)  # column
    o_w = tl.arange(0, BLOCK)
    m_w = o_w < width
    b_gain = tl.zeros([BLOCK], tl.float32)
    if i_third == 0:
        b_gain = tl.load(p_q_gain + o_w, mask=m_w, other=0.0).to(tl.float32)
    elif i_third == 1:
        b_gain = tl.load(p_k_gain + o_w, mask=m_w, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    o_part = i_row * columns + first + o_w
    b_y = sum_parts(p_parts, p_bias, o_part, first + o_w, m_w, num_rows.to(tl.int64) * columns, SPLITS, DTYPE)
    if i_third < 2:
        eps = tl.where(i_third == 0, eps_q, eps_k)
        b_y = rms_norm(b_y, b_gain, width, eps, ROUND_FIRST, DTYPE)
    tl.store(p_out + o_part, b_y.to(DTYPE), mask=m_w, eviction_policy=KEEP)


@op(reference=reference_qk_norm)
def qk_norm(product: Product, q_gain: Gain, k_gain: Gain) -> Product:
    """product [T, Q + 2 K], whose queries have the width Q of q_gain and keys the width K of k_gain -> the same."""
    parts, bias, dtype = product
    splits, num_rows, columns = parts.shape
    assert q_gain.weight is not None and k_gain.weight is not None
    q_width, k_width = len(q_gain.weight), len(k_gain.weight)
    assert parts.is_contiguous() and columns == q_width + 2 * k_width, f"{parts.shape=} {q_width=} {k_width=}"
    assert q_gain.is_plain and q_gain[2:] == k_gain[2:], f"{q_gain} {k_gain}"
    out = parts.new_empty((num_rows, columns), dtype=dtype)
    if num_rows:
        _qk_norm_kernel[(num_rows, 3)](
            *(parts, bias, q_gain.weight, k_gain.weight, out, num_rows, q_width, k_width, q_gain.eps, k_gain.eps),
            ROUND_FIRST=q_gain.round_first,
            DTYPE=TL_DTYPES[dtype],
            SPLITS=splits,
            **row_block(max(q_width, k_width)),
            **pdl_options(parts.device),
        )
    return Product.of(out)
