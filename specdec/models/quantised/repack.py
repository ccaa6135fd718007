"""From the tensors of a published format to a `PackedWeight`, one function a format. Numbers stay numbers of few bits.

`formats.py` has the shapes, and has checked them. `int32 [a, b / 8]` holds 8 numbers of 4 bits a word along b: of
compressed-tensors ascending, its zeros along N; of GPTQ along K, its zeros less 1 in version 1; of AWQ in the order of
AWQ_NIBBLES. MXFP4 has two numbers a byte, low first, and scales 2^(s - 127).
"""

from collections.abc import Mapping

import torch

from specdec.errors import UnsupportedModelError
from specdec.layers.packed.packed_weight import PackedWeight, pack

Tensors = Mapping[str, torch.Tensor]

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word holds the number of its first column, of its second, ..."""

PLAIN_ZERO = 8

FP8_SCALES = ("weight_scale", "weight_scale_inv")
"""Two names of one thing: both are multiplied by."""


def repack_compressed(tensors: Tensors, shape: torch.Size, group: int) -> PackedWeight:
    num_rows, _ = shape
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = nibbles(zeros.T)[:, :num_rows]
    return _int4(nibbles(tensors["weight_packed"]), tensors["weight_scale"].T, zeros, group)


def repack_gptq(
    tensors: Tensors, shape: torch.Size, group: int, *, less: int = 0, symmetric: bool = False
) -> PackedWeight:
    """less: what was taken from each zero before it was stored, as one subtraction from the whole word.
    symmetric: zeros are 8, and then left out, as products assume 8. Where they vary a layer keeps them even if its own
    are 8: products that run as one are alike in this."""
    if "g_idx" in tensors:
        require_in_order(tensors["g_idx"], group)
    zeros = nibbles(tensors["qzeros"] + less * 0x11111111)
    plain = symmetric and bool((zeros == PLAIN_ZERO).all())
    return _int4(nibbles(tensors["qweight"].T), tensors["scales"], None if plain else zeros, group)


def require_in_order(g_idx: torch.Tensor, group: int) -> None:
    """Raise UnsupportedModelError unless column k is of group k // group."""
    if not torch.equal(g_idx.long(), torch.arange(len(g_idx), device=g_idx.device) // group):
        raise UnsupportedModelError(
            "its columns are grouped by importance (desc_act, act-order); packed weights have groups of consecutive "
            "columns; give a checkpoint that was made with desc_act=False"
        )


def repack_awq(tensors: Tensors, shape: torch.Size, group: int) -> PackedWeight:
    numbers, zeros = (nibbles(tensors[name], AWQ_NIBBLES) for name in ("qweight", "qzeros"))
    return _int4(numbers.T.contiguous(), tensors["scales"], zeros, group)


def repack_fp8(
    tensors: Tensors, shape: torch.Size, group: int, *, block: tuple[int, int] | None = None
) -> PackedWeight:
    """block: rows and columns with one scale, where these are not the whole weight or a row. The last of either may be
    cut; a group then divides both a block and K."""
    [scales] = (tensors[name] for name in FP8_SCALES if name in tensors)
    scales = two_dimensional(scales)
    rows_each, columns_each = fp8_extents(scales.shape, shape, block)
    of_row = torch.arange(shape[0], device=scales.device) // rows_each
    of_group = torch.arange(0, shape[1], group, device=scales.device) // columns_each
    words = pack(tensors["weight"].view(torch.uint8), "e4m3")
    return PackedWeight("e4m3", words, scales.T[of_group][:, of_row].contiguous(), None, group)


def two_dimensional(scales: torch.Tensor) -> torch.Tensor:
    """One scale, or one a row, as [N, 1]."""
    return scales if scales.dim() == 2 else scales.reshape(-1, 1)


def fp8_extents(scales: torch.Size, shape: torch.Size, block: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    num_rows, num_columns = shape
    rows = num_rows if scales[0] == 1 else 1 if scales[0] == num_rows or block is None else block[0]
    columns = num_columns if scales[1] == 1 else num_columns // scales[1] if block is None else block[1]
    return rows, columns


def repack_mxfp4(
    tensors: Tensors, shape: torch.Size, group: int, *, names: tuple[str, str] = ("blocks", "scales")
) -> PackedWeight:
    """names: of the numbers and of the exponents."""
    pairs = tensors[names[0]].flatten(1)  # [N, K / 2]
    numbers = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    return PackedWeight("e2m1", pack(numbers, "e2m1"), _powers_of_two(tensors[names[1]].T), None, group)


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
