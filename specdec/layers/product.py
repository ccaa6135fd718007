r"""A product before its last sum, which the kernel that reads it next computes on the way.

    y = dtype(((0 + p_0) + p_1) + ... + p_{S-1} + bias)          p_s [M, N] float32: sums over ranges of K

Kernels of this folder call `sum_parts`; `finish` is a launch for any other reader.
"""

from typing import NamedTuple

import torch

from specdec.gpu.dependent_launch import pdl_options, trigger_next, wait_for_previous
from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, tl, triton


class Product(NamedTuple):
    """x W^T before its last sum: y = sum_s parts[s] + bias, rounded to `dtype`.

    parts: [S, M, N] float32, or [1, M, N] in `dtype` with nothing left to add.
    """

    parts: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, value: torch.Tensor) -> "Product":
        """What is already a sum [M, N]."""
        return cls(value[None], None, value.dtype)

    @property
    def is_value(self) -> bool:
        """Is parts[0] the value, with nothing left to add or to round?"""
        return len(self.parts) == 1 and self.bias is None and self.parts.dtype == self.dtype


def reference_finish(product: Product) -> torch.Tensor:
    """The product's value [M, N]."""
    value = torch.zeros_like(product.parts[0], dtype=torch.float32)
    for part in product.parts:
        value = value + part
    return (value if product.bias is None else value + product.bias).to(product.dtype)


@triton.jit
def sum_parts(
    p_parts: tl.tensor,
    p_bias: tl.tensor,  # or None
    o_part: tl.tensor,
    o_n: tl.tensor,
    mask: tl.tensor,
    part_len: tl.tensor,
    SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """A product's value at offsets `o_part` of each part, as float32 that DTYPE holds."""
    part_len = part_len.to(tl.int64)
    b_sum = tl.load(p_parts + o_part, mask=mask, other=0.0).to(tl.float32)
    for i_split in tl.static_range(1, SPLITS):
        b_sum += tl.load(p_parts + i_split * part_len + o_part, mask=mask, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_sum += tl.load(p_bias + o_n, mask=mask, other=0.0).to(tl.float32)
    return b_sum.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["part_len"])
def _finish_kernel(
    p_parts: tl.tensor,  # [S, M, N]
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [M, N]
    part_len: tl.tensor,
    N: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    wait_for_previous(PDL)
    o_part = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o_part < part_len
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    b_out = sum_parts(p_parts, p_bias, o_part, o_part % N, mask, part_len, SPLITS, DTYPE)
    tl.store(p_out + o_part, b_out.to(DTYPE), mask=mask, eviction_policy=KEEP)


@op(reference=reference_finish)
def finish(product: Product) -> torch.Tensor:
    """The product's value [M, N]."""
    parts, bias, dtype = product
    if product.is_value:
        return parts[0]
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    if out.numel():
        options = pdl_options(out.device)
        _finish_kernel[(triton.cdiv(out.numel(), 512),)](
            parts, bias, out, out.numel(), out.shape[1], SPLITS=len(parts), BLOCK=512, num_warps=4, **options
        )
    return out
