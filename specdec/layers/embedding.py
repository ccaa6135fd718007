r"""Embeddings of T tokens, and what a drafter puts to their right, in one launch.

    y_t = [ E[token_t] s | z_t ]        s: the family's scale, or none;   z: rows of another module, or none

A product of E and s is rounded to the model's dtype, as transformers holds it. Bits depend on no other row.
"""

import torch
import torch.nn.functional as F

from specdec.gpu.dependent_launch import pdl_options, trigger_next, wait_for_previous
from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, tl, triton

BLOCK = 512


def reference_embed(
    tokens: torch.Tensor, table: torch.Tensor, scale: torch.Tensor | None = None, right: torch.Tensor | None = None
) -> torch.Tensor:
    """See `embed`."""
    rows = F.embedding(tokens, table)
    if scale is not None:
        rows = rows * scale.to(table.dtype)
    return rows if right is None else torch.cat([rows, right], dim=-1)


@triton.jit(do_not_specialize=["s_tokens"])
def _embed_kernel(
    p_tokens: tl.tensor,  # [T]
    p_table: tl.tensor,  # [V, H]
    p_scale: tl.tensor,  # one number, or None
    p_right: tl.tensor,  # [T, Z] or None
    p_out: tl.tensor,  # [T, H + Z]
    H: tl.tensor,
    Z: tl.tensor,
    s_tokens: tl.tensor,
    s_right: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    i_block, num_blocks = tl.program_id(1), tl.cdiv(H, BLOCK)  # of the table's columns
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    p_out += i_t * (H + Z)
    wait_for_previous(PDL)
    if i_block < num_blocks:
        o_h = i_block * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(p_tokens + i_t * s_tokens).to(tl.int64)
        b_row = tl.load(p_table + token * H + o_h, mask=o_h < H, other=0.0)
        if p_scale is not None:
            scale = tl.load(p_scale).to(DTYPE).to(tl.float32)
            b_row = (b_row.to(tl.float32) * scale).to(DTYPE)
        tl.store(p_out + o_h, b_row, mask=o_h < H, eviction_policy=KEEP)
    if p_right is not None:  # noqa: SIM102 - this is decided when the kernel is compiled
        if i_block >= num_blocks:
            o_z = (i_block - num_blocks) * BLOCK + tl.arange(0, BLOCK)
            tl.store(
                p_out + H + o_z,
                tl.load(p_right + i_t * s_right + o_z, mask=o_z < Z, other=0.0),
                mask=o_z < Z,
                eviction_policy=KEEP,
            )


@op(reference=reference_embed)
def embed(
    tokens: torch.Tensor, table: torch.Tensor, scale: torch.Tensor | None = None, right: torch.Tensor | None = None
) -> torch.Tensor:
    """tokens [T], table [V, H], scale of one number, right [T, Z] -> [T, H], or [T, H + Z]."""
    (num_rows,), width = tokens.shape, table.shape[1]
    right_width = 0 if right is None else right.shape[1]
    assert table.is_contiguous() and (scale is None or scale.numel() == 1), f"{table.stride()=} {scale=}"
    assert right is None or (len(right) == num_rows and right.dtype == table.dtype), f"{num_rows=}"
    assert right is None or right.stride(1) == 1, "rows of what stands to the right have gaps"
    out = torch.empty((num_rows, width + right_width), dtype=table.dtype, device=table.device)
    if num_rows:
        _embed_kernel[(num_rows, triton.cdiv(width, BLOCK) + triton.cdiv(right_width, BLOCK))](
            *(tokens, table, scale, right, out, width, right_width),
            *(tokens.stride(0), 0 if right is None else right.stride(0)),
            BLOCK=BLOCK,
            num_warps=2,
            **pdl_options(out.device),
        )
    return out
