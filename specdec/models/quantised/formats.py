"""The formats of quantised weights: the tensors of a weight in each format, and how they become a packed weight.

A `WeightFormat` has the promises of a `quantization_config` about one weight (`quantization_config.py` makes it). Only
tensors whose headers have passed `compare` are read, and `repack` checks their values. Activations are never rounded. A
checkpoint that asks for rounding with dynamic scales is read for its weights; one with calibrated activation scales is
refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from specdec.errors import CheckpointError, UnsupportedModelError, about
from specdec.layers.packed.packed_weight import PackedWeight, pack_words

SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_TYPES = (torch.int32, torch.int64)
NOT_AS_PROMISED = (
    "the checkpoint does not hold what its quantization_config says: download it again, or correct what wrote it"
)

Sizes = tuple[int, ...]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """The names, shapes and dtypes that a tensor may have. optional: it may be missing."""

    names: tuple[str, ...]
    shapes: tuple[Sizes, ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False

    def __str__(self) -> str:
        shapes = " or ".join(str(list(shape)) for shape in self.shapes)
        return f"{shapes} in {' or '.join(dtype_name(dtype) for dtype in self.dtypes)}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def one(name: str, shape: Sizes, *dtypes: torch.dtype, optional: bool = False) -> ExpectedTensor:
    return ExpectedTensor((name,), (shape,), dtypes, optional)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of quantised weights. columns: K must be a multiple of this."""

    columns: ClassVar[int] = 32

    @property
    def joint(self) -> str:
        """Separates the weight's name from the names of its tensors in keys."""
        return "."

    @property
    def title(self) -> str:
        """Name of the format in messages."""
        raise NotImplementedError

    def tensors(self, num_rows: int, num_columns: int) -> list[ExpectedTensor]:
        """The tensors of a weight [N, K]. Raises UnsupportedModelError if the format does not allow this shape."""
        raise NotImplementedError

    def repack(self, tensors: Tensors, shape: torch.Size) -> PackedWeight:
        """Make the packed weight of compared tensors. Raises UnsupportedModelError if their values break a promise:
        zero points of symmetric weights, the order of columns, the stored shape."""
        raise NotImplementedError

    def compare(self, stem: str, given: Tensors, shape: torch.Size, num_experts: int | None = None) -> None:
        """Raise CheckpointError for a missing tensor, UnsupportedModelError for any other difference.

        stem: the weight's name in the checkpoint. num_experts: each tensor holds this many experts, in its first
        dimension; None: one weight."""
        num_rows, num_columns = shape
        leading = () if num_experts is None else (num_experts,)
        if num_columns % self.columns:
            raise UnsupportedModelError(
                f"{stem}: {num_columns} columns, and weights in {self.title} are read in multiples of {self.columns}"
            )
        with about(stem):
            expected = self.tensors(num_rows, num_columns)
        for name in given:
            if not any(name in wanted.names for wanted in expected):
                raise UnsupportedModelError(
                    f"{stem} has {name}, which is not read: a weight in {self.title} has "
                    f"{', '.join(wanted.names[0] for wanted in expected)}; {NOT_AS_PROMISED}"
                )
        for wanted in expected:
            found = [name for name in wanted.names if name in given]
            if len(found) > 1:
                raise UnsupportedModelError(f"{stem} has {' and '.join(sorted(found))}, two names of one tensor")
            if not found and not wanted.optional:
                raise CheckpointError(
                    f"the checkpoint lacks {stem}{self.joint}{wanted.names[0]}, which a weight in {self.title} has; "
                    f"{NOT_AS_PROMISED}"
                )
            for name in found:
                tensor = given[name]
                if tensor.dtype in wanted.dtypes and tensor.shape in [(*leading, *each) for each in wanted.shapes]:
                    continue
                of_each = "" if num_experts is None else f" for each of {num_experts} experts"
                raise UnsupportedModelError(
                    f"{stem}{self.joint}{name} is {list(tensor.shape)} in {dtype_name(tensor.dtype)}, and a weight "
                    f"{list(shape)} in {self.title} has it as {wanted}{of_each}; {NOT_AS_PROMISED}"
                )


def groups_of(num_columns: int, group_size: int | None) -> int:
    """Number of groups of a row; group_size None: one. Raises UnsupportedModelError if groups do not divide the row."""
    if num_columns % (group_size or num_columns):
        raise UnsupportedModelError(
            f"{num_columns} columns do not divide into groups of {group_size}, which its quantization_config says; "
            "leave this weight out when quantising, or give a checkpoint with a group_size that divides it"
        )
    return num_columns // (group_size or num_columns)


# int4: eight numbers in an int32 word


class Int4Layout(NamedTuple):
    """Names and shapes of the tensors in which a tool stores int4 weights [N, K] in G groups; "": no such tensor.

                               words        scales    zeros
    packed by row              [N, K / 8]   [N, G]    [N / 8, G]    only if asymmetric
    in_columns                 [K / 8, N]   [G, N]    [G, N / 8]    always; packed along K
    in_columns and across      [K, N / 8]   [G, N]    [G, N / 8]    always; packed along N

    nibbles: for each number of a word in order, the index of its nibble. less: amount subtracted from each zero point
    when it was stored (GPTQ v1: 1), by one subtraction from the whole word.
    """

    title: str
    words: str
    scales: str
    zeros: str
    order: str = ""
    shape: str = ""
    in_columns: bool = False
    across: bool = False
    nibbles: tuple[int, ...] = tuple(range(8))
    less: int = 0


COMPRESSED_INT4 = Int4Layout(
    "compressed-tensors int4", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"
)
GPTQ_V2 = Int4Layout("GPTQ v2", "qweight", "scales", "qzeros", "g_idx", in_columns=True)
GPTQ_V1 = GPTQ_V2._replace(title="GPTQ v1", less=1)
AWQ = GPTQ_V2._replace(title="AWQ", order="", across=True, nibbles=(0, 4, 1, 5, 2, 6, 3, 7))

PLAIN_ZERO = 8


@dataclass(frozen=True, slots=True)
class Int4(WeightFormat):
    """Weights of 4 bits.

    group_size: columns per scale; None: all. symmetric: all zero points are 8. in_any_order: columns may have been
    reordered, so the checkpoint must have the tensor that shows whether those of a group are consecutive.
    """

    layout: Int4Layout
    group_size: int | None
    symmetric: bool
    in_any_order: bool = False

    @property
    def title(self) -> str:
        groups = f"in groups of {self.group_size}" if self.group_size else "by row"
        return f"{self.layout.title} {groups}, {'symmetric' if self.symmetric else 'with zeros'}"

    def tensors(self, num_rows: int, num_columns: int) -> list[ExpectedTensor]:
        layout = self.layout
        if layout.in_columns and num_rows % 8:
            raise UnsupportedModelError(f"{num_rows} rows, and weights in {self.title} are read in multiples of 8")
        num_groups = groups_of(num_columns, self.group_size)
        turn = -1 if layout.in_columns else 1
        words = (num_columns, num_rows // 8) if layout.across else (num_rows, num_columns // 8)[::turn]
        zeros = (-(-num_rows // 8), num_groups)[::turn]
        expected = [
            one(layout.words, words, torch.int32),
            one(layout.scales, (num_rows, num_groups)[::turn], *SCALE_TYPES),
            one(layout.zeros, zeros, torch.int32, optional=self.symmetric and not layout.in_columns),
            one(layout.shape, (2,), *INDEX_TYPES, optional=True),
            one(layout.order, (num_columns,), *INDEX_TYPES, optional=not self.in_any_order),
        ]
        return [wanted for wanted in expected if wanted.names != ("",)]

    def repack(self, tensors: Tensors, shape: torch.Size) -> PackedWeight:
        layout = self.layout
        if layout.shape in tensors and tensors[layout.shape].tolist() != list(shape):
            stated = tensors[layout.shape].tolist()
            raise UnsupportedModelError(f"{layout.shape} says {stated} of a weight {list(shape)}")
        if layout.order in tensors:
            self.require_in_order(tensors[layout.order])
        words, scales, zeros = tensors[layout.words], tensors[layout.scales], tensors.get(layout.zeros)
        if not layout.in_columns:
            words, scales, zeros = words.T, scales.T, None if zeros is None else zeros.T
        numbers = nibbles(words, layout.nibbles).T.contiguous() if layout.across else nibbles(words.T)  # [N, K]
        if zeros is not None:
            zeros = nibbles(zeros + layout.less * 0x11111111, layout.nibbles)[:, : shape[0]]  # [K / G, N]
            zeros = zeros.to(scales.dtype).contiguous()  # kept even if all are 8, for projections of one form
        if zeros is not None and self.symmetric:
            if not bool((zeros == PLAIN_ZERO).all()):
                other = int(zeros[zeros != PLAIN_ZERO][0])
                raise UnsupportedModelError(
                    f"{layout.zeros} has zeros of {other}, and its quantization_config says that it is symmetric, "
                    f"which means {PLAIN_ZERO}; correct the config (sym, symmetric, zero_point, or checkpoint_format "
                    "of GPTQ)"
                )
            zeros = None
        return PackedWeight(
            "int4", pack_words(numbers, "int4"), scales.contiguous(), zeros, self.group_size or shape[1]
        )

    def require_in_order(self, g_idx: torch.Tensor) -> None:
        """Raise UnsupportedModelError unless the columns of each group are consecutive."""
        group = self.group_size or len(g_idx)
        if not torch.equal(g_idx.long(), torch.arange(len(g_idx), device=g_idx.device) // group):
            raise UnsupportedModelError(
                "its columns are grouped by importance (desc_act, act-order); packed weights have groups of "
                "consecutive columns; give a checkpoint that was made with desc_act=False"
            )


def nibbles(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Unpack int32 words [A, B] to uint8 [A, 8 B]. order: see `Int4Layout.nibbles`."""
    numbers = torch.empty((*words.shape, 8), dtype=torch.uint8, device=words.device)
    for place, nibble in enumerate(order):
        numbers[..., place] = (words >> (4 * nibble)) & 15
    return numbers.flatten(1)


# FP8 and MXFP4

Tile = tuple[int | None, int | None]
"""Rows and columns per scale; None: all."""

BY_TENSOR: Tile = (None, None)
BY_CHANNEL: Tile = (1, None)


@dataclass(frozen=True, slots=True)
class Fp8(WeightFormat):
    """Weights in e4m3.

    tiles: tile shapes that the config allows; the shape of the scales decides. scales: possible names of the tensor of
    scales, which multiply the numbers.
    """

    tiles: tuple[Tile, ...]
    scales: tuple[str, ...] = ("weight_scale",)

    columns: ClassVar[int] = 16

    @property
    def title(self) -> str:
        return f"FP8 {' or '.join(_tile_in_words(*tile) for tile in self.tiles)}"

    def tensors(self, num_rows: int, num_columns: int) -> list[ExpectedTensor]:
        shapes: list[Sizes] = []
        for rows, columns in self.tiles:
            sizes = -(-num_rows // (rows or num_rows)), -(-num_columns // (columns or num_columns))
            shapes.append(sizes)
            if columns is None:
                shapes += [(), (1,)] if rows is None else [sizes[:1]]
        weight = one("weight", (num_rows, num_columns), torch.float8_e4m3fn)
        return [weight, ExpectedTensor(self.scales, tuple(dict.fromkeys(shapes)), SCALE_TYPES)]

    def repack(self, tensors: Tensors, shape: torch.Size) -> PackedWeight:
        [scales] = (tensors[name] for name in self.scales if name in tensors)
        num_rows, num_columns = shape
        tiles = [(rows or num_rows, columns or num_columns) for rows, columns in self.tiles]
        counts = [math.ceil(num_rows / rows) * math.ceil(num_columns / columns) for rows, columns in tiles]
        rows, columns = tiles[counts.index(scales.numel())]
        # the last tile of either dimension may be smaller; groups divide both a tile and K
        group = math.gcd(columns, num_columns)
        of_row = torch.arange(num_rows, device=scales.device) // rows
        of_group = torch.arange(0, num_columns, group, device=scales.device) // columns
        scales = scales.reshape(-1, -(-num_columns // columns)).T[of_group][:, of_row].contiguous()
        return PackedWeight("e4m3", pack_words(tensors["weight"].view(torch.uint8), "e4m3"), scales, None, group)


def _tile_in_words(rows: int | None, columns: int | None) -> str:
    if columns is None:
        return "by tensor" if rows is None else "by channel"
    return f"in groups of {columns}" if rows == 1 else f"in blocks of {rows} x {columns}"


@dataclass(frozen=True, slots=True)
class Mxfp4(WeightFormat):
    """Two numbers per byte, the low nibble first, and scales 2^(s - 127). of_experts: tensors hold all experts of a
    layer (GPT-OSS); False: one weight each (compressed-tensors)."""

    of_experts: bool

    @property
    def joint(self) -> str:
        return "_" if self.of_experts else "."

    @property
    def title(self) -> str:
        return "MXFP4" if self.of_experts else "compressed-tensors MXFP4"

    @property
    def names(self) -> tuple[str, str]:
        return ("blocks", "scales") if self.of_experts else ("weight_packed", "weight_scale")

    def tensors(self, num_rows: int, num_columns: int) -> list[ExpectedTensor]:
        num_groups = num_columns // 32
        pairs = (num_rows, num_groups, 16) if self.of_experts else (num_rows, num_columns // 2)
        words, scales = self.names
        return [one(words, pairs, torch.uint8), one(scales, (num_rows, num_groups), torch.uint8)]

    def repack(self, tensors: Tensors, shape: torch.Size) -> PackedWeight:
        pairs, exponents = (tensors[name] for name in self.names)
        pairs = pairs.flatten(1)  # [N, K / 2]
        numbers = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
        # 2^(e - 127) as bfloat16: e is the exponent field of a float32; 2^-127 is subnormal
        bits = torch.where(exponents.T == 0, 1 << 22, exponents.T.int() << 23)
        scales = bits.view(torch.float32).to(torch.bfloat16).contiguous()
        return PackedWeight("e2m1", pack_words(numbers, "e2m1"), scales, None, 32)
