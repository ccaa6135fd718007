"""From the tensors of a published format to a `PackedWeight`, one function a format. Numbers stay numbers of few bits.

`formats.py` has compared their shapes and types; what values alone can say is checked here. `int32 [a, b / 8]` holds 8
numbers of 4 bits a word along b: of compressed-tensors ascending, its zeros along N; of GPTQ along K, its zeros less 1
in version 1; of AWQ in the order of AWQ_NIBBLES. MXFP4 has two numbers a byte, low first, and scales 2^(s - 127).
"""

import math
from collections.abc import Mapping

import torch

from specdec.errors import UnsupportedModelError
from specdec.layers.packed.packed_weight import PackedWeight, pack

Tensors = Mapping[str, torch.Tensor]

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word that holds the number of its first column, of its second, ..."""

PLAIN_ZERO = 8


def repack_compressed(tensors: Tensors, shape: torch.Size, group: int, *, symmetric: bool) -> PackedWeight:
    num_rows, _ = shape
    if "weight_shape" in tensors and tensors["weight_shape"].tolist() != list(shape):
        raise UnsupportedModelError(f"weight_shape says {tensors['weight_shape'].tolist()} of a weight {list(shape)}")
    if "weight_g_idx" in tensors:
        require_in_order(tensors["weight_g_idx"], group)
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = _promised("weight_zero_point", nibbles(zeros.T)[:, :num_rows], symmetric)
    return _int4(nibbles(tensors["weight_packed"]), tensors["weight_scale"].T, zeros, group)


def repack_gptq(tensors: Tensors, group: int, *, less: int, symmetric: bool) -> PackedWeight:
    """less: what was taken from each zero before it was stored, as one subtraction from the whole word."""
    if "g_idx" in tensors:
        require_in_order(tensors["g_idx"], group)
    zeros = nibbles(tensors["qzeros"] + less * 0x11111111)
    return _int4(nibbles(tensors["qweight"].T), tensors["scales"], _promised("qzeros", zeros, symmetric), group)


def repack_awq(tensors: Tensors, group: int, *, symmetric: bool) -> PackedWeight:
    numbers, zeros = (nibbles(tensors[name], AWQ_NIBBLES) for name in ("qweight", "qzeros"))
    return _int4(numbers.T.contiguous(), tensors["scales"], _promised("qzeros", zeros, symmetric), group)


def require_in_order(g_idx: torch.Tensor, group: int) -> None:
    """Raise UnsupportedModelError unless column k is of group k // group."""
    if not torch.equal(g_idx.long(), torch.arange(len(g_idx), device=g_idx.device) // group):
        raise UnsupportedModelError(
            "its columns are grouped by importance (desc_act, act-order); packed weights have groups of consecutive "
            "columns; give a checkpoint that was made with desc_act=False"
        )


def _promised(name: str, zeros: torch.Tensor, symmetric: bool) -> torch.Tensor | None:
    """Zeros that were stored; None, as products assume 8 then, where the config says that they are 8, and they are.
    Where they may vary a layer keeps them even if its own are 8: products that run as one are alike in this."""
    if not symmetric:
        return zeros
    if not bool((zeros == PLAIN_ZERO).all()):
        other = int(zeros[zeros != PLAIN_ZERO][0])
        raise UnsupportedModelError(
            f"{name} has zeros of {other}, and its quantization_config says that it is symmetric, which means "
            f"{PLAIN_ZERO}; correct the config (sym, symmetric, zero_point, or checkpoint_format of GPTQ)"
        )
    return None


def repack_fp8(numbers: torch.Tensor, scales: torch.Tensor, each: tuple[int, int]) -> PackedWeight:
    """numbers: e4m3 [N, K]. scales: of any shape, one for each tile of `each` rows and columns, row by row. The last
    tile of either may be cut; a group then divides both a tile and K."""
    num_rows, num_columns = numbers.shape
    rows, columns = each
    group = math.gcd(columns, num_columns)
    of_row = torch.arange(num_rows, device=scales.device) // rows
    of_group = torch.arange(0, num_columns, group, device=scales.device) // columns
    scales = scales.reshape(-1, -(-num_columns // columns))
    words = pack(numbers.view(torch.uint8), "e4m3")
    return PackedWeight("e4m3", words, scales.T[of_group][:, of_row].contiguous(), None, group)


def repack_mxfp4(blocks: torch.Tensor, exponents: torch.Tensor) -> PackedWeight:
    """blocks: uint8, two numbers a byte, [N, K / 2] in any shape. exponents: uint8 [N, K / 32]."""
    pairs = blocks.flatten(1)  # [N, K / 2]
    numbers = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    return PackedWeight("e2m1", pack(numbers, "e2m1"), _powers_of_two(exponents.T), None, 32)


def _powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 e -> bfloat16 2^(e - 127): the exponent bits of a float, but for 2^-127, which has none."""
    bits = torch.where(exponents == 0, 1 << 22, exponents.int() << 23)
    return bits.view(torch.float32).to(torch.bfloat16).contiguous()


def nibbles(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [A, B] -> uint8 [A, 8 B]; order: the nibble of the first number of a word, of the second, ..."""
    numbers = torch.empty((*words.shape, 8), dtype=torch.uint8, device=words.device)
    for place, nibble in enumerate(order):
        numbers[..., place] = (words >> (4 * nibble)) & 15
    return numbers.flatten(1)


def _int4(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int) -> PackedWeight:
    """numbers [N, K], scales and zeros [K / G, N]."""
    zeros = None if zeros is None else zeros.to(scales.dtype).contiguous()
    return PackedWeight("int4", pack(numbers, "int4"), scales.contiguous(), zeros, group)
