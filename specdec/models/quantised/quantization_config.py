"""Reads a checkpoint's `quantization_config`: the format that it promises for each module.

Malformed entries raise CheckpointError; methods and settings that are not supported raise UnsupportedModelError, each
in one sentence. To support another format, add a class or a layout to `formats.py` and a function to `READ`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from specdec.errors import CheckpointError, UnsupportedModelError, shown
from specdec.models.quantised.formats import (
    AWQ,
    BY_CHANNEL,
    BY_TENSOR,
    COMPRESSED_INT4,
    GPTQ_V1,
    GPTQ_V2,
    Fp8,
    Int4,
    Mxfp4,
    Tile,
    WeightFormat,
)

ALLOWED = (
    "read are int4 weights of compressed-tensors, GPTQ, AWQ and AutoRound, FP8 weights by channel, tensor or block, "
    "and MXFP4 weights of compressed-tensors and GPT-OSS; give such a checkpoint, or the one that this was made from"
)

REFUSED = ("nvfp4", "modelopt", "exl2", "exl3", "gguf")
"""Methods that are refused although transformers knows some of them."""

T = TypeVar("T", str, bool, int)
KINDS = {str: "a string", bool: "true or false", int: "a whole number"}

ANY_MODULE = "Linear"
"""compressed-tensors' target for every module: it names the class, and only nn.Linear is ever quantised."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The rules of a `quantization_config`. Its list of unquantised modules is not read: the tensors show them.

    rules: (target, format); the first target that matches a module counts. A target is a module's name, "re:" and a
    pattern for the beginning of a name, or ANY_MODULE. renamed: names in the checkpoint by names in the model, for
    modules that are loaded under other names.
    """

    rules: tuple[tuple[str, WeightFormat], ...]
    renamed: Mapping[str, str] = field(default_factory=dict)

    def format_of(self, *names: str) -> WeightFormat:
        """The format of a quantised module, found by its names in the checkpoint and in the model.

        A config with only one format promises it for all modules, since names may have changed since it was written.
        Raises UnsupportedModelError if there are several formats and no target matches.
        """
        names = tuple(self.renamed.get(name, name) for name in names)
        for target, format in self.rules:
            if _names(target, names):
                return format
        first, *others = dict.fromkeys(format for _, format in self.rules)
        if others:
            raise UnsupportedModelError(
                f"{names[0]} is quantised, and no target of its quantization_config names it, which has "
                f"{' and '.join(format.title for format in (first, *others))}; correct the targets"
            )
        return first


def _names(target: str, names: Iterable[str]) -> bool:
    if target.startswith("re:"):
        return any(re.match(target.removeprefix("re:"), name) for name in names)
    return target == ANY_MODULE or target in names


@dataclass(frozen=True, slots=True)
class Settings:
    """A part of the config. An entry of another type than asked for raises CheckpointError; null counts as missing."""

    path: str
    values: Mapping[str, Any]

    @classmethod
    def from_json(cls, path: str, values: object) -> "Settings":
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{path} is {shown(values)}, expected an object")
        return cls(path, values)

    def part(self, name: str) -> "Settings":
        value = self.values.get(name)
        return Settings.from_json(f"{self.path}.{name}", {} if value is None else value)

    def get(self, *names: str, default: T) -> T:
        """The first of these entries that exists, of the default's type; text in lower case."""
        for name in names:
            value = self.values.get(name)
            value = value.lower() if isinstance(value, str) else value
            if value is not None and type(value) is not type(default):
                raise self.wrong(name, KINDS[type(default)])
            if value is not None:
                return value
        return default

    def group_size(self, *names: str, default: int) -> int | None:
        """Columns per group; None (stored as -1): a whole row."""
        size = self.get(*names, default=default)
        if size != -1 and size < 1:
            raise self.wrong(next(name for name in names if name in self.values), "a whole number above 0, or -1")
        return None if size == -1 else size

    def block(self, name: str) -> tuple[int, int] | None:
        """(rows, columns) of a block; older versions of compressed-tensors write "128x128"."""
        value = self.values.get(name)
        if value is None:
            return None
        sizes = [int(size) for size in value.split("x") if size.isdigit()] if isinstance(value, str) else value
        if not isinstance(sizes, (list, tuple)) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
            raise self.wrong(name, "two whole numbers above 0")
        return sizes[0], sizes[1]

    def targets(self, name: str) -> tuple[str, ...]:
        value = self.values.get(name)
        value = [] if value is None else value
        if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
            raise self.wrong(name, "a list of names")
        for pattern in value:
            if pattern.startswith("re:"):
                self.require_pattern(name, pattern.removeprefix("re:"))
        return tuple(value)

    def require_pattern(self, name: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise self.wrong(name, f"patterns that can be read ({error})") from error

    def wrong(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}.{name} is {shown(self.values.get(name))}, expected {expected}")


def stored_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config` of a config.json, which may be in a part such as `text_config`; None: there is none.
    Older versions of compressed-tensors call it `compression_config`."""
    for part in filter(lambda part: isinstance(part, Mapping), (config, *config.values())):
        if (given := part.get("quantization_config")) is not None:
            return Settings.from_json("quantization_config", given).values
        if (given := part.get("compression_config")) is not None:
            return {**Settings.from_json("compression_config", given).values, "quant_method": "compressed-tensors"}
    return None


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """The rules of a `quantization_config`; None: transformers loads such checkpoints, and their layers run unfused.

    Raises UnsupportedModelError if neither supports it, and CheckpointError if it is malformed.
    """
    settings = Settings.from_json("quantization_config", config)
    method = settings.get("quant_method", default="")
    if method in READ:
        return READ[method](settings)
    plain = config.get("load_in_4bit") or config.get("load_in_8bit")  # bitsandbytes may name no method
    if method in REFUSED or not (plain or method in AUTO_QUANTIZATION_CONFIG_MAPPING or method == "bitsandbytes"):
        raise _unread(f"quant_method {method or 'missing'}")
    return None


def _unread(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"its quantization is not read ({what}); {ALLOWED}")


def _compressed_tensors(config: Settings) -> Quantization:
    if config.part("transform_config").values:
        raise _unread("compressed-tensors with transforms of activations")
    sparsity = config.part("sparsity_config").get("format", default="dense")
    if sparsity != "dense":
        raise _unread(f"compressed-tensors, sparse: {sparsity}")
    rules = []
    groups = config.part("config_groups")
    for group in map(groups.part, groups.values):
        format = _compressed_format(group, group.get("format", default="") or config.get("format", default=""))
        rules += [(target, format) for target in group.targets("targets") or (ANY_MODULE,)]
    if not rules:
        raise _unread("no config_groups")
    # in compressed-tensors' order: names, then patterns, then classes
    rules.sort(key=lambda rule: (rule[0] == ANY_MODULE, rule[0].startswith("re:"), rule[0]))
    return Quantization(tuple(rules))


def _compressed_format(group: Settings, layout: str) -> WeightFormat:
    if group.values.get("weights") is None:
        raise _unread("compressed-tensors without quantised weights")
    weights, inputs = group.part("weights"), group.part("input_activations")
    kind = f"{weights.get('num_bits', default=8)} bits, {weights.get('type', default='int')}"
    if group.part("output_activations").values or (inputs.values and inputs.values.get("dynamic") is not True):
        raise _unread(f"compressed-tensors, {kind}, activations in calibrated scales")
    symmetric, block = weights.get("symmetric", default=True), weights.block("block_structure")
    size = weights.group_size("group_size", default=-1)
    given = weights.values.get("group_size")
    default = "group" if size else "tensor" if given is None else "channel"
    strategy = weights.get("strategy", default=default)
    grouped = strategy in ("group", "tensor_group")
    if grouped != (size is not None):
        expected = "a whole number above 0" if grouped else "null"
        raise weights.wrong("group_size", f"{expected}, as its strategy is {strategy}")
    if strategy == "block" and block is None:
        raise weights.wrong("block_structure", "two whole numbers above 0, as its strategy is block")
    about = f"compressed-tensors, {kind}, strategy {strategy}"
    if kind == "4 bits, int" and strategy in ("group", "channel"):
        order = weights.values.get("actorder")
        if not isinstance(order, bool):  # the name of an order
            order = weights.get("actorder", default="") in ("group", "dynamic")
        return Int4(COMPRESSED_INT4, size, symmetric, in_any_order=order)
    if kind == "8 bits, float" and not symmetric:
        raise _unread(f"{about}, with zeros")
    tiles: dict[str, Tile] = {"tensor": BY_TENSOR, "channel": BY_CHANNEL, "group": (1, size), "block": block or (0, 0)}
    if kind == "8 bits, float" and strategy in tiles:
        return Fp8((tiles[strategy],))
    if kind == "4 bits, float" and layout == "mxfp4-pack-quantized" and size == 32:
        return Mxfp4(of_experts=False)
    raise _unread(f"compressed-tensors, {kind}, {layout}" if kind not in ("4 bits, int", "8 bits, float") else about)


def _fp8(config: Settings) -> Quantization:
    scheme, layout = config.get("activation_scheme", default="dynamic"), config.get("fmt", default="e4m3")
    if scheme != "dynamic":
        raise _unread(f"fp8, activations in calibrated scales: {scheme}")
    if layout not in ("e4m3", "float8_e4m3fn"):
        raise _unread(f"fp8 in {layout}")
    block = config.block("weight_block_size")
    tiles: tuple[Tile, ...] = (block,) if block else (BY_TENSOR, BY_CHANNEL)  # the config does not say which
    return _for_all(Fp8(tiles, ("weight_scale_inv", "weight_scale")))


def _for_all(format: WeightFormat) -> Quantization:
    return Quantization(((ANY_MODULE, format),))


def _gptq(config: Settings) -> Quantization:
    """`dynamic` maps patterns for the beginnings of names to settings; "-:" marks modules that are not quantised."""
    rules: list[tuple[str, WeightFormat]] = []
    for pattern, changes in config.part("dynamic").values.items():
        if pattern.startswith("-:"):
            continue
        target = pattern.removeprefix("+:")
        config.require_pattern("dynamic", target)
        changed = Settings.from_json(f"{config.path}.dynamic.{pattern}", changes)
        rules.append((f"re:{target}", _gptq_format(Settings(changed.path, {**config.values, **changed.values}))))
    return Quantization((*rules, (ANY_MODULE, _gptq_format(config))))


def _gptq_format(config: Settings) -> WeightFormat:
    bits, layout = config.get("bits", default=0), config.get("checkpoint_format", "format", default="gptq")
    words = config.get("pack_dtype", default="int32")
    if bits != 4:
        raise _unread(f"GPTQ in {bits or 'no'} bits")
    if layout not in ("gptq", "gptq_v2"):
        raise _unread(f"GPTQ stored as {layout}")
    if words != "int32":
        raise _unread(f"GPTQ packed in {words}")
    return Int4(
        GPTQ_V1 if layout == "gptq" else GPTQ_V2,
        config.group_size("group_size", default=128),
        config.get("sym", default=True),
        in_any_order=config.get("desc_act", default=False),
    )


def _awq_format(config: Settings) -> WeightFormat:
    bits, layout = config.get("bits", "w_bit", default=0), config.get("version", "format", default="gemm")
    if config.get("backend", default="") == "llm-awq":
        layout = "llm-awq"
    if bits != 4 or layout != "gemm":
        raise _unread(f"AWQ in {bits or 'no'} bits, {layout}")
    size = config.group_size("group_size", "q_group_size", default=128)
    return Int4(AWQ, size, symmetric=not config.get("zero_point", default=True))


def _auto_round(config: Settings) -> Quantization:
    """`extra_config` maps names of modules, or patterns in them, to settings; modules of 16 bits are not quantised."""
    packing, kind = config.get("packing_format", default="missing"), config.get("data_type", default="int")
    if packing not in AUTO_ROUND or kind != "int" or config.get("act_bits", default=16) != 16:
        raise _unread(f"AutoRound, {kind}, packing_format {packing}, act_bits {config.values.get('act_bits', 16)}")

    def format_of(settings: Settings) -> WeightFormat:
        asymmetric = not settings.get("sym", default=True)
        return AUTO_ROUND[packing](Settings(settings.path, {**settings.values, "zero_point": asymmetric}))

    rules: list[tuple[str, WeightFormat]] = []
    for name, changes in config.part("extra_config").values.items():
        changed = Settings.from_json(f"{config.path}.extra_config.{name}", changes)
        changed = Settings(changed.path, {**config.values, **changed.values})
        if changed.get("bits", default=0) >= 16:
            continue
        is_pattern = not re.fullmatch(r"[\w.]+", name)
        if is_pattern:
            config.require_pattern("extra_config", name)
        rules.append((f"re:.*(?:{name})" if is_pattern else name, format_of(changed)))
    return Quantization((*rules, (ANY_MODULE, format_of(config))))


AUTO_ROUND = {"auto_round:auto_gptq": _gptq_format, "auto_round:auto_awq": _awq_format}
"""AutoRound's packing_format -> function that reads the settings of a weight."""

READ: dict[str, Callable[[Settings], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": lambda config: _for_all(_awq_format(config)),
    "auto-round": _auto_round,
    "mxfp4": lambda config: _for_all(Mxfp4(of_experts=True)),
}
"""quant_method -> function that reads its config."""
