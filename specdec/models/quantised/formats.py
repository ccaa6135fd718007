"""The formats of quantised weights that are read: one table, a row a format.

A row says which tensors stand in the place of a linear's `weight`, which shapes they have, and what repacks them. To
read another format: a function in `repack.py`, a row here, and its name in `recognise.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from specdec.errors import UnsupportedModelError
from specdec.layers.packed.packed_weight import PackedWeight
from specdec.models.quantised.repack import (
    FP8_SCALES,
    Tensors,
    fp8_extents,
    repack_awq,
    repack_compressed,
    repack_fp8,
    repack_gptq,
    repack_mxfp4,
    two_dimensional,
)

SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
Shapes = Callable[[int, int, int], dict[str, tuple[int, ...]]]
"""The shape of each tensor of a weight with N rows, K columns and S groups."""


@dataclass(frozen=True, slots=True)
class Format:
    """title: what messages call it. tensors: those that a weight must have; the first, in `dtype`, is what tells a
    quantised weight from a plain one. optional: those that it may have. columns: K is a multiple.
    group: of the tensors and the shape of a weight, columns with one scale; raises UnsupportedModelError where they do
    not fit. Tensors on the meta device will do. joint: what joins their names to the weight's."""

    title: str
    tensors: tuple[str, ...]
    dtype: torch.dtype
    columns: int
    group: Callable[[Tensors, torch.Size], int]
    repack: Callable[[Tensors, torch.Size, int], PackedWeight]
    optional: tuple[str, ...] = ()
    joint: str = "."


def _group(shapes: Shapes, scales: str, axis: int) -> Callable[[Tensors, torch.Size], int]:
    """group: from the number of groups that `scales` has along `axis`."""

    def group(tensors: Tensors, shape: torch.Size) -> int:
        num_rows, num_columns = shape
        given = tensors[scales]
        num_groups = given.shape[axis] if given.dim() == 2 else 0
        if not num_groups or num_columns % num_groups:
            raise UnsupportedModelError(f"{num_columns} columns do not divide into the groups of {scales}")
        expected = shapes(num_rows, num_columns, num_groups)
        for name, tensor in tensors.items():
            if name in expected and tuple(tensor.shape) != expected[name]:
                raise UnsupportedModelError(f"{name} is {list(tensor.shape)}, expected {list(expected[name])}")
        return num_columns // num_groups

    return group


def _fp8_group(tensors: Tensors, shape: torch.Size, *, block: tuple[int, int] | None = None) -> int:
    given = [name for name in FP8_SCALES if name in tensors]
    if len(given) != 1:
        raise UnsupportedModelError(f"{' and '.join(given) or 'no scale'} beside weight, expected one scale")
    scales = two_dimensional(tensors[given[0]]).shape
    rows, columns = fp8_extents(scales, shape, block)
    expected = torch.Size((-(-shape[0] // rows), -(-shape[1] // columns)))
    if scales != expected or tensors["weight"].shape != shape:
        raise UnsupportedModelError(
            f"{given[0]} is {list(tensors[given[0]].shape)} for a weight of {list(shape)}"
            f"{f' in blocks of {list(block)}' if block else ''}, expected one scale, or one a row"
            f"{' or a block' if block else ''}"
        )
    return math.gcd(columns, shape[1])


def fp8(block: tuple[int, int] | None) -> Format:
    """block: rows and columns that share a scale; None: one scale, or one a row."""
    return Format(
        title="FP8" if block is None else f"FP8 in blocks of {block[0]} x {block[1]}",
        tensors=("weight",),
        optional=FP8_SCALES,
        dtype=torch.float8_e4m3fn,
        columns=16,
        group=partial(_fp8_group, block=block),
        repack=partial(repack_fp8, block=block),
    )


COMPRESSED_INT4 = Format(
    title="compressed-tensors int4",
    tensors=("weight_packed", "weight_scale"),
    optional=("weight_shape", "weight_zero_point"),
    dtype=torch.int32,
    columns=32,
    group=_group(
        lambda n, k, s: {"weight_packed": (n, k // 8), "weight_scale": (n, s), "weight_zero_point": (-(-n // 8), s)},
        "weight_scale",
        axis=1,
    ),
    repack=repack_compressed,
)


def gptq(version: int, symmetric: bool) -> Format:
    """version: 1 stores zeros less one. symmetric: zeros are 8."""
    return Format(
        title=f"GPTQ v{version}",
        tensors=("qweight", "qzeros", "scales"),
        optional=("g_idx",),
        dtype=torch.int32,
        columns=32,
        group=_group(
            lambda n, k, s: {"qweight": (k // 8, n), "qzeros": (s, n // 8), "scales": (s, n), "g_idx": (k,)},
            "scales",
            axis=0,
        ),
        repack=partial(repack_gptq, less=1 if version == 1 else 0, symmetric=symmetric),
    )


AWQ = Format(
    title="AWQ",
    tensors=("qweight", "qzeros", "scales"),
    dtype=torch.int32,
    columns=32,
    group=_group(
        lambda n, k, s: {"qweight": (k, n // 8), "qzeros": (s, n // 8), "scales": (s, n)},
        "scales",
        axis=0,
    ),
    repack=repack_awq,
)

COMPRESSED_MXFP4 = Format(
    title="compressed-tensors MXFP4",
    tensors=("weight_packed", "weight_scale"),
    dtype=torch.uint8,
    columns=32,
    group=_group(lambda n, k, s: {"weight_packed": (n, k // 2), "weight_scale": (n, k // 32)}, "weight_scale", axis=1),
    repack=partial(repack_mxfp4, names=("weight_packed", "weight_scale")),
)

MXFP4 = Format(
    title="MXFP4",
    tensors=("blocks", "scales"),
    dtype=torch.uint8,
    columns=32,
    group=_group(lambda n, k, s: {"blocks": (n, k // 32, 16), "scales": (n, k // 32)}, "scales", axis=1),
    repack=repack_mxfp4,
    joint="_",
)
