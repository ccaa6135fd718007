"""Finds the place of each quantised weight of a checkpoint in the model.

transformers' own renaming of a plain `weight` gives the place, so renamed and prefixed checkpoints and older layouts
need no code here. Experts may be stored one by one, or as tensors that hold all of them.
"""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)

from specdec.errors import UnsupportedModelError
from specdec.layers.description.moe_families import MIXTURES, experts_of, mixture_of
from specdec.layers.moe.experts import Experts
from specdec.models.quantised.formats import WeightFormat, dtype_name

OF_ONE_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<name>gate_proj|up_proj|down_proj|w1|w2|w3)")
PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """The parameter `last` of the module at `path`, or a projection of its experts.

    shape: [N, K] of the weight of a linear layer or of one expert; None: packed weights are not supported there.
    num_experts: number of the module's experts; None: it has none. number: index of the expert if the checkpoint stores
    experts one by one; None: it does not."""

    path: str
    last: str
    shape: torch.Size | None
    num_experts: int | None = None
    number: int | None = None

    @property
    def num_stacked(self) -> int | None:
        """Number of experts in one tensor of the checkpoint; None: one weight each."""
        return self.num_experts if self.number is None else None


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised weight: its name in the checkpoint (stem), its tensors by the rest of their keys, and its place."""

    stem: str
    format: WeightFormat
    tensors: Mapping[str, torch.Tensor]
    place: WeightPlace

    @property
    def types(self) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def described(self) -> str:
        each = (f"{name} in {dtype_name(dtype)}" for name, dtype in sorted(self.types.items()))
        return f"{self.format.title} ({', '.join(each)})"


class WeightPlaces:
    """The quantised weights of a model.

    modules: all modules of the model by path. linears: quantised weight of each linear, by module path. experts: for
    each mixture, by projection, one stored weight for all experts or one per expert. descriptions: of the experts by
    path; None: their activation is not known. keys: checkpoint keys of all these
    tensors."""

    def __init__(self, model: PreTrainedModel, conversions: list[WeightTransform]) -> None:
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.linears: dict[str, StoredWeight] = {}
        self.experts: dict[str, dict[str, list[StoredWeight]]] = {}
        self.descriptions: dict[str, Experts | None] = {}
        self.keys: set[str] = set()
        self._prefix = model.base_model_prefix
        self._names = _renaming(model, conversions)
        self._known = model.state_dict()
        self._ignored = model._keys_to_ignore_on_load_unexpected or ()
        tied = model.all_tied_weights_keys
        self._tied = {**tied, **{source: target for target, source in tied.items()}}

    def parameter(self, key: str) -> torch.Tensor | None:
        """The model's parameter for a checkpoint key; None: it has none."""
        return self._known.get(self._names(key))

    def ignores(self, key: str) -> bool:
        """Does the model's class declare that checkpoints may have this tensor and that it is ignored?"""
        return any(re.search(pattern, self._names(key)) for pattern in self._ignored)

    def has_module(self, stem: str) -> bool:
        renamed = self._names(f"{stem}.weight").removesuffix(".weight")
        return any(name in self.modules for name in (stem, *with_and_without(renamed, self._prefix)))

    def find(self, stem: str) -> WeightPlace | None:
        """The place of a weight; None: the model has no such weight."""
        one = OF_ONE_EXPERT.fullmatch(stem)
        plain = [stem, f"{stem}.weight"]
        if one:  # the model may stack experts, or have one module each
            plain.insert(0, f"{one['experts']}.gate_up_proj")
        name = next((name for name in map(self._names, plain) if name in self._known), None)
        if name is None:
            return None
        path, _, last = name.rpartition(".")
        module = self.modules[path]
        if mixture_of(module, "Experts") is not None:
            last = PROJECTIONS.get(one["name"], one["name"]) if one else last
            described = self.descriptions[path] if path in self.descriptions else experts_of(module)
            self.descriptions[path] = described
            shape = None if described is None else _shapes_of(described).get(last)
            num_experts = len(module.gate_up_proj)
            return WeightPlace(path, last, shape, num_experts, int(one["number"]) if one else None)
        is_linear = type(module) is nn.Linear and last == "weight"
        return WeightPlace(path, last, module.weight.shape if is_linear else None)

    def add(self, weight: StoredWeight) -> None:
        """Add a quantised weight. Raises UnsupportedModelError if its place cannot hold one."""
        place = weight.place
        if place.shape is None or (place.num_stacked is not None and weight.format.joint != "_"):
            kind, known = type(self.modules[place.path]).__name__, ", ".join(sorted(MIXTURES))
            raise UnsupportedModelError(
                f"{weight.stem} is quantised, and it is the {place.last} of a {kind}; quantised weights are read of "
                f"nn.Linear and of experts that are stored one by one, of {known}; leave it out when quantising"
            )
        if other := self._tied.get(f"{place.path}.{place.last}"):
            raise UnsupportedModelError(
                f"{weight.stem} is quantised, and the config ties its weight to {other}; set tie_word_embeddings to "
                "false in config.json if the checkpoint has both, or leave it out when quantising"
            )
        self.keys.update(f"{weight.stem}{weight.format.joint}{name}" for name in weight.tensors)
        if place.num_experts is None:
            self.linears[place.path] = weight
            return
        of_all = self.experts.setdefault(place.path, {}).setdefault(place.last, [])
        of_all.append(weight)
        first = of_all[0]
        if (first.format, first.types) != (weight.format, weight.types):
            raise UnsupportedModelError(
                f"{weight.stem} is stored as {weight.described()}, and {first.stem} as {first.described()}; experts of "
                "a layer are read in one format"
            )

    def require_whole(self) -> None:
        """Raise UnsupportedModelError if only some experts of a layer, or only some of their weights, are quantised."""
        for path, by_projection in self.experts.items():
            for last, weights in by_projection.items():
                place = weights[0].place
                if place.num_stacked is None and len(weights) != place.num_experts:
                    raise UnsupportedModelError(
                        f"{path}: {len(weights)} of {place.num_experts} experts have a quantised {last}; experts are "
                        "read where all of a layer are"
                    )
            if set(by_projection) not in ({"gate_up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"}):
                [stem, *_] = (weight.stem for weights in by_projection.values() for weight in weights)
                raise UnsupportedModelError(f"{stem} is quantised, but not all weights of its experts are")


def with_and_without(name: str, prefix: str) -> set[str]:
    """A module's possible names in a model and in its base model."""
    return {name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")}


def _shapes_of(experts: Experts) -> dict[str, torch.Size]:
    """Shape [N, K] of each projection of one expert."""
    _, rows, columns = experts.gate_up.shape
    half = torch.Size((rows // 2, columns))
    whole = {"gate_up_proj": experts.gate_up.shape[1:], "down_proj": experts.down.shape[1:]}
    return {**whole, "gate_proj": half, "up_proj": half}


def _renaming(model: PreTrainedModel, conversions: list[WeightTransform]) -> Callable[[str], str]:
    """A function from checkpoint keys to parameter names, as transformers maps them."""
    conversions = copy.deepcopy(conversions)  # they record whether they were used
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    known = model.state_dict()

    @cache
    def name(key: str) -> str:
        renamed, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        return str(key if renamed not in known and key in known else renamed)

    return name
