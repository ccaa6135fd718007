"""PTX that unpacks a word of packed numbers into the tensor core's operand in a few instructions.

4-bit numbers for bfloat16 are masked in place. The lowest 4 bits of a half word are the subnormal number q 2^-133, the
next 4 bits q 2^-129, so one fma (rounded once) gives q s - 8 s. (8 s is exact in bfloat16; 136 s of the usual trick,
128 + q minus 136, is not.) All numbers are scaled by 2^-32, so that nothing over- or underflows for scales of 2^-90 to
2^26; the sum undoes it.

$0, $1, ... are the numbers (16 bits each, in the order of `packed_tile.py`), followed by the word, its scale and its
zero.
"""

import torch

from specdec.gpu.triton_shim import INTERPRETED, tl
from specdec.layers.packed.packed_weight import BITS, BLOCK, MAGNITUDES, SIGNS, PackedWeight

LARGE = tl.constexpr(2.0**32)
"""Factor for sums over 4-bit numbers in bfloat16."""


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
    """Make 1024 + q or 1024 + 16 q, then subtract all but q - z."""
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
    """Move sign and magnitude to bfloat16's sign and the low end of its exponent: 2^-126 times the number."""
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
    """Move sign and magnitude to bfloat16's sign and the low end of its exponent: 2^-120 times the number."""
    lines = ["mov.b32 m, 0x7b807b80", "and.b32 d, $4, 0x87f087f0", "mul.bf16x2 d, d, m", _outputs(0)]
    lines += ["shl.b32 a, $4, 4", "and.b32 a, a, 0x80f080f0", "shr.u32 d, $4, 4"]
    lines += ["lop3.b32 d, d, 0x07000700, a, 0xea", "mul.bf16x2 d, d, m", _outputs(1)]
    return _asm(lines, "a, d, m")


INT4_BF16, INT4_ZEROS_BF16 = tl.constexpr(_int4_bf16()), tl.constexpr(_int4_zeros_bf16())
INT4_FP16, INT4_ZEROS_FP16 = tl.constexpr(_int4_fp16(False)), tl.constexpr(_int4_fp16(True))
E2M1_BF16, E4M3_BF16 = tl.constexpr(_e2m1_bf16()), tl.constexpr(_e4m3_bf16())


def is_fast(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Is there an assembly form for this weight and dtype on this device? It does not depend on the number of rows."""
    if INTERPRETED or weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) < (9, 0):
        return False
    if weight.code == "e4m3":
        return dtype == torch.bfloat16
    if weight.group % BLOCK[BITS[weight.code]]:
        return False  # one word's numbers would have different scales
    known = (torch.bfloat16, torch.float16) if weight.code == "int4" else (torch.bfloat16,)
    return weight.scales.dtype == dtype and dtype in known
