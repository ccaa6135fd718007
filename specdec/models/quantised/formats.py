"""The formats of quantised weights that are read: which tensors a weight has in each, and what repacks them.

A `Format` holds all that a `quantization_config` promises of a weight (`quantization_config.py` makes it), and says
from that and from the weight's shape [N, K] alone which tensors there must be, in which shapes and types: `tensors`.
`compare` holds a checkpoint against it, and nothing is read that was not compared (`comparison.py`). What a shape
cannot say, `repack` checks: zeros of a symmetric weight, the order of columns, a stored shape.

Activations are never rounded here: a checkpoint whose activations were to be rounded as they come (`dynamic`) is read
for its weights, one with calibrated scales for them is refused.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from specdec.errors import CheckpointError, UnsupportedModelError, about
from specdec.layers.packed.packed_weight import PackedWeight
from specdec.models.quantised.repack import (
    Tensors,
    repack_awq,
    repack_compressed,
    repack_fp8,
    repack_gptq,
    repack_mxfp4,
)

SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_TYPES = (torch.int32, torch.int64)
NOT_AS_PROMISED = (
    "the checkpoint does not hold what its quantization_config says: download it again, or correct what wrote it"
)

Sizes = tuple[int, ...]


class Described(Protocol):
    """A tensor, or what a file says of one."""

    @property
    def shape(self) -> Sizes: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor has one of these shapes and one of these types. optional: the format may do without it."""

    shapes: tuple[Sizes, ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False

    def __str__(self) -> str:
        shapes = " or ".join(str(list(shape)) for shape in self.shapes)
        return f"{shapes} in {' or '.join(in_words(dtype) for dtype in self.dtypes)}"


def in_words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def one(shape: Sizes, *dtypes: torch.dtype, optional: bool = False) -> Expected:
    return Expected((shape,), dtypes, optional)


@dataclass(frozen=True, slots=True)
class Format:
    """columns: K is a multiple. joint: joins the names of its tensors to the weight's."""

    columns: ClassVar[int] = 32
    joint: ClassVar[str] = "."

    @property
    def title(self) -> str:
        """Its name in messages."""
        raise NotImplementedError

    def tensors(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        """The tensors of a weight [N, K]. Raises UnsupportedModelError where no weight of this shape has the format."""
        raise NotImplementedError

    def repack(self, tensors: Tensors, shape: torch.Size) -> PackedWeight:
        """Tensors that were compared -> the weight. Raises UnsupportedModelError where values break the promise."""
        raise NotImplementedError

    def canonical(self, names: Iterable[str]) -> dict[str, str]:
        """Name in the checkpoint -> name in `tensors`."""
        return {name: name for name in names}

    def compare(
        self, stem: str, given: Mapping[str, Described], shape: torch.Size, num_experts: int | None = None
    ) -> None:
        """Raise CheckpointError for a tensor that is lacking, UnsupportedModelError for any other difference.

        stem: what precedes the names. num_experts: each tensor is that of all experts, one after the other."""
        num_rows, num_columns = shape
        leading = () if num_experts is None else (num_experts,)
        if num_columns % self.columns:
            raise UnsupportedModelError(
                f"{stem}: {num_columns} columns, and weights in {self.title} are read in multiples of {self.columns}"
            )
        with about(stem):
            expected = self.tensors(num_rows, num_columns)
        known = self.canonical(given)
        for name in given:
            if known[name] not in expected:
                raise UnsupportedModelError(
                    f"{stem} has {name}, which is not read: a weight in {self.title} has {', '.join(expected)}; "
                    f"{NOT_AS_PROMISED}"
                )
        if len(set(known.values())) < len(known):
            raise UnsupportedModelError(f"{stem} has {' and '.join(sorted(known))}, two names of one thing")
        for name, wanted in expected.items():
            if not wanted.optional and name not in known.values():
                raise CheckpointError(
                    f"the checkpoint lacks {stem}{self.joint}{name}, which a weight in {self.title} has; "
                    f"{NOT_AS_PROMISED}"
                )
        for name, tensor in given.items():
            wanted = expected[known[name]]
            if tensor.dtype not in wanted.dtypes or tensor.shape not in [(*leading, *one) for one in wanted.shapes]:
                of_each = "" if num_experts is None else f" for each of {num_experts} experts"
                raise UnsupportedModelError(
                    f"{stem}{self.joint}{name} is {list(tensor.shape)} in {in_words(tensor.dtype)}, and a weight "
                    f"{list(shape)} in {self.title} has it as {wanted}{of_each}; {NOT_AS_PROMISED}"
                )


def groups_of(num_columns: int, group_size: int | None) -> int:
    """Number of groups of a row; None: the row is one. Raises UnsupportedModelError where they do not fill it."""
    if num_columns % (group_size or num_columns):
        raise UnsupportedModelError(
            f"{num_columns} columns do not divide into groups of {group_size}, which its quantization_config says; "
            "leave this weight out when quantising, or give a checkpoint with a group_size that divides it"
        )
    return num_columns // (group_size or num_columns)


@dataclass(frozen=True, slots=True)
class Int4(Format):
    """group_size: columns with one scale; None: all. symmetric: zeros are 8. in_any_order: `g_idx` must be there, to
    say that the columns of a group are consecutive after all."""

    group_size: int | None
    symmetric: bool
    in_any_order: bool = False

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def title(self) -> str:
        groups = f"in groups of {self.group_size}" if self.group_size else "by row"
        return f"{self.name} {groups}, {'symmetric' if self.symmetric else 'with zeros'}"

    def group(self, num_columns: int) -> int:
        return self.group_size or num_columns


@dataclass(frozen=True, slots=True)
class CompressedInt4(Int4):
    @property
    def name(self) -> str:
        return "compressed-tensors int4"

    def tensors(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        num_groups = groups_of(num_columns, self.group_size)
        zeros = one((-(-num_rows // 8), num_groups), torch.int32, optional=self.symmetric)
        return {
            "weight_packed": one((num_rows, num_columns // 8), torch.int32),
            "weight_scale": one((num_rows, num_groups), *SCALE_TYPES),
            "weight_zero_point": zeros,
            "weight_shape": one((2,), *INDEX_TYPES, optional=True),
            "weight_g_idx": one((num_columns,), *INDEX_TYPES, optional=not self.in_any_order),
        }

    def repack(self, tensors: Tensors, shape: torch.Size) -> PackedWeight:
        return repack_compressed(tensors, shape, self.group(shape[1]), symmetric=self.symmetric)


@dataclass(frozen=True, slots=True)
class _Int4InColumns(Int4):
    """Words of zeros lie along N, so it fills them."""

    def tensors(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        if num_rows % 8:
            raise UnsupportedModelError(f"{num_rows} rows, and weights in {self.title} are read in multiples of 8")
        num_groups = groups_of(num_columns, self.group_size)
        return {
            "qweight": one(self._words(num_rows, num_columns), torch.int32),
            "qzeros": one((num_groups, num_rows // 8), torch.int32),
            "scales": one((num_groups, num_rows), *SCALE_TYPES),
        }

    def _words(self, num_rows: int, num_columns: int) -> Sizes:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Gptq(_Int4InColumns):
    """version: 1 stores zeros less one."""

    version: int = 1

    @property
    def name(self) -> str:
        return f"GPTQ v{self.version}"

    def tensors(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        g_idx = one((num_columns,), *INDEX_TYPES, optional=not self.in_any_order)
        return {**_Int4InColumns.tensors(self, num_rows, num_columns), "g_idx": g_idx}

    def _words(self, num_rows: int, num_columns: int) -> Sizes:
        return (num_columns // 8, num_rows)

    def repack(self, tensors: Tensors, shape: torch.Size) -> PackedWeight:
        less = 1 if self.version == 1 else 0
        return repack_gptq(tensors, self.group(shape[1]), less=less, symmetric=self.symmetric)


@dataclass(frozen=True, slots=True)
class Awq(_Int4InColumns):
    @property
    def name(self) -> str:
        return "AWQ"

    def _words(self, num_rows: int, num_columns: int) -> Sizes:
        return (num_columns, num_rows // 8)

    def repack(self, tensors: Tensors, shape: torch.Size) -> PackedWeight:
        return repack_awq(tensors, self.group(shape[1]), symmetric=self.symmetric)


Tile = tuple[int | None, int | None]
"""Rows and columns with one scale; None: all."""


@dataclass(frozen=True, slots=True)
class Fp8(Format):
    """tiles: those that the config allows; the shape of the scales says which. scales: their names, for one thing:
    either is multiplied by."""

    tiles: tuple[Tile, ...]
    scales: tuple[str, ...] = ("weight_scale",)

    columns: ClassVar[int] = 16

    @property
    def title(self) -> str:
        return f"FP8 {' or '.join(_tile_in_words(*tile) for tile in self.tiles)}"

    def tensors(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        shapes: list[Sizes] = []
        for rows, columns in self.tiles:
            if rows == 1 and columns is not None:
                groups_of(num_columns, columns)
            sizes = -(-num_rows // (rows or num_rows)), -(-num_columns // (columns or num_columns))
            shapes.append(sizes)
            if columns is None:
                shapes += [(), (1,)] if rows is None else [sizes[:1]]
        return {
            "weight": one((num_rows, num_columns), torch.float8_e4m3fn),
            self.scales[0]: Expected(tuple(dict.fromkeys(shapes)), SCALE_TYPES),
        }

    def canonical(self, names: Iterable[str]) -> dict[str, str]:
        return {name: self.scales[0] if name in self.scales else name for name in names}

    def repack(self, tensors: Tensors, shape: torch.Size) -> PackedWeight:
        [scales] = (tensors[name] for name in self.scales if name in tensors)
        num_rows, num_columns = shape
        for rows, columns in self.tiles:
            each = rows or num_rows, columns or num_columns
            if scales.numel() == math.ceil(num_rows / each[0]) * math.ceil(num_columns / each[1]):
                return repack_fp8(tensors["weight"], scales, each)
        raise AssertionError(f"{scales.shape=} was not compared with {self.title}")


def _tile_in_words(rows: int | None, columns: int | None) -> str:
    if columns is None:
        return "by tensor" if rows is None else "by channel"
    return f"in groups of {columns}" if rows == 1 else f"in blocks of {rows} x {columns}"


BY_TENSOR: Tile = (None, None)
BY_CHANNEL: Tile = (1, None)


@dataclass(frozen=True, slots=True)
class CompressedMxfp4(Format):
    @property
    def title(self) -> str:
        return "compressed-tensors MXFP4"

    def tensors(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        return {
            "weight_packed": one((num_rows, num_columns // 2), torch.uint8),
            "weight_scale": one((num_rows, num_columns // 32), torch.uint8),
        }

    def repack(self, tensors: Tensors, shape: torch.Size) -> PackedWeight:
        return repack_mxfp4(tensors["weight_packed"], tensors["weight_scale"])


@dataclass(frozen=True, slots=True)
class GptOssMxfp4(Format):
    joint: ClassVar[str] = "_"

    @property
    def title(self) -> str:
        return "MXFP4"

    def tensors(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        return {
            "blocks": one((num_rows, num_columns // 32, 16), torch.uint8),
            "scales": one((num_rows, num_columns // 32), torch.uint8),
        }

    def repack(self, tensors: Tensors, shape: torch.Size) -> PackedWeight:
        return repack_mxfp4(tensors["blocks"], tensors["scales"])
