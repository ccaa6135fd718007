r"""What kernels of products share: a product before its last sum, the cut of K into ranges, and activations.

    y = dtype(((0 + p_0) + p_1) + ... + p_{S-1} + bias)          p_s [M, N] float32: sums over ranges of K

The kernel that reads a product calls `sum_parts`; for other readers `finish` is a launch. The cut of K affects bits, so
it depends only on the weight's shape and form, never on the device or the number of rows. Tiles do not affect bits.
`linear.py` chooses the kernel.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.layers.packed.packed_weight import PackedWeight, Weight

MAX_SMALL_ROWS = 32
"""Up to this many rows of x `gemm_small` is the fastest for any weight."""

MAX_MEDIUM_ROWS = 256
"""Above this many rows of x a product of 2-byte numbers is bound by arithmetic, not by memory."""

RANGE = 128
"""Ranges of K begin at multiples of this number of columns."""

SPLITS = 4
"""Ranges of K for a weight with at most SPLIT_HEIGHT rows, which would otherwise have too few programs."""

SPLIT_HEIGHT = 8192
"""Maximum rows of a plain weight whose K is cut into ranges."""

LOW_HEIGHT = 512
"""A weight with at most this many rows is *low*: a program can hold its tile of one range of K."""

LOW_RANGE = 512
"""Maximum columns of a range of K of a low weight, in 16 bits and in FP8."""

PACKED_RANGE = 256
"""Ranges of K of a packed weight begin at multiples of this number of columns."""

MAX_PACKED_SPLITS = 8
"""Maximum ranges of K for a packed weight: each is a part that the next kernel adds."""

PACKED_WAVE = 396
"""Programs over a packed weight that an H200 runs at once. The number of ranges is chosen to fill 0.9 of this."""

PACKED_PROGRAMS = 640
"""If no number of ranges fills a wave, use at most this many programs over a packed weight: they hide the time to
unpack."""

ACTIVATIONS = ("gelu_tanh", "silu")
"""Activations that gate a product: act(g) u."""


class Product(NamedTuple):
    """x W^T before its last sum: y = sum_s parts[s] + bias, rounded to `dtype`.

    parts: [S, M, N] float32, or [1, M, N] in `dtype` with nothing left to add.
    """

    parts: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def from_value(cls, value: torch.Tensor) -> "Product":
        """Wrap a value [M, N] that is already summed."""
        return cls(value[None], None, value.dtype)

    @property
    def is_value(self) -> bool:
        """Is parts[0] the final value, with nothing to add or round?"""
        return len(self.parts) == 1 and self.bias is None and self.parts.dtype == self.dtype


class SplitK(NamedTuple):
    """`splits` ranges of `split_len` columns of K; the last has the remaining columns."""

    splits: int
    split_len: int

    def share(self, count: int) -> "SplitK":
        """Cut of the columns of one of `count` ranks. Ranges are the same as in the whole weight."""
        return SplitK(self.splits // count, self.split_len)


class RankShare(NamedTuple):
    """A rank's share of a product [M, N]: its ranges of K.

    owners [M, S]: for a mixture. Part s of row m is the product of one expert; this rank has computed it whole if the
    entry is not negative, otherwise it is undefined here. columns: the product is final (a value) and has this rank's
    columns; a row of it fills a whole number of float32.
    """

    product: Product
    owners: torch.Tensor | None = None
    columns: bool = False


class Tiles(NamedTuple):
    """Parameters of one launch. A program has `rows` <= `block_n` + `tail_n` rows of the weight (those of gate and of
    up, if it is gated)."""

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    rows: int
    tail_m: int = 0  # more rows of x that the same program multiplies by its loaded tile
    registers: int | None = None  # limit per thread
    tail_n: int = 0  # more rows of a gated weight that the same program multiplies (`gemm_medium`)
    ranges: int = 1  # ranges of K in any order (`gemm_medium`)

    def fit(self, shared_bytes: int) -> "Tiles":
        """These tiles for 2-byte numbers, with no more stages than fit the shared memory of a program."""
        stage = (self.block_n + self.tail_n + self.block_m + self.tail_m) * self.block_k * 2
        return self._replace(num_stages=max(1, min(self.num_stages, shared_bytes // stage)))

    @property
    def options(self) -> dict[str, Any]:
        """The launch options of every product."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**blocks, "num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.registers}


def require_operands(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> None:
    """Assert that x [M, K], weight [N, K] and bias [N] fit each other and a kernel of products."""
    assert weight.shape[1] == x.shape[1] and x.stride(1) == 1, f"{x.shape=} {weight.shape=} {x.stride()=}"
    if not isinstance(weight, PackedWeight):  # a router's weight may be float32 for any x
        assert weight.dtype in (x.dtype, torch.float32) and weight.stride(1) == 1, f"{x.dtype=} {weight.dtype=}"
    assert bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()), f"{bias.shape=} {weight.shape=}"


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
    """A product's value at offsets `o_part` of each part, as float32 rounded to DTYPE."""
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


def choose_split_k(n: int, k: int) -> SplitK:
    """The ranges of K for a weight [n, k]."""
    steps = triton.cdiv(k, RANGE)
    split_steps = max(2, triton.cdiv(steps, SPLITS)) if n <= SPLIT_HEIGHT else steps
    if n <= LOW_HEIGHT:
        split_steps = min(split_steps, LOW_RANGE // RANGE)
    return SplitK(triton.cdiv(steps, split_steps), split_steps * RANGE)


def split_k_of(weight: Weight, shape: Sequence[int] | None = None) -> SplitK:
    """The ranges of K for this weight, or for one of its form of another shape."""
    n, k = shape or weight.shape
    if not isinstance(weight, PackedWeight):
        return choose_split_k(n, k)
    steps, tiles = triton.cdiv(k, PACKED_RANGE), triton.cdiv(n, 64)
    splits = PACKED_WAVE // tiles
    if 10 * splits * tiles < 9 * PACKED_WAVE:
        splits = PACKED_PROGRAMS // tiles
    splits = max(1, min(splits, MAX_PACKED_SPLITS, steps // 2))  # at least two tiles each
    if n <= LOW_HEIGHT:  # each range is one tile, which a program can hold
        splits = triton.cdiv(k, LOW_RANGE if weight.has_row_scales else PACKED_RANGE)
    split_steps = triton.cdiv(steps, splits)
    return SplitK(triton.cdiv(steps, split_steps), split_steps * PACKED_RANGE)


def reference_activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply one of ACTIVATIONS; float32 in and out."""
    return F.gelu(x, approximate="tanh") if activation == "gelu_tanh" else F.silu(x)


@triton.jit
def activate(b_x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """float32 in and out."""
    b_u = b_x
    if ACTIVATION == "gelu_tanh":  # 1 + tanh(u) = 2 sigmoid(2 u), and 1.59.. = 2 sqrt(2 / pi)
        b_u = 1.5957691216057308 * (b_x + 0.044715 * b_x * b_x * b_x)
    return b_x * tl.sigmoid(tl.maximum(b_u, -80.0))  # e^80 is a float32
