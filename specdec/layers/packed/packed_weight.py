r"""A packed weight: numbers of 4 or 8 bits in 32-bit words, and a scale for each group of columns.

    w[n, k] = dtype(float32(number[n, k]) * float32(scales[k // group, n]))

    code    bits   number
    int4    4      q - z, q in 0..15; z is 8, or `zeros[k // group, n]`
    e2m1    4      MXFP4's, 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    e4m3    8      FP8's (`torch.float8_e4m3fn`)

A word holds numbers in the order in which a lane of the tensor core needs them, so that a kernel moves no number
between lanes. With a, b, c in {0, 1}, word 4 J + t of a row has
    int4    k = 32 J + 16 a + 8 b + 2 t + c    at bit  4 (2 a + b) + 16 c
    e2m1    the same k                         its sign at bit SIGNS[2 a + b] + 16 c, the rest from MAGNITUDES[..] on,
                                               so that few shifts move both to bfloat16's places
    e4m3    k = 16 J + 8 b + 2 t + c           each of its pieces, from the lowest bit on, at its bit of PLACES + 16 c

Scales are stored as [K / group, N]: a tile reads those of its rows in one piece.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

import torch
import torch.nn.functional as F

BITS = {"int4": 4, "e2m1": 4, "e4m3": 8}
BLOCK = {4: 32, 8: 16}
"""Columns whose numbers share words."""

MAX_GROUP = 64
"""Largest group for 4-bit weights. A coarser scale is repeated, so that each thread of a program has one to copy."""

SIGNS, MAGNITUDES = (15, 12, 14, 13), (6, 3, 9, 0)

PLACES: dict[str, Sequence[Sequence[tuple[int, int, int]]]] = {
    "int4": [[(0, 4, 4 * number)] for number in range(4)],
    "e2m1": [[(0, 3, low), (3, 1, sign)] for sign, low in zip(SIGNS, MAGNITUDES, strict=True)],
    "e4m3": [[(0, 7, 4), (7, 1, 15)], [(0, 4, 0), (4, 3, 12), (7, 1, 11)]],
}
"""Pieces of a number, for each 2 a + b (or b): lowest bit, number of bits, and place in a half word. Pieces of the
first 8-bit number are where bfloat16 has its sign and the ends of exponent and mantissa; those of the second are two
shifts away."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K], or the weights [E, N, K] of experts.

    words: int32 [.., N, K bits / 32]. scales: floating [.., K / group, N]. zeros: shaped like scales, whole numbers
    0..16, int4 only; None: 8. group: consecutive columns per scale; K: one scale per row.
    """

    code: str
    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int

    @property
    def shape(self) -> torch.Size:
        """[.., N, K]"""
        *leading, num_words = self.words.shape
        return torch.Size((*leading, num_words * 32 // BITS[self.code]))

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.words, self.scales, self.zeros) if part is not None)

    @property
    def has_row_scales(self) -> bool:
        """Is it 8-bit with one scale per row? A product then scales its float32 sum, not the numbers."""
        return self.code == "e4m3" and self.group == self.shape[-1]

    def with_repeated_scales(self) -> "PackedWeight":
        """Returns the weight with groups of at most MAX_GROUP columns; an 8-bit weight is returned unchanged."""
        if BITS[self.code] != 4 or self.group <= MAX_GROUP:
            return self
        group = gcd(self.group, MAX_GROUP)
        times = self.group // group
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, dim=-2)
        return PackedWeight(self.code, self.words, self.scales.repeat_interleave(times, dim=-2), zeros, group)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, expert: int) -> "PackedWeight":
        zeros = None if self.zeros is None else self.zeros[expert]
        return PackedWeight(self.code, self.words[expert], self.scales[expert], zeros, self.group)

    def rows(self, first: int, end: int) -> "PackedWeight":
        """A view of rows [first, end) of a weight [N, K]."""
        zeros = None if self.zeros is None else self.zeros[:, first:end]
        return PackedWeight(self.code, self.words[first:end], self.scales[:, first:end], zeros, self.group)


Weight = torch.Tensor | PackedWeight
"""A weight [N, K] for products, plain or packed."""


def join_weights(parts: Sequence[Weight], cat: Callable[..., torch.Tensor]) -> Weight:
    """One weight with the rows of all parts, packed alike or not at all. cat: like `torch.cat`."""
    packed = [part for part in parts if isinstance(part, PackedWeight)]
    if not packed:
        return cat(parts)
    words, scales = cat([part.words for part in packed]), cat([part.scales for part in packed], dim=-1)
    zeros = [part.zeros for part in packed if part.zeros is not None]
    return PackedWeight(packed[0].code, words, scales, cat(zeros, dim=-1) if zeros else None, packed[0].group)


def pack_words(numbers: torch.Tensor, code: str) -> torch.Tensor:
    """Pack uint8 numbers [N, K] (in their lowest bits; K a multiple of `BLOCK`) into words int32 [N, K bits / 32]."""
    num_rows, num_columns = numbers.shape
    block = BLOCK[BITS[code]]
    assert num_columns % block == 0, f"{numbers.shape=} {code=}"
    words = torch.zeros((num_rows, num_columns // block, 4), dtype=torch.int32, device=numbers.device)
    for piece, low, mask, place in _fields(numbers, code):
        words |= ((piece.to(torch.int32) >> low) & mask) << place
    return words.flatten(1)


def unpack_words(words: torch.Tensor, code: str) -> torch.Tensor:
    """Undo `pack_words` -> uint8 [N, K]."""
    num_rows, num_words = words.shape
    numbers = torch.zeros((num_rows, num_words * 32 // BITS[code]), dtype=torch.uint8, device=words.device)
    blocks = words.view(num_rows, -1, 4)
    for piece, low, mask, place in _fields(numbers, code):
        piece |= (((blocks >> place) & mask) << low).to(torch.uint8)
    return numbers


def _fields(numbers: torch.Tensor, code: str) -> Iterator[tuple[torch.Tensor, int, int, int]]:
    """Views [N, blocks, 4] of numbers with equal places in their words. With each: lowest bit of the piece, its mask,
    and its place."""
    blocks = numbers.view(len(numbers), -1, len(PLACES[code]), 4, 2)  # J, 2 a + b or b, t, c
    for (number, pieces), c in product(enumerate(PLACES[code]), (0, 1)):
        for low, width, place in pieces:
            yield blocks[:, :, number, :, c], low, (1 << width) - 1, place + 16 * c


def numbers_of(weight: PackedWeight) -> torch.Tensor:
    """The numbers without scales, float32 [N, K]."""
    raw = unpack_words(weight.words, weight.code)
    if weight.code == "e4m3":
        return raw.view(torch.float8_e4m3fn).float()
    if weight.code == "e2m1":
        return torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float32, device=raw.device)[raw.int()]
    numbers = raw.float()
    if weight.zeros is None:
        return numbers.sub_(8.0)
    numbers.unflatten(1, (-1, weight.group)).sub_(_per_group(weight.zeros))
    return numbers


def _per_group(values: torch.Tensor) -> torch.Tensor:
    """[K / group, N] -> float32 [N, K / group, 1]."""
    return values.float().T.contiguous()[..., None]


def dequantised(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] in `dtype`."""
    numbers = numbers_of(weight)
    numbers.unflatten(1, (-1, weight.group)).mul_(_per_group(weight.scales))
    return numbers.to(dtype)


def multiply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x [.., K] W^T + bias -> [.., N] with the dequantised weight."""
    if not isinstance(weight, PackedWeight):
        return F.linear(x, weight, bias)
    if not weight.has_row_scales:
        return F.linear(x, dequantised(weight, x.dtype), bias)
    sums = F.linear(x, numbers_of(weight).to(x.dtype)).float() * weight.scales[0].float()
    return (sums if bias is None else sums + bias).to(x.dtype)
