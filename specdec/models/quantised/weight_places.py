"""The quantised weights of a checkpoint: their tensors by the headers of its files, and how these get into a model.

A weight is placed by the name that transformers would give its plain `weight`, so renamed and prefixed checkpoints,
and those of older layouts, need nothing of their own. Experts may be stored one by one, or as tensors of all of them.
"""

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)

from specdec.errors import CheckpointError, UnsupportedModelError
from specdec.layers.moe.moe_families import EXPERT_CLASSES
from specdec.models.quantised.formats import Format

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""As safetensors names them."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, not read yet."""

    key: str
    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        with safe_open(self.file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.key)
        return tensor

    def on_meta(self, *leading: int) -> torch.Tensor:
        return torch.empty((*leading, *self.shape), dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised weight: what precedes the names of its tensors, and these by name."""

    stem: str
    format: Format
    tensors: Mapping[str, StoredTensor]


def stored_tensors(files: Iterable[str]) -> dict[str, StoredTensor]:
    """By key, in the order of the files. Raises CheckpointError for files that are no safetensors."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise CheckpointError(f"{Path(file).name} is no safetensors file; packed weights are read from no other")
        with Path(file).open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for key, entry in header.items():
            if key != "__metadata__" and entry["dtype"] in DTYPES:
                stored[key] = StoredTensor(key, file, tuple(entry["shape"]), DTYPES[entry["dtype"]])
    return stored


def stored_weights(stored: Mapping[str, StoredTensor], formats: Iterable[Format]) -> list[StoredWeight]:
    """The quantised weights. Raises UnsupportedModelError where one has a tensor that its format does not know, and
    CheckpointError where one lacks a tensor."""
    found = []
    for format in formats:
        by_stem: dict[str, dict[str, StoredTensor]] = {}
        for key, tensor in stored.items():
            stem, _, name = key.rpartition(format.joint)
            by_stem.setdefault(stem, {})[name] = tensor
        marker = format.tensors[0]
        for stem, tensors in by_stem.items():
            if marker not in tensors or tensors[marker].dtype != format.dtype:
                continue
            tensors.pop("bias", None)
            unknown = sorted(set(tensors) - {*format.tensors, *format.optional})
            if unknown:
                raise UnsupportedModelError(
                    f"{stem} has {unknown[0]}, which is not read: a weight in {format.title} has "
                    f"{', '.join((*format.tensors, *format.optional))}"
                )
            if lacking := [name for name in format.tensors if name not in tensors]:
                raise CheckpointError(f"the checkpoint lacks {stem}{format.joint}{lacking[0]}")
            found.append(StoredWeight(stem, format, tensors))
    return found


OF_ONE_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<name>gate_proj|up_proj|down_proj|w1|w2|w3)")
PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class WeightPlaces:
    """linears and experts: by the path of the module, which is in `modules`."""

    def __init__(self, model: PreTrainedModel, conversions: list[WeightTransform]) -> None:
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.linears: dict[str, StoredWeight] = {}
        self.experts: dict[str, dict[str, StoredWeight]] = {}  # one for all experts, the first that was found
        self.stacked: set[str] = set()  # of these the checkpoint has tensors of all experts
        self._names = _renaming(model, conversions)
        self._known = set(model.state_dict())
        self._stacks: dict[tuple[str, str], set[str]] = {}  # (in the checkpoint, in the model) -> names of tensors
        self._joints: dict[str, set[str]] = {}

    def find(self, weight: StoredWeight) -> None:
        one = OF_ONE_EXPERT.fullmatch(weight.stem)
        plain = [weight.stem if weight.format.joint == "_" else f"{weight.stem}.weight"]
        if one:  # stacked in the model, or modules as in the checkpoint
            plain.insert(0, f"{one['experts']}.gate_up_proj")
        name = next((name for name in map(self._names, plain) if name in self._known), None)
        if name is None:
            return  # a part that this class does not have; transformers lists it as unused
        path, _, last = name.rpartition(".")
        module = self.modules[path]
        if isinstance(module, EXPERT_CLASSES):
            self._find_experts(path, last, weight, one)
        elif type(module) is nn.Linear and last == "weight":
            self.linears[path] = weight
        else:
            raise UnsupportedModelError(
                f"{weight.stem} is quantised, and it is the {last} of a {type(module).__name__}; quantised weights are "
                f"read of nn.Linear and of {', '.join(known.__name__ for known in EXPERT_CLASSES)}"
            )

    def _find_experts(self, path: str, last: str, weight: StoredWeight, one: re.Match[str] | None) -> None:
        if one is None:
            self.stacked.add(path)
            self._joints.setdefault(last, set()).update(weight.tensors)
        else:
            last = PROJECTIONS.get(one["name"], one["name"])
            self._stacks.setdefault((one["name"], last), set()).update(weight.tensors)
        self.experts.setdefault(path, {}).setdefault(last, weight)

    def require_apart(self) -> None:
        """Raise UnsupportedModelError where experts that are quantised and others that are not have tensors of the same
        names, since one rule stacks either."""
        plain = [path for path, module in self.modules.items() if isinstance(module, EXPERT_CLASSES)]
        plain = [path for path in plain if path not in self.experts]
        if plain and any("weight" in names for names in self._stacks.values()):
            raise UnsupportedModelError(
                f"{plain[0]} is not quantised, and {next(iter(self.experts))} is; experts in FP8 are read where all are"
            )

    def conversions(self) -> Iterable[WeightTransform]:
        """How the tensors of experts get into their raw modules."""
        for (stored, last), names in self._stacks.items():
            for name in sorted(names):
                yield WeightConverter(
                    rf"\.experts\.\d+\.{stored}\.{name}$", f".experts.{last}.{name}", operations=[MergeModulelist()]
                )
        for last, names in self._joints.items():
            for name in sorted(names):
                yield WeightRenaming(rf"\.experts\.{last}_{name}$", f".experts.{last}.{name}")


def _renaming(model: PreTrainedModel, conversions: list[WeightTransform]) -> Callable[[str], str]:
    """The name in the model of a key of the checkpoint, as transformers finds it."""
    conversions = copy.deepcopy(conversions)  # they note whether they were used
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    known = model.state_dict()

    def name(key: str) -> str:
        renamed, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        return str(key if renamed not in known and key in known else renamed)

    return name
