"""The formats of quantised weights that are read, a row a format, and which of them a checkpoint's config says.

A row says which tensors stand in the place of a linear's `weight`, which shapes they have, and what repacks them. Which
modules are quantised is read from the names of the tensors. Activations are never rounded here: a checkpoint whose
activations were to be rounded as they come (`dynamic`) is read for its weights, one with calibrated scales for them is
refused. To read another format: a function in `repack.py`, a row here, and its name in `READ`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

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


ALLOWED = (
    "read are int4 weights of compressed-tensors, GPTQ and AWQ, FP8 weights by channel, tensor or block, and MXFP4 "
    "weights of compressed-tensors and GPT-OSS; give such a checkpoint, or the one that this was made from"
)

REFUSED = ("nvfp4", "modelopt", "exl2", "exl3", "gguf")
"""Methods that are refused by name, though some are known to transformers."""

Config = Mapping[str, Any]


def formats_of(config: Config) -> tuple[Format, ...] | None:
    """The formats that the weights of a `quantization_config` may have; None: transformers loads it, unfused.

    Raises UnsupportedModelError, in one sentence, for what neither reads.
    """
    method = str(config.get("quant_method", ""))
    if method in READ:
        return READ[method](config)
    plain = config.get("load_in_4bit") or config.get("load_in_8bit")  # of bitsandbytes, which may name no method
    if method in REFUSED or not (plain or method in AUTO_QUANTIZATION_CONFIG_MAPPING or method == "bitsandbytes"):
        raise _unread(f"quant_method {method or 'missing'}")
    return None


def _unread(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"its quantization is not read ({what}); {ALLOWED}")


def _compressed_tensors(config: Config) -> tuple[Format, ...]:
    if config.get("transform_config"):
        raise _unread("compressed-tensors with transforms of activations")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _unread(f"compressed-tensors, sparse: {config['sparsity_config']['format']}")
    found: dict[str, Format] = {}
    for group in (config.get("config_groups") or {}).values():
        weights, inputs, outputs = (group.get(name) for name in ("weights", "input_activations", "output_activations"))
        if not weights:
            raise _unread("compressed-tensors without quantised weights")
        kind = f"{weights.get('num_bits')} bits, {weights.get('type', 'int')}"
        if outputs or (inputs and not inputs.get("dynamic")):
            raise _unread(f"compressed-tensors, {kind}, activations in calibrated scales")
        if kind == "4 bits, int":
            format = COMPRESSED_INT4
        elif kind == "8 bits, float":
            rows, columns = weights.get("block_structure") or (0, 0)
            format = fp8((rows, columns) if weights.get("strategy") == "block" else None)
        elif kind == "4 bits, float" and (group.get("format") or config.get("format")) == "mxfp4-pack-quantized":
            format = COMPRESSED_MXFP4
        else:
            raise _unread(f"compressed-tensors, {kind}, {group.get('format') or config.get('format')}")
        found[format.title] = format
    if len({(format.tensors, format.dtype) for format in found.values()}) != len(found) or not found:
        raise _unread("compressed-tensors with FP8 weights in blocks and in rows" if found else "no config_groups")
    return tuple(found.values())


def _fp8(config: Config) -> tuple[Format, ...]:
    if config.get("activation_scheme", "dynamic") != "dynamic":
        raise _unread(f"fp8, activations in calibrated scales: {config['activation_scheme']}")
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unread(f"fp8 in {config['fmt']}")
    rows, columns = config.get("weight_block_size") or (0, 0)
    return (fp8((rows, columns) if rows else None),)


def _gptq(config: Config) -> tuple[Format, ...]:
    if config.get("bits") != 4:
        raise _unread(f"GPTQ in {config.get('bits')} bits")
    version = {"gptq": 1, "gptq_v2": 2}.get(str(config.get("checkpoint_format") or config.get("format") or "gptq"))
    if version is None:
        raise _unread(f"GPTQ stored as {config.get('checkpoint_format') or config.get('format')}")
    return (gptq(version, symmetric=bool(config.get("sym", True))),)


def _awq(config: Config) -> tuple[Format, ...]:
    bits = config.get("bits", config.get("w_bit"))
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if bits != 4 or version != "gemm":
        raise _unread(f"AWQ in {bits} bits, {version}")
    return (AWQ,)


READ: dict[str, Callable[[Config], tuple[Format, ...]]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": lambda config: (MXFP4,),
}
"""quant_method -> what reads its config."""
