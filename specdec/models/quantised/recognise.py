"""What the `quantization_config` of a checkpoint says: which formats its tensors may have, or why it is not read.

Which modules are quantised is read from the names of the tensors. Activations are never rounded here: a checkpoint
whose activations were to be rounded as they come (`dynamic`) is read for its weights, one with calibrated scales for
them is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from specdec.errors import UnsupportedModelError
from specdec.models.quantised.formats import AWQ, COMPRESSED_INT4, COMPRESSED_MXFP4, MXFP4, Format, fp8, gptq

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
