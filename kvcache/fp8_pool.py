"""K/V in 8 bits: e4m3 numbers with one float32 scale per slot and head.

    write    scale = max |row| / 448, or 1 if the row is zero;   bits = e4m3(row / scale)
    read     e4m3 -> float32, times scale, rounded to the model's dtype

A row is the D numbers of one head of one token. Its scale is computed from that row alone, so its bits depend on no
other token, chunk or request. A move copies the bits and does not round again. Invariant: target, frozen drafter and
draft in progress all attend to the numbers that `read` returns; kernels do not round them.

Kernels decode the bits exactly (`from_e4m3`) and multiply the score of a key, and the weight of a value, by the scale
in float32: one multiplication per key, not per number. A reader loads two neighbours of a row as one int16, and
computes one product for even and one for odd numbers. With 8-bit operands, Triton would add channels in different
orders in small and in large tiles, and would read V number by number.

The 16 bits of such a pair are stored in an order for which bfloat16 needs few instructions:

    bit     15 | 14 13 12 | 11 | 10  9  8  7  6  5  4 |  3  2  1  0
    even   sign|          |    |      magnitude       |                 one mask: sign and magnitude are in place
    odd        | high bits|sign|                      |low magnitude    shifts by 4 to the left and to the right
"""

from dataclasses import dataclass
from typing import Any

import torch

from specdec.gpu.triton_shim import INTERPRETED, tl, triton
from specdec.kvcache.layout import GroupLoc

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Largest finite number of e4m3."""


@dataclass(frozen=True, slots=True)
class Fp8Pool:
    """Rows [slots, heads, D] in 8 bits. It replaces a tensor of `dtype` and has the tensor methods that pools use.

    bits: [slots, heads, D] uint8, e4m3 numbers in pairs (above), so D is even. scales: [slots, heads] float32.
    """

    bits: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def zeros(cls, slots: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> "Fp8Pool":
        bits = torch.zeros((slots, heads, dim), dtype=torch.uint8, device=device)
        return cls(bits, torch.zeros((slots, heads), dtype=torch.float32, device=device), dtype)

    @property
    def shape(self) -> torch.Size:
        return self.bits.shape

    def new_empty(self, shape: tuple[int, ...]) -> "Fp8Pool":
        """An uninitialised pool of this shape [slots, heads, D]."""
        return Fp8Pool(self.bits.new_empty(shape), self.scales.new_empty(shape[:-1]), self.dtype)

    def index_select(self, dim: int, slots: torch.Tensor) -> "Fp8Pool":
        return Fp8Pool(self.bits.index_select(dim, slots), self.scales.index_select(dim, slots), self.dtype)

    def index_copy_(self, dim: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Round rows [T, heads, D] and store them at slots [T]."""
        rows = rows.float()
        largest = rows.abs().amax(-1)
        # by a tensor: on a GPU, torch divides by a number by multiplying with its inverse, which rounds twice
        scales = torch.where(largest == 0, 1.0, largest / torch.full_like(largest, E4M3_MAX))
        self.bits.index_copy_(dim, slots, _paired((rows / scales[..., None]).to(E4M3).view(torch.uint8)))
        self.scales.index_copy_(dim, slots, scales)

    def numbers(self) -> torch.Tensor:
        """All rows without their scales, [slots, heads, D] float32."""
        pairs = self.bits.view(torch.int16).int()
        even = (pairs >> 4 & 0x7F) | (pairs >> 8 & 0x80)
        odd = (pairs & 0x0F) | (pairs >> 8 & 0x70) | (pairs >> 4 & 0x80)
        return torch.stack((even, odd), -1).flatten(-2).to(torch.uint8).view(E4M3).float()

    def read(self) -> torch.Tensor:
        """All rows [slots, heads, D] in `dtype`."""
        return (self.numbers() * self.scales[..., None]).to(self.dtype)


def _paired(bits: torch.Tensor) -> torch.Tensor:
    """Put the bits of pairs of e4m3 numbers [..., D] uint8 in their order in a pool."""
    even, odd = bits.int().unflatten(-1, (-1, 2)).unbind(-1)
    pairs: torch.Tensor = (even & 0x80) << 8 | (even & 0x7F) << 4 | (odd & 0x70) << 8 | (odd & 0x80) << 4 | odd & 0x0F
    return pairs.to(torch.int16).view(torch.uint8)


FieldPool = torch.Tensor | Fp8Pool
"""The rows of one field of a layer."""


def read_rows(pool: FieldPool, slots: torch.Tensor) -> torch.Tensor:
    """Rows at slots of any shape [...] -> [..., heads, D]."""
    return all_rows(pool.index_select(0, slots.flatten())).view(*slots.shape, *pool.shape[1:])


def all_rows(pool: FieldPool) -> torch.Tensor:
    return pool.read() if isinstance(pool, Fp8Pool) else pool


def numbers_and_scales(pool: FieldPool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensors of a pool that kernels read: rows [slots, heads, D] and None; for a rounded pool, pairs of numbers
    [slots, heads, D / 2] int16 and scales [slots, heads]."""
    return (pool.bits.view(torch.int16), pool.scales) if isinstance(pool, Fp8Pool) else (pool, None)


def tensors_of(pool: FieldPool) -> tuple[torch.Tensor, ...]:
    """The tensors of a pool, to be moved, poisoned with NaN or counted."""
    return (pool.bits, pool.scales) if isinstance(pool, Fp8Pool) else (pool,)


IN_PTX = tl.constexpr(not INTERPRETED)
FULL_SCALE = tl.constexpr(E4M3_MAX)

# Widen the even or the odd numbers of two pairs: sign and magnitude are moved to bfloat16's sign and the low end of its
# exponent, which gives 2^-120 times the number, subnormals included.
EVEN_TO_BF16 = tl.constexpr("and.b32 $0, $1, 0x87f087f0;")
ODD_TO_BF16 = tl.constexpr("""{
    .reg .b32 a, b;
    shl.b32 a, $1, 4;
    and.b32 a, a, 0x80f080f0;
    shr.u32 b, $1, 4;
    lop3.b32 $0, b, 0x07000700, a, 0xea;
}""")


@triton.constexpr_function
def raised(dtype: Any) -> float:
    """Root of the factor that `from_e4m3` leaves out in this dtype. Queries and weights take it once, sums of products
    once more: so neither over- nor underflows, and both are exact."""
    return 2.0**60 if IN_PTX.value and dtype.is_bf16() else 1.0


@triton.jit
def from_e4m3(b_pairs: tl.tensor, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Decode int16 pairs exactly -> the even and the odd numbers of a row over the square of `raised`. Pools hold no
    NaN."""
    if IN_PTX and DTYPE.is_bf16():
        b_even = tl.inline_asm_elementwise(EVEN_TO_BF16, "=r,r", [b_pairs], dtype=tl.bfloat16, is_pure=True, pack=2)
        b_odd = tl.inline_asm_elementwise(ODD_TO_BF16, "=r,r", [b_pairs], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        b_bits = b_pairs.to(tl.int32)
        b_even = _widened((b_bits >> 4 & 0x7F) | (b_bits >> 8 & 0x80)).to(DTYPE)
        b_odd = _widened((b_bits & 0x0F) | (b_bits >> 8 & 0x70) | (b_bits >> 4 & 0x80)).to(DTYPE)
    return b_even, b_odd


@triton.jit
def _widened(b_bits: tl.tensor) -> tl.tensor:
    """float32 of e4m3 in the low 8 bits of int32."""
    b_wide = ((b_bits & 0x80) << 24) | ((b_bits & 0x7F) << 20)
    return b_wide.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def _to_e4m3(b_x: tl.tensor) -> tl.tensor:
    """Round float32 of at most 448 to the nearest e4m3 number, ties to even -> its bits."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_magnitude = b_bits & 0x7FFFFFFF
    # e4m3 numbers below 2^-6 are 2^-9 apart, and so are float32 numbers from 2^14 on: adding 2^14 rounds
    b_small = (tl.abs(b_x) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    b_large = (b_magnitude - (120 << 23) + 0x7FFFF + ((b_magnitude >> 20) & 1)) >> 20
    return tl.where(b_magnitude < (121 << 23), b_small, b_large) | ((b_bits >> 24) & 0x80)


@triton.jit
def _round_row(
    p_row: tl.tensor, p_pairs: tl.tensor, p_scale: tl.tensor, s_dim: tl.tensor, DIM: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    o_d, o_pair = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 2)
    m_d = o_d < DIM
    b_row = tl.load(p_row + o_d * s_dim, mask=m_d, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(b_row), 0)
    largest = tl.where(tl.max((b_row != b_row).to(tl.int32), 0) > 0, float("nan"), largest)
    scale = tl.where(largest == 0.0, 1.0, tl.div_rn(largest, FULL_SCALE))
    b_bits = _to_e4m3(tl.div_rn(b_row, tl.zeros_like(b_row) + scale))
    b_even, b_odd = tl.split(tl.reshape(b_bits, [BLOCK // 2, 2]))
    b_even = (b_even & 0x80) << 8 | (b_even & 0x7F) << 4
    b_odd = (b_odd & 0x70) << 8 | (b_odd & 0x80) << 4 | b_odd & 0x0F
    tl.store(p_pairs + o_pair, (b_even | b_odd).to(tl.int16), mask=o_pair < DIM // 2)
    tl.store(p_scale, scale)


@triton.jit
def _store_fp8_kernel(
    p_k: tl.tensor,  # [T, Hkv, D]
    p_v: tl.tensor,  # [T, Hkv, DV]
    p_slots: tl.tensor,  # [T]
    p_pool_k: tl.tensor,  # [slots, Hkv, D / 2] pairs
    p_pool_v: tl.tensor,
    p_scale_k: tl.tensor,  # [slots, Hkv]
    p_scale_v: tl.tensor,
    s_k_t: tl.tensor,
    s_k_h: tl.tensor,
    s_k_d: tl.tensor,
    s_v_t: tl.tensor,
    s_v_h: tl.tensor,
    s_v_d: tl.tensor,
    s_slots: tl.tensor,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_head = tl.load(p_slots + i_t * s_slots).to(tl.int64) * HEADS + i_h
    p_pool_k += o_head * (K_DIM // 2)
    p_pool_v += o_head * (V_DIM // 2)
    _round_row(p_k + i_t * s_k_t + i_h * s_k_h, p_pool_k, p_scale_k + o_head, s_k_d, K_DIM, BLOCK)
    _round_row(p_v + i_t * s_v_t + i_h * s_v_h, p_pool_v, p_scale_v + o_head, s_v_d, V_DIM, BLOCK)


def store_fp8(k: torch.Tensor, v: torch.Tensor, slots: GroupLoc, pool_k: Fp8Pool, pool_v: Fp8Pool) -> None:
    """Round k [T, Hkv, D] and v [T, Hkv, DV], of any strides, and store them at slots [T]."""
    num_tokens, num_heads, head_dim = k.shape
    (pairs_k, scales_k), (pairs_v, scales_v) = map(numbers_and_scales, (pool_k, pool_v))
    _store_fp8_kernel[(num_tokens, num_heads)](
        *(k, v, slots, pairs_k, pairs_v, scales_k, scales_v),
        *(*k.stride(), *v.stride(), slots.stride(0)),
        HEADS=num_heads,
        K_DIM=head_dim,
        V_DIM=v.shape[2],
        BLOCK=triton.next_power_of_2(max(head_dim, v.shape[2])),
        num_warps=1,
    )
