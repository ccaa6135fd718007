"""Random packed weights in every code, for tests of kernels."""

from math import gcd

import torch

from specdec.layers.packed.packed_weight import BITS, PackedWeight, pack_words

from devices import DEVICE

CODES = ["int4", "int4-zeros", "int4-g16", "int4-g128", "e2m1", "e4m3-row", "e4m3-block"]


def random_weight(form: str, *shape: int, dtype: torch.dtype = torch.float32) -> PackedWeight:
    """Draw a packed weight [.., N, K]. Its dequantised elements are about K^-0.5."""
    code, _, kind = form.partition("-")
    *leading, n, k = shape
    bits = BITS[code]
    numbers = torch.randint(0, 1 << bits, (*leading, n, k), dtype=torch.uint8)
    if code == "e4m3":
        numbers[(numbers & 0x7F) == 0x7F] = 0x3A  # those are NaN
    group = gcd({"row": k, "block": 128, "g16": 16, "g128": 128}.get(kind, 32), k)  # as checkpoints are read
    size = {"int4": 4.6, "e2m1": 3.0, "e4m3": 100.0}[code]
    scales = (torch.rand(*leading, k // group, n) + 0.5) * k**-0.5 / size
    if code == "e2m1":
        scales = torch.exp2(scales.log2().round())
    scales = scales.to(torch.float32 if code == "e4m3" else dtype)
    zeros = torch.randint(0, 17, scales.shape).to(scales.dtype) if kind == "zeros" else None
    words = pack_words(numbers.flatten(0, -2), code).view(*leading, n, -1)
    parts = (None if part is None else part.to(DEVICE) for part in (words, scales, zeros))
    packed = PackedWeight(code, *parts, group)  # type: ignore[arg-type]
    return packed.with_repeated_scales()
