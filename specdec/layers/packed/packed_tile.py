r"""A tile of a packed weight, from its words to the operand of the tensor core, in registers.

    w = dtype(float32(number) * float32(scale))          as `packed_weight.py` says, rounded once

The words lie in the order of the operand, so no number moves between lanes: `FAST` is that in a few instructions a word,
on Hopper and later; elsewhere, and in the interpreter, plain operations give the same bits.

Of 4 bits in bfloat16, FAST masks numbers where they are: 4 bits at the bottom of a half word, or above those, are the
subnormal number q 2^-133 or q 2^-129, so that one multiplication and addition, rounded once, makes q s - 8 s (8 s is a
bfloat16, which 136 s of the usual trick is not). All are scaled by 2^-32 on the way, which the sum takes back.

Scales of 8 bits are no part of a tile: they multiply sums, of a block of columns (GROUP) or of a whole row (GROUP 0).
"""

from typing import Any

import torch

from specdec.gpu.triton_shim import INTERPRETED, tl, triton
from specdec.layers.packed.packed_weight import BITS, MAGNITUDES, SIGNS, PackedWeight, Weight

SMALL = tl.constexpr(2.0**-32)
"""What FAST numbers of 4 bits in bfloat16 are scaled by: nothing over- or underflows for scales of 2^-90 to 2^26."""
LARGE = tl.constexpr(2.0**32)
INTERPRETED_ = tl.constexpr(INTERPRETED)
SIGNS_, MAGNITUDES_ = tl.constexpr(SIGNS), tl.constexpr(MAGNITUDES)


def _asm(lines: list[str], registers: str) -> str:
    return "\n".join(["{", f".reg .b32 {registers};", *(f"{line};" for line in lines), "}"])


def _outputs(number: int) -> str:
    return f"mov.b32 {{${2 * number}, ${2 * number + 1}}}, d"


def _int4_bf16() -> str:
    lines = ["mov.b32 s, {$9, $9}", "mov.b32 m, 0x70007200", "mov.b32 c, 0xb100b100"]  # 2^101 and 2^97, -2^-29
    lines += ["mul.bf16x2 m, s, m", "mul.bf16x2 c, s, c"]
    lines += ["mov.b32 {l, h}, m", "mov.b32 s, {l, l}", "mov.b32 m, {h, h}", "mov.b32 a, $8"]
    for number in range(4):
        mask, scale = ("0x000f000f", "s") if number % 2 == 0 else ("0x00f000f0", "m")
        shift = ["shr.u32 a, $8, 8"] if number == 2 else []
        lines += [*shift, f"and.b32 d, a, {mask}", f"fma.rn.bf16x2 d, d, {scale}, c", _outputs(number)]
    return _asm(lines, "a, c, d, m, s; .reg .b16 l, h")


def _int4_zeros_bf16() -> str:
    lines = ["mov.b32 s, {$9, $9}", "mov.b32 a, 0x2f802f80", "mul.bf16x2 s, s, a"]  # 2^-32
    lines += ["mov.b32 z, {$10, $10}", "mov.b32 a, 0x43004300", "add.bf16x2 z, z, a", "mov.b32 a, $8"]  # 128
    for number in range(4):
        shift = [f"shr.u32 a, $8, {4 * number}"] if number else []
        lines += [*shift, "lop3.b32 d, a, 0x000f000f, 0x43004300, 0xea", "sub.bf16x2 d, d, z", "mul.bf16x2 d, d, s"]
        lines += [_outputs(number)]
    return _asm(lines, "a, d, s, z")


def _int4_fp16(zeros: bool) -> str:
    """1024 + q, or 1024 + 16 q, less what is not (q - z)."""
    lines = ["mov.b32 s, {$9, $9}"]
    if zeros:  # 1024 + z and -(64 + z)
        lines += ["mov.b32 z, {$10, $10}", "mov.b32 y, 0x64006400", "add.f16x2 y, y, z"]
        lines += ["mov.b32 t, 0xd400d400", "sub.f16x2 z, t, z"]
    else:
        lines += ["mov.b32 y, 0x64086408", "mov.b32 z, 0xd480d480"]
    lines += ["mov.b32 t, 0x2c002c00", "mov.b32 a, $8"]  # 1 / 16
    for number in range(4):
        shift = ["shr.u32 a, $8, 8"] if number == 2 else []
        if number % 2 == 0:
            lines += [*shift, "lop3.b32 d, a, 0x000f000f, 0x64006400, 0xea", "sub.f16x2 d, d, y"]
        else:
            lines += ["lop3.b32 d, a, 0x00f000f0, 0x64006400, 0xea", "fma.rn.f16x2 d, d, t, z"]
        lines += ["mul.f16x2 d, d, s", _outputs(number)]
    return _asm(lines, "a, d, s, t, y, z")


def _e2m1_bf16() -> str:
    """Sign and magnitude go where bfloat16 has its sign and the end of its exponent: 2^-126 times the number."""
    lines = ["mov.b32 s, {$9, $9}", "mov.b32 a, 0x6e806e80", "mul.bf16x2 s, s, a"]  # 2^(126 - 32)
    for number, (sign, low) in enumerate(zip(SIGNS, MAGNITUDES, strict=True)):
        if 15 - sign == 6 - low:
            lines += [f"shl.b32 a, $8, {15 - sign}", "and.b32 d, a, 0x81c081c0"]
        else:
            move = f"shl.b32 b, $8, {6 - low}" if low <= 6 else f"shr.u32 b, $8, {low - 6}"
            lines += [f"shl.b32 a, $8, {15 - sign}", "and.b32 d, a, 0x80008000", move]
            lines += ["lop3.b32 d, b, 0x01c001c0, d, 0xea"]
        lines += ["mul.bf16x2 d, d, s", _outputs(number)]
    return _asm(lines, "a, b, d, s")


def _e4m3_bf16() -> str:
    """Likewise, 2^-120 times the number."""
    lines = ["mov.b32 m, 0x7b807b80"]
    for number in range(2):
        lines += ["mov.b32 a, $4" if number == 0 else "shl.b32 a, $4, 8", "and.b32 d, a, 0x80008000"]
        lines += ["shr.u32 a, a, 4", "lop3.b32 d, a, 0x07f007f0, d, 0xea", "mul.bf16x2 d, d, m", _outputs(number)]
    return _asm(lines, "a, d, m")


INT4_BF16, INT4_ZEROS_BF16 = tl.constexpr(_int4_bf16()), tl.constexpr(_int4_zeros_bf16())
INT4_FP16, INT4_ZEROS_FP16 = tl.constexpr(_int4_fp16(False)), tl.constexpr(_int4_fp16(True))
E2M1_BF16, E4M3_BF16 = tl.constexpr(_e2m1_bf16()), tl.constexpr(_e4m3_bf16())


def is_fast(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Is there an assembly form for numbers of this weight in this dtype, here? Never asks for the number of rows."""
    if INTERPRETED or weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) < (9, 0):
        return False
    if weight.code == "e4m3":
        return dtype == torch.bfloat16
    known = (torch.bfloat16, torch.float16) if weight.code == "int4" else (torch.bfloat16,)
    return weight.scales.dtype == dtype and dtype in known


def weight_pointers(weight: Weight) -> tuple[Any, Any, Any, int, int]:
    """A weight as kernels take it: numbers or words, scales, zeros, the stride of a row of the first (of words: in
    fours, so that a compiler knows it is a multiple) and of the second."""
    if not isinstance(weight, PackedWeight):
        return weight, None, None, weight.stride(-2), 0
    assert weight.words.stride(-1) == weight.scales.stride(-1) == 1, f"{weight.words.stride()=}"
    assert weight.words.stride(-2) % 4 == 0, f"{weight.words.stride()=}"
    assert weight.zeros is None or weight.zeros.stride() == weight.scales.stride(), f"{weight.zeros.stride()=}"
    return weight.words, weight.scales, weight.zeros, weight.words.stride(-2) // 4, weight.scales.stride(-2)


def weight_constants(weight: Weight, dtype: torch.dtype) -> dict[str, Any]:
    """CODE, GROUP and FAST of kernels: the code, with "-zeros" where there are some; None: not packed."""
    if not isinstance(weight, PackedWeight):
        return {"CODE": None, "GROUP": 0, "FAST": False}
    code = weight.code if weight.zeros is None else f"{weight.code}-zeros"
    return {"CODE": code, "GROUP": 0 if weight.has_row_scales else weight.group, "FAST": is_fast(weight, dtype)}


def tile_columns(weight: PackedWeight) -> int:
    """Columns of a tile, whatever the number of rows of x, where that is part of the bits: 0 where it is not."""
    return weight.group if weight.code == "e4m3" and not weight.has_row_scales else 0


@triton.jit
def row_pointers(p_w: tl.tensor, o_n: tl.tensor, s_w: tl.tensor, CODE: tl.constexpr) -> tl.tensor:
    """[BN, 1], for rows `o_n` [BN] of a weight."""
    stride = s_w if CODE is None else s_w * 4
    return p_w + o_n.to(tl.int64)[:, None] * stride


@triton.jit
def scale_pointers(p_scales: tl.tensor, o_n: tl.tensor, CODE: tl.constexpr) -> tl.tensor:
    """[BN, 1]: to the first scale of rows `o_n` [BN]; never read where CODE is None."""
    if CODE is None:
        return o_n[:, None]
    else:
        return p_scales + o_n[:, None]


@triton.jit
def zero_pointers(p_zeros: tl.tensor, o_n: tl.tensor, CODE: tl.constexpr) -> tl.tensor:
    """Likewise, to zeros."""
    if CODE == "int4-zeros":
        return p_zeros + o_n[:, None]
    else:
        return o_n[:, None]


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
    """Columns [i_k, i_k + BLOCK_K) of a weight, [BN, BK]; 0 from `end` on."""
    if CODE is None:
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < (i_k + BLOCK_K if EVEN_K else end)
        return tl.load(p_w + o_k[None, :], mask=m_w & m_k[None, :], other=0.0)
    else:
        PER_WORD: tl.constexpr = 4 if CODE == "e4m3" else 8
        WORDS: tl.constexpr = BLOCK_K // PER_WORD
        first = tl.multiple_of(i_k // PER_WORD, WORDS)
        o_word = tl.arange(0, WORDS)
        m_word = o_word // 4 < (WORDS // 4 if EVEN_K else (end - i_k) // (4 * PER_WORD))  # all of four words, or none
        b_words = tl.load(p_w + (first + o_word)[None, :], mask=m_w & m_word[None, :], other=0)
        if CODE == "e4m3":
            return _e4m3_tile(b_words, FAST, DTYPE)
        else:
            GROUPS: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1
            o_group = i_k // GROUP + tl.arange(0, GROUPS)
            m_group = o_group * GROUP < (i_k + BLOCK_K if EVEN_K else end)
            m_scale = m_n & m_group[None, :]
            b_scales = tl.load(p_scales + o_group[None, :] * s_scales, mask=m_scale, other=0.0)  # [BN, groups]
            if CODE == "int4-zeros":
                b_zeros = tl.load(p_zeros + o_group[None, :] * s_scales, mask=m_scale, other=0.0)
            else:
                b_zeros = b_scales  # not read
            return _tile_of_4_bits(b_words, b_scales, b_zeros, CODE, FAST, DTYPE)


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
    """The sum over a range of K, with what tiles of a packed weight leave to it."""
    if CODE == "e4m3" and GROUP == 0:
        return _rounded_product(b_sum, tl.load(p_scales, mask=m_n, other=0.0).to(tl.float32))
    elif CODE is not None and CODE != "e4m3" and FAST and DTYPE == tl.bfloat16:
        return b_sum * LARGE
    else:
        return b_sum


@triton.jit
def _rounded_product(b_x: tl.tensor, b_scale: tl.tensor) -> tl.tensor:
    """x times a scale [BN, 1], rounded: whether it is stored or added next, which a compiler would do in one step."""
    if INTERPRETED_:
        return b_x * b_scale
    else:
        b_x, b_scale = tl.broadcast(b_x, b_scale)
        return tl.inline_asm_elementwise(
            asm="mul.rn.f32 $0, $1, $2;",
            constraints="=r,r,r",
            args=[b_x, b_scale],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


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
    """b_sum + w x, the product scaled where a tile has one scale a row."""
    if CODE == "e4m3" and GROUP > 0:
        b_scale = tl.load(p_scales + i_k // GROUP * s_scales, mask=m_n, other=0.0).to(tl.float32)  # [BN, 1]
        return b_sum + _rounded_product(tl.dot(b_w, b_x, input_precision="ieee"), b_scale)
    else:
        return _waited_for(tl.dot(b_w, b_x, b_sum, input_precision="ieee"))


@triton.jit
def _waited_for(b_sum: tl.tensor) -> tl.tensor:
    """The same sum, which something reads, so that the tensor core is waited for in this iteration of a loop.

    Its operand lies in registers. Triton (3.6, 3.9) leaves the last instructions of an iteration under way while the
    next one unpacks its tile, and ptxas gives their registers to it: at 128 rows of x sums were wrong now and then."""
    if INTERPRETED_:
        return b_sum
    else:
        return tl.inline_asm_elementwise(
            asm="mov.b32 $0, $1;", constraints="=r,r", args=[b_sum], dtype=tl.float32, is_pure=True, pack=1
        )


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
    GROUPS: tl.constexpr = b_scales.shape[1]
    if FAST:
        b_s = _spread(b_scales, WORDS)
        if CODE != "int4-zeros":
            ASM: tl.constexpr = E2M1_BF16 if CODE == "e2m1" else (INT4_BF16 if DTYPE == tl.bfloat16 else INT4_FP16)
            b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = tl.inline_asm_elementwise(
                asm=ASM,
                constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,h",
                args=[b_words, b_s],
                dtype=(tl.int16,) * 8,
                is_pure=True,
                pack=1,
            )
        else:
            ASM: tl.constexpr = INT4_ZEROS_BF16 if DTYPE == tl.bfloat16 else INT4_ZEROS_FP16
            b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = tl.inline_asm_elementwise(
                asm=ASM,
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
        return b_w.to(DTYPE, bitcast=True)
    else:
        if CODE == "int4-zeros":
            b_w -= _spread(b_zeros, WORDS * 8).to(tl.float32)
        elif CODE == "int4":
            b_w -= 8.0
        return (b_w * _spread(b_scales, WORDS * 8).to(tl.float32)).to(DTYPE)


@triton.jit
def _spread(b_groups: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """[BN, groups] -> [BN, WIDTH], each repeated."""
    BLOCK_N: tl.constexpr = b_groups.shape[0]
    GROUPS: tl.constexpr = b_groups.shape[1]
    b_wide = tl.broadcast_to(b_groups[:, :, None], (BLOCK_N, GROUPS, WIDTH // GROUPS))
    return tl.reshape(b_wide, (BLOCK_N, WIDTH))


@triton.jit
def _number(b_words: tl.tensor, NUMBER: tl.constexpr, HALF: tl.constexpr, CODE: tl.constexpr) -> tl.tensor:
    """float32, number 2 a + b of the half word that begins at bit HALF; `int4` before its zero is taken off."""
    if CODE == "e2m1":
        SIGN: tl.constexpr = SIGNS_[NUMBER] + HALF
        LOW: tl.constexpr = MAGNITUDES_[NUMBER] + HALF
        b_m = ((b_words >> LOW) & 7).to(tl.float32)
        b_m = tl.where(b_m < 4.0, b_m * 0.5, tl.where(b_m < 6.0, b_m - 2.0, 2.0 * b_m - 8.0))
        return tl.where(((b_words >> SIGN) & 1) == 0, b_m, -b_m)
    else:
        return ((b_words >> (4 * NUMBER + HALF)) & 15).to(tl.float32)


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
        b_0, b_1 = _e4m3(b_words, 8, DTYPE), _e4m3(b_words, 24, DTYPE)
        b_2, b_3 = _e4m3(b_words, 0, DTYPE), _e4m3(b_words, 16, DTYPE)
    b_w = tl.reshape(tl.join(tl.join(b_0, b_1), tl.join(b_2, b_3)), (BLOCK_N, WORDS // 4, 4, 2, 2))  # J, t, c, b
    b_w = tl.reshape(tl.permute(b_w, (0, 1, 4, 2, 3)), (BLOCK_N, WORDS * 4))
    return b_w.to(DTYPE, bitcast=True) if FAST else b_w


@triton.jit
def _e4m3(b_words: tl.tensor, SHIFT: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """The 8 bits from SHIFT on: exponent and mantissa as a float32 has them, 2^-120 times the number."""
    b_byte = b_words >> SHIFT
    b_bits = ((b_byte & 0x80) << 24) | ((b_byte & 0x7F) << 20)
    return (b_bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)  # 2^120


@triton.jit
def _dequantise_kernel(
    p_w: tl.tensor,
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    p_out: tl.tensor,  # [N, K]
    N: tl.tensor,
    K: tl.tensor,
    s_w: tl.tensor,
    s_scales: tl.tensor,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_k = tl.program_id(1) * BLOCK_K
    o_k = i_k + tl.arange(0, BLOCK_K)
    m_n = (o_n < N)[:, None]
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    p_scale_tile = scale_pointers(p_scales, o_n, CODE)
    b_w = load_tile(
        *(row_pointers(p_w, o_n, s_w, CODE), p_scale_tile, zero_pointers(p_zeros, o_n, CODE), s_scales, i_k, K),
        *(m_n, m_n, False, CODE, GROUP, FAST, BLOCK_K, DTYPE),
    ).to(tl.float32)
    if CODE == "e4m3" and GROUP > 0:
        b_w *= tl.load(p_scale_tile + i_k // GROUP * s_scales, mask=m_n, other=0.0).to(tl.float32)
    else:
        b_w = scale_sum(b_w, p_scale_tile, m_n, CODE, GROUP, FAST, DTYPE)
    tl.store(p_out + o_n.to(tl.int64)[:, None] * K + o_k[None, :], b_w.to(DTYPE), mask=m_n & (o_k < K)[None, :])


def dequantise(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] in `dtype`, on a GPU: for a product of many rows, in memory that it gives back."""
    n, k = weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    block_k = min(128, tile_columns(weight) or 128)
    words, scales, zeros, s_w, s_scales = weight_pointers(weight)
    _dequantise_kernel[(triton.cdiv(n, 64), triton.cdiv(k, block_k))](
        *(words, scales, zeros, out, n, k, s_w, s_scales),
        **weight_constants(weight, dtype),
        BLOCK_N=64,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return out


assert set(BITS) == {"int4", "e2m1", "e4m3"}, "a code has a form here"
