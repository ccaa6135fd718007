r"""Unpacks a tile of a packed weight from its words into the operand of the tensor core, in registers.

    w = dtype(float32(number) * float32(scale))          see `packed_weight.py`; rounded once

Words are stored in the order of the operand, so no number moves between lanes. `FAST` unpacks a word in a few
instructions (`unpack_asm.py`), on Hopper and later; elsewhere, and in the interpreter, plain operations give the same
bits.

Scales of 8-bit weights are not applied to a tile: they multiply the sum over a block of columns (GROUP) or over a whole
row (GROUP 0).
"""

from typing import Any

import torch

from specdec.gpu.triton_shim import INTERPRETED, tl, triton
from specdec.layers.packed.packed_weight import MAGNITUDES, SIGNS, PackedWeight, Weight
from specdec.layers.packed.unpack_asm import (
    E2M1_BF16,
    E4M3_BF16,
    INT4_BF16,
    INT4_FP16,
    INT4_ZEROS_BF16,
    INT4_ZEROS_FP16,
    LARGE,
    is_fast,
)

INTERPRETED_ = tl.constexpr(INTERPRETED)
SIGNS_, MAGNITUDES_ = tl.constexpr(SIGNS), tl.constexpr(MAGNITUDES)


def weight_pointers(weight: Weight) -> tuple[Any, Any, Any, int, int]:
    """A weight's kernel arguments: numbers or words, scales, zeros, and the row strides of the first two (of words in
    units of four, so that the compiler knows the divisibility)."""
    if not isinstance(weight, PackedWeight):
        return weight, None, None, weight.stride(-2), 0
    assert weight.words.stride(-1) == weight.scales.stride(-1) == 1, f"{weight.words.stride()=}"
    assert weight.words.stride(-2) % 4 == 0, f"{weight.words.stride()=}"
    assert weight.zeros is None or weight.zeros.stride() == weight.scales.stride(), f"{weight.zeros.stride()=}"
    return weight.words, weight.scales, weight.zeros, weight.words.stride(-2) // 4, weight.scales.stride(-2)


def weight_constants(weight: Weight, dtype: torch.dtype) -> dict[str, Any]:
    """Kernel constants CODE, GROUP and FAST. The code ends with "-zeros" if the weight has zeros; None: not packed."""
    if not isinstance(weight, PackedWeight):
        return {"CODE": None, "GROUP": 0, "FAST": False}
    code = weight.code if weight.zeros is None else f"{weight.code}-zeros"
    return {"CODE": code, "GROUP": 0 if weight.has_row_scales else weight.group, "FAST": is_fast(weight, dtype)}


def tile_columns(weight: Weight) -> int:
    """Columns of a tile for any number of rows of x, if they affect bits; 0 if they do not."""
    if not isinstance(weight, PackedWeight) or weight.code != "e4m3" or weight.has_row_scales:
        return 0
    return weight.group


def runs_in_tiles(weight: Weight) -> bool:
    """Do kernels have tiles for the groups of this weight?"""
    if not isinstance(weight, PackedWeight) or weight.has_row_scales:
        return True
    return weight.group in (16, 32, 64, 128)


@triton.constexpr_function
def scale_step(block_n: int, block_k: int, group: int) -> int:
    """Columns per loaded scale: those of a group, or 32 (repeating scales) if the groups' scales are fewer than the 4
    bytes per thread for 128 threads that an asynchronous copy needs."""
    return group if block_n * (block_k // group) >= 256 else min(group, 32)


@triton.jit
def row_pointers(p_w: tl.tensor, o_n: tl.tensor, s_w: tl.tensor, CODE: tl.constexpr) -> tl.tensor:
    """Pointers [BN, 1] to rows `o_n` [BN] of a weight."""
    stride = s_w if CODE is None else s_w * 4
    return p_w + o_n.to(tl.int64)[:, None] * stride


@triton.jit
def scale_pointers(p_scales: tl.tensor, o_n: tl.tensor, CODE: tl.constexpr) -> tl.tensor:
    """Pointers [BN, 1] to the first scales of rows `o_n` [BN]; never read if CODE is None."""
    p_tile = o_n[:, None]
    if CODE is not None:
        p_tile = p_scales + p_tile
    return p_tile


@triton.jit
def zero_pointers(p_zeros: tl.tensor, o_n: tl.tensor, CODE: tl.constexpr) -> tl.tensor:
    """Pointers [BN, 1] to the first zeros of rows `o_n` [BN]; read only if CODE is int4-zeros."""
    p_tile = o_n[:, None]
    if CODE == "int4-zeros":
        p_tile = p_zeros + p_tile
    return p_tile


@triton.jit
def weight_rows(
    p_w: tl.tensor,
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    i_n: tl.tensor,
    tile_rows: tl.tensor,  # ignored for a packed weight: all rows of the tile
    N: tl.tensor,
    s_w: tl.tensor,
    CODE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,  # number of parts of the weight; a tile has equally many rows of each
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Pointers [BN, 1] to the rows of tile `i_n`, their scales and zeros; masks of the rows to read and of existing
    rows."""
    o_n = tl.arange(0, BLOCK_N)
    first = i_n * tile_rows if CODE is None else i_n * (BLOCK_N // PARTS)
    o_part = first + o_n % (BLOCK_N // PARTS)
    m_n = (o_part < N // PARTS)[:, None]
    m_w = (o_n % (BLOCK_N // PARTS) < tile_rows)[:, None] & m_n if CODE is None else m_n
    o_w = o_part + o_n // (BLOCK_N // PARTS) * (N // PARTS)
    p_w = row_pointers(p_w, o_w, s_w, CODE)
    return p_w, scale_pointers(p_scales, o_w, CODE), zero_pointers(p_zeros, o_w, CODE), m_w, m_n


@triton.jit
def load_tile(
    p_w: tl.tensor,  # [BN, 1]: `row_pointers`, `scale_pointers`, `zero_pointers`
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    s_scales: tl.tensor,
    i_k: tl.tensor,  # a multiple of BLOCK_K after a multiple of 128
    end: tl.tensor,
    m_w: tl.tensor,  # [BN, 1]: rows that are read
    m_n: tl.tensor,  # [BN, 1]: rows that the weight has; scales of all of these are read, in whole vectors
    EVEN_K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Load columns [i_k, i_k + BLOCK_K) of a weight, [BN, BK]; 0 from `end` on."""
    if CODE is None:
        last = i_k + BLOCK_K if EVEN_K else end
        o_k = i_k + tl.arange(0, BLOCK_K)
        b_tile = tl.load(p_w + o_k[None, :], mask=m_w & (o_k < last)[None, :], other=0.0)
    else:
        b_words, b_scales, b_zeros = load_words(
            *(p_w, p_scales, p_zeros, s_scales, i_k, end, m_w, m_n, EVEN_K, CODE, GROUP, BLOCK_K)
        )
        b_tile = unpack_tile(b_words, b_scales, b_zeros, CODE, FAST, DTYPE)
    return b_tile


@triton.jit
def load_words(
    p_w: tl.tensor,
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    s_scales: tl.tensor,
    i_k: tl.tensor,
    end: tl.tensor,
    m_w: tl.tensor,
    m_n: tl.tensor,
    EVEN_K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load a tile of a packed weight without unpacking: words [BN, words], scales and zeros [BN, groups].

    If a code has no scales in a tile, or no zeros, another tensor is returned in their place and not read."""
    last = i_k + BLOCK_K if EVEN_K else end
    PER_WORD: tl.constexpr = 4 if CODE == "e4m3" else 8
    WORDS: tl.constexpr = BLOCK_K // PER_WORD
    first = tl.multiple_of(i_k // PER_WORD, WORDS)
    o_word = tl.arange(0, WORDS)
    m_word = o_word // 4 < (WORDS // 4 if EVEN_K else (end - i_k) // (4 * PER_WORD))  # four words at a time
    b_words = tl.load(p_w + (first + o_word)[None, :], mask=m_w & m_word[None, :], other=0)
    b_scales = b_words
    if CODE != "e4m3":
        STEP: tl.constexpr = scale_step(p_w.shape[0], BLOCK_K, GROUP)
        o_k = i_k + STEP * tl.arange(0, BLOCK_K // STEP)
        m_scale = m_n & (o_k < last)[None, :]
        o_scale = (o_k // GROUP)[None, :] * s_scales
        b_scales = tl.load(p_scales + o_scale, mask=m_scale, other=0.0)
    b_zeros = b_scales
    if CODE == "int4-zeros":
        b_zeros = tl.load(p_zeros + o_scale, mask=m_scale, other=0.0)
    return b_words, b_scales, b_zeros


@triton.jit
def unpack_tile(
    b_words: tl.tensor,  # as `load_words` returns them
    b_scales: tl.tensor,
    b_zeros: tl.tensor,
    CODE: tl.constexpr,
    FAST: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Unpack loaded words -> [BN, BK]."""
    if CODE == "e4m3":
        b_tile = _e4m3_tile(b_words, FAST, DTYPE)
    else:
        b_tile = _tile_of_4_bits(b_words, b_scales, b_zeros, CODE, FAST, DTYPE)
    return b_tile


@triton.jit
def scale_sum(
    b_sum: tl.tensor,  # [BN, BM]
    p_scales: tl.tensor,  # [BN, 1]
    m_n: tl.tensor,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Apply to the sum over a range of K the factors that unpacking left out."""
    if CODE == "e4m3" and GROUP == 0:
        b_sum = _rounded_product(b_sum, tl.load(p_scales, mask=m_n, other=0.0).to(tl.float32))
    elif CODE is not None and CODE != "e4m3" and FAST and tl.bfloat16 == DTYPE:
        b_sum *= LARGE
    return b_sum


@triton.jit
def _rounded_product(b_x: tl.tensor, b_scale: tl.tensor) -> tl.tensor:
    """x times a scale [BN, 1], always rounded: the compiler must not fuse it with a following addition."""
    if INTERPRETED_:
        b_out = b_x * b_scale
    else:
        b_x, b_scale = tl.broadcast(b_x, b_scale)
        b_out = tl.inline_asm_elementwise(
            asm="mul.rn.f32 $0, $1, $2;",
            constraints="=r,r,r",
            args=[b_x, b_scale],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return b_out


@triton.jit
def multiply_tile(
    b_w: tl.tensor,
    b_x: tl.tensor,
    b_sum: tl.tensor,
    p_scales: tl.tensor,
    s_scales: tl.tensor,
    i_k: tl.tensor,
    m_n: tl.tensor,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """b_sum + w x; the product is scaled if a tile has one scale per row."""
    if CODE == "e4m3" and GROUP > 0:
        b_scale = tl.load(p_scales + i_k // GROUP * s_scales, mask=m_n, other=0.0).to(tl.float32)  # [BN, 1]
        b_sum += _rounded_product(tl.dot(b_w, b_x, input_precision="ieee"), b_scale)
    elif b_w.dtype != b_x.dtype:  # float32 times 2-byte: split each float32 into three exact pieces
        b_high = b_w.to(b_x.dtype)
        b_rest = b_w - b_high.to(tl.float32)
        b_middle = b_rest.to(b_x.dtype)
        b_sum = tl.dot((b_rest - b_middle.to(tl.float32)).to(b_x.dtype), b_x, b_sum)
        b_sum = tl.dot(b_high, b_x, tl.dot(b_middle, b_x, b_sum))
    elif CODE is None:
        b_sum = tl.dot(b_w, b_x, b_sum, input_precision="ieee")
    else:
        b_sum = _waited_for(tl.dot(b_w, b_x, b_sum, input_precision="ieee"))
    return b_sum


@triton.jit
def _waited_for(b_sum: tl.tensor) -> tl.tensor:
    """Return the sum through an instruction that reads it, so that the loop iteration waits for the tensor core.

    The tensor core's operand is in registers. Triton (3.6, 3.9) lets the last instructions of an iteration run while
    the next iteration unpacks its tile, and ptxas reuses their registers: with 128 rows of x, sums were sometimes
    wrong."""
    if not INTERPRETED_:
        b_sum = tl.inline_asm_elementwise(
            asm="mov.b32 $0, $1;", constraints="=r,r", args=[b_sum], dtype=tl.float32, is_pure=True, pack=1
        )
    return b_sum


@triton.jit
def _tile_of_4_bits(
    b_words: tl.tensor,  # [BN, BK / 8]
    b_scales: tl.tensor,  # [BN, groups]
    b_zeros: tl.tensor,
    CODE: tl.constexpr,
    FAST: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    BLOCK_N: tl.constexpr = b_words.shape[0]
    WORDS: tl.constexpr = b_words.shape[1]
    if FAST:
        b_s = _spread(b_scales, WORDS)
        if CODE != "int4-zeros":
            ASM: tl.constexpr = E2M1_BF16 if CODE == "e2m1" else (INT4_BF16 if tl.bfloat16 == DTYPE else INT4_FP16)
            b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = tl.inline_asm_elementwise(
                asm=ASM,
                constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,h",
                args=[b_words, b_s],
                dtype=(tl.int16,) * 8,
                is_pure=True,
                pack=1,
            )
        else:
            ASM_ZEROS: tl.constexpr = INT4_ZEROS_BF16 if tl.bfloat16 == DTYPE else INT4_ZEROS_FP16
            b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = tl.inline_asm_elementwise(
                asm=ASM_ZEROS,
                constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,h,h",
                args=[b_words, b_s, _spread(b_zeros, WORDS)],
                dtype=(tl.int16,) * 8,
                is_pure=True,
                pack=1,
            )
    else:
        b_0, b_1 = _number(b_words, 0, 0, CODE), _number(b_words, 0, 16, CODE)
        b_2, b_3 = _number(b_words, 1, 0, CODE), _number(b_words, 1, 16, CODE)
        b_4, b_5 = _number(b_words, 2, 0, CODE), _number(b_words, 2, 16, CODE)
        b_6, b_7 = _number(b_words, 3, 0, CODE), _number(b_words, 3, 16, CODE)
    b_w = tl.join(tl.join(tl.join(b_0, b_1), tl.join(b_2, b_3)), tl.join(tl.join(b_4, b_5), tl.join(b_6, b_7)))
    b_w = tl.reshape(b_w, (BLOCK_N, WORDS // 4, 4, 2, 2, 2))  # J, t, c, b, a
    b_w = tl.reshape(tl.permute(b_w, (0, 1, 5, 4, 2, 3)), (BLOCK_N, WORDS * 8))
    if FAST:
        b_w = b_w.to(DTYPE, bitcast=True)
    else:
        if CODE == "int4-zeros":
            b_w -= _spread(b_zeros, WORDS * 8).to(tl.float32)
        elif CODE == "int4":
            b_w -= 8.0
        b_w = (b_w * _spread(b_scales, WORDS * 8).to(tl.float32)).to(DTYPE)
    return b_w


@triton.jit
def _spread(b_groups: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Repeat each value: [BN, groups] -> [BN, WIDTH]."""
    BLOCK_N: tl.constexpr = b_groups.shape[0]
    GROUPS: tl.constexpr = b_groups.shape[1]
    b_wide = tl.broadcast_to(b_groups[:, :, None], (BLOCK_N, GROUPS, WIDTH // GROUPS))
    return tl.reshape(b_wide, (BLOCK_N, WIDTH))


@triton.jit
def _number(b_words: tl.tensor, NUMBER: tl.constexpr, HALF: tl.constexpr, CODE: tl.constexpr) -> tl.tensor:
    """Number 2 a + b of the half word that begins at bit HALF, in float32; `int4` without subtracting its zero."""
    if CODE == "e2m1":
        SIGN: tl.constexpr = SIGNS_[NUMBER] + HALF
        LOW: tl.constexpr = MAGNITUDES_[NUMBER] + HALF
        b_m = ((b_words >> LOW) & 7).to(tl.float32)
        b_m = tl.where(b_m < 4.0, b_m * 0.5, tl.where(b_m < 6.0, b_m - 2.0, 2.0 * b_m - 8.0))
        b_number = tl.where(((b_words >> SIGN) & 1) == 0, b_m, -b_m)
    else:
        b_number = ((b_words >> (4 * NUMBER + HALF)) & 15).to(tl.float32)
    return b_number


@triton.jit
def _e4m3_tile(b_words: tl.tensor, FAST: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    BLOCK_N: tl.constexpr = b_words.shape[0]
    WORDS: tl.constexpr = b_words.shape[1]
    if FAST:
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            asm=E4M3_BF16,
            constraints="=h,=h,=h,=h,r",
            args=[b_words],
            dtype=(tl.int16,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        b_0, b_1 = _e4m3(b_words, 0, DTYPE), _e4m3(b_words >> 16, 0, DTYPE)
        b_2, b_3 = _e4m3(b_words, 1, DTYPE), _e4m3(b_words >> 16, 1, DTYPE)
    b_w = tl.reshape(tl.join(tl.join(b_0, b_1), tl.join(b_2, b_3)), (BLOCK_N, WORDS // 4, 4, 2, 2))  # J, t, c, b
    b_w = tl.reshape(tl.permute(b_w, (0, 1, 4, 2, 3)), (BLOCK_N, WORDS * 4))
    return b_w.to(DTYPE, bitcast=True) if FAST else b_w


@triton.jit
def _e4m3(b_half: tl.tensor, NUMBER: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """A number of the lower half word. Its bits, moved to bfloat16's places, are 2^-120 times the number."""
    if NUMBER == 0:
        b_bits = b_half & 0x87F0
    else:
        b_bits = ((b_half << 4) & 0x80F0) | ((b_half >> 4) & 0x0700)
    return ((b_bits << 16).to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)  # 2^120
