"""The quantised weights of a checkpoint: found in the model, and compared with the `quantization_config`.

transformers' own renaming of a plain `weight` gives the place of a weight in the model, so renamed and prefixed
checkpoints and older layouts need no code here. Experts may be stored one by one, or as tensors that hold all of them.

By its name, shape and type each tensor is one of these; any other raises an error with its name:

    plain       a parameter of the model, in 16 bits or more; a module with nothing else is not quantised
    packed      if a module's tensors are not all plain, they must be those of its format, in its shapes and types
    unused      belongs to a module that the model class lacks, such as a vision encoder or MTP heads
    ignorable   matches IGNORABLE, or is a bias of zeros that the class lacks (older GPTQ tools wrote these)

Any other tensor next to a known module whose name ends in scale, zero or bias is an error: the module's values depend
on it.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform, rename_source_key

from specdec.errors import UnsupportedModelError
from specdec.layers.description.moe_families import EXPERTS, experts_of, mixture_of
from specdec.layers.moe.experts import Experts
from specdec.models.quantised.formats import NOT_AS_PROMISED, WeightFormat, dtype_name
from specdec.models.quantised.quantization_config import Quantization

logger = logging.getLogger("specdec")

PLAIN_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

IGNORABLE = re.compile(r"(.+\.)?((k|v|kv)_scale|(k|v)_zero_point|[kv]_proj\.output_scale)")
"""Keys of scales for 8-bit K/V, by their newer names and an older one. They are not read, since they multiply no
weight."""

CHANGES_VALUES = re.compile(r"(scales?(_inv|_\d+)?|SCB|zeros?|zero_points?|bias)$")

OF_ALL_EXPERTS = re.compile(r"(?P<stem>.+\.experts\.\w+)_(?P<name>blocks|scales)")
"""Keys of tensors that hold all experts, in formats whose joint is "_"."""

OF_ONE_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<name>gate_proj|up_proj|down_proj|w1|w2|w3)")
PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """The parameter `last` of the module at `path`, or a projection of its experts.

    shape: [N, K] of the weight of a linear layer or of one expert; None: packed weights are not supported there.
    experts: the module's experts; None: it has none, or their activation is not known. number: index of the expert if
    the checkpoint stores experts one by one; None: it does not."""

    path: str
    last: str
    shape: torch.Size | None
    experts: Experts | None = None
    number: int | None = None

    @property
    def is_ungated(self) -> bool:
        return self.experts is not None and self.experts.activation == "relu2"

    @property
    def num_stacked(self) -> int | None:
        """Number of experts in one tensor of the checkpoint; None: one weight each."""
        return None if self.experts is None or self.number is not None else len(self.experts.gate_up)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised weight: its name in the checkpoint (stem), its tensors by the rest of their keys, and its place."""

    stem: str
    format: WeightFormat
    tensors: Mapping[str, torch.Tensor]
    place: WeightPlace

    @property
    def form(self) -> str:
        each = (f"{name} in {dtype_name(tensor.dtype)}" for name, tensor in sorted(self.tensors.items()))
        return f"{self.format.title} ({', '.join(each)})"


class QuantisedWeights:
    """The quantised weights of a model, found among the tensors of its checkpoint.

    by_module: stored weights by the path of their module, then by parameter or projection: one weight, or one for each
    expert. keys: checkpoint keys of all their tensors. Raises UnsupportedModelError for a tensor that breaks a promise
    or has no place, and CheckpointError for a missing one."""

    def __init__(
        self,
        model: PreTrainedModel,
        conversions: list[WeightTransform],
        stored: Mapping[str, torch.Tensor],
        promised: Quantization,
    ) -> None:
        self.by_module: dict[str, dict[str, list[StoredWeight]]] = {}
        self.keys: set[str] = set()
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._stored, self._promised = stored, promised
        self._prefix = model.base_model_prefix
        self._known = model.state_dict()
        self._name_of = _renaming(model, conversions, self._known)
        self._experts_of = cache(experts_of)
        self._ignored = model._keys_to_ignore_on_load_unexpected or ()
        self._tied = model.all_tied_weights_keys  # name -> name of the embedding
        self._find_all()
        self._require_whole()
        ignored = [key for key in stored if IGNORABLE.fullmatch(key)]
        if ignored:
            message = "%d tensors of the checkpoint, %s first, are not read: they scale 8-bit K/V (kv_cache_scheme), "
            message += "not weights; kv_dtype decides how K/V are stored"
            logger.info(message, len(ignored), ignored[0])

    def _find_all(self) -> None:
        by_stem = _by_stem(self._stored, self._promised)
        places = {stem: self._find(stem) for stem in by_stem}
        used = {part for stem, place in places.items() if place is not None for part in _ancestors(stem)}
        for stem, keys in by_stem.items():
            place = places[stem]
            if place is not None:
                self._add(stem, place, {name: key for name, key in keys.items() if not IGNORABLE.fullmatch(key)})
            elif stem in used or self._has_module(stem):
                for key in filter(self._is_left_over, keys.values()):
                    if self._name_of(re.sub(r"_scale\w*$", "", key)) in self._known:
                        raise UnsupportedModelError(
                            f"{key} scales all experts of a layer; quantised experts are read if they are stored one "
                            "by one, or in MXFP4; give such a checkpoint, or the plain one"
                        )
                    raise UnsupportedModelError(
                        f"{key} is not read as {dtype_name(self._stored[key].dtype)}, and the module that it lies in "
                        f"is; {NOT_AS_PROMISED}"
                    )

    def _is_left_over(self, key: str) -> bool:
        """Would the module compute something else because this tensor is ignored, or read as another type?"""
        tensor, name = self._stored[key], self._name_of(key)
        if name in self._known:
            return self._known[name].is_floating_point() and tensor.dtype not in PLAIN_TYPES
        if not changes_values(key) or any(re.search(pattern, name) for pattern in self._ignored):
            return False
        return not (key.endswith("bias") and _is_idle(tensor))

    def _has_module(self, stem: str) -> bool:
        renamed = self._name_of(f"{stem}.weight").removesuffix(".weight")
        return any(name in self._modules for name in (stem, *with_and_without(renamed, self._prefix)))

    def _find(self, stem: str) -> WeightPlace | None:
        """The place of a weight; None: the model has no such weight."""
        one = OF_ONE_EXPERT.fullmatch(stem)
        plain = [stem, f"{stem}.weight"]
        if one:  # the model may stack experts, or have one module each
            plain.insert(0, f"{one['experts']}.gate_up_proj")
        name = next((name for name in map(self._name_of, plain) if name in self._known), None)
        if name is None:
            return None
        path, _, last = name.rpartition(".")
        module = self._modules[path]
        if one and last != "weight":
            last = PROJECTIONS.get(one["name"], one["name"])
        if mixture_of(module, "Experts") is None:
            is_linear = type(module) is nn.Linear and last == "weight"
            return WeightPlace(path, last, module.weight.shape if is_linear else None)
        experts = self._experts_of(module)
        shape = None if experts is None else _shapes_of(experts).get(last)
        return WeightPlace(path, last, shape, experts, int(one["number"]) if one else None)

    def _add(self, stem: str, place: WeightPlace, keys: dict[str, str]) -> None:
        """Add a weight if it is quantised. keys: of its tensors, by the rest of their names."""
        bias = keys.pop("bias", None)
        if bias is not None and self._is_left_over(bias):
            raise UnsupportedModelError(
                f"{bias} is not read: it is not zero, and the model's class has no bias there, or it is not plain; "
                "correct what config.json says of biases (attention_bias, mlp_bias), or give a checkpoint without it"
            )
        tensors = {name: self._stored[key] for name, key in keys.items()}
        if place.shape is None:
            is_plain = not any(map(self._is_left_over, keys.values()))
        else:
            is_plain = set(tensors) <= {"weight"} and all(tensor.dtype in PLAIN_TYPES for tensor in tensors.values())
        if is_plain:
            return
        if "weight" in tensors and tensors["weight"].dtype in PLAIN_TYPES:
            others = (key for name, key in sorted(keys.items()) if name != "weight")
            dtype = dtype_name(tensors["weight"].dtype)
            raise UnsupportedModelError(
                f"{stem} has a plain weight ({dtype}), and {', '.join(others)} next to it, which is not read; "
                f"{NOT_AS_PROMISED}"
            )
        format = self._promised.format_of(stem, place.path)
        if place.shape is not None:
            format.compare(stem, tensors, place.shape, place.num_stacked)
        if format.joint == "_" and stem in self._stored:
            raise UnsupportedModelError(f"{stem} is stored twice, as it is and in {format.title}; {NOT_AS_PROMISED}")
        if place.shape is None or (place.num_stacked is not None and format.joint != "_"):
            kind, known = type(self._modules[place.path]).__name__, ", ".join(sorted(EXPERTS))
            raise UnsupportedModelError(
                f"{stem} is quantised, and it is the {place.last} of a {kind}; quantised weights are read of "
                f"nn.Linear and of experts that are stored one by one, of {known}; leave it out when quantising"
            )
        if other := self._tied.get(f"{place.path}.{place.last}"):
            raise UnsupportedModelError(
                f"{stem} is quantised, and the config ties its weight to {other}; set tie_word_embeddings to false in "
                "config.json if the checkpoint has both, or leave it out when quantising"
            )
        weight = StoredWeight(stem, format, tensors, place)
        alike = self.by_module.setdefault(place.path, {}).setdefault(place.last, [])
        if alike and alike[0].form != weight.form:
            raise UnsupportedModelError(
                f"{stem} is stored as {weight.form}, and {alike[0].stem} as {alike[0].form}; experts of a layer are "
                "read in one format"
            )
        alike.append(weight)
        self.keys.update(f"{stem}{format.joint}{name}" for name in tensors)

    def _require_whole(self) -> None:
        """Raise UnsupportedModelError if only some experts of a layer, or only some of their weights, are quantised."""
        for path, by_projection in self.by_module.items():
            if "weight" in by_projection:
                continue
            for last, [first, *others] in by_projection.items():
                assert first.place.experts is not None, path
                count, num_experts = 1 + len(others), len(first.place.experts.gate_up)
                if first.place.number is not None and count != num_experts:
                    raise UnsupportedModelError(
                        f"{path}: {count} of {num_experts} experts have a quantised {last}; experts are read where "
                        "all of a layer are"
                    )
            whole = ({"gate_up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"})
            if set(by_projection) not in (({"up_proj", "down_proj"},) if first.place.is_ungated else whole):
                stem = next(iter(by_projection.values()))[0].stem
                raise UnsupportedModelError(f"{stem} is quantised, but not all weights of its experts are")


def _by_stem(stored: Iterable[str], promised: Quantization) -> dict[str, dict[str, str]]:
    """Keys by their module's name in the checkpoint (the stem), then by the rest of the key."""
    by_stem: dict[str, dict[str, str]] = {}
    has_joined = any(format.joint == "_" for _, format in promised.rules)
    for key in stored:
        stem, _, name = key.rpartition(".")
        if has_joined and (joined := OF_ALL_EXPERTS.fullmatch(key)):
            stem, name = joined["stem"], joined["name"]
        by_stem.setdefault(stem, {})[name] = key
    return by_stem


def _ancestors(stem: str) -> list[str]:
    parts = stem.split(".")
    return [".".join(parts[:number]) for number in range(len(parts) + 1)]


def _is_idle(bias: torch.Tensor) -> bool:
    """Is the bias zero, or the causal mask (4-D) or its constant (0-D), which older classes stored as biases?"""
    return bias.ndim not in (1, 2) or not bias.count_nonzero()


def _shapes_of(experts: Experts) -> dict[str, torch.Size]:
    """Shape [N, K] of each projection of one expert."""
    _, rows, columns = experts.gate_up.shape
    if experts.activation == "relu2":
        return {"up_proj": experts.gate_up.shape[1:], "down_proj": experts.down.shape[1:]}
    half = torch.Size((rows // 2, columns))
    whole = {"gate_up_proj": experts.gate_up.shape[1:], "down_proj": experts.down.shape[1:]}
    return {**whole, "gate_proj": half, "up_proj": half}


def _renaming(
    model: PreTrainedModel, conversions: list[WeightTransform], known: dict[str, torch.Tensor]
) -> Callable[[str], str]:
    """A function from checkpoint keys to parameter names, as transformers maps them."""
    conversions = copy.deepcopy(conversions)  # they record whether they were used
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]

    @cache
    def name(key: str) -> str:
        renamed, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        return str(key if renamed not in known and key in known else renamed)

    return name


def with_and_without(name: str, prefix: str) -> set[str]:
    """A module's possible names in a model and in its base model."""
    return {name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")}


def changes_values(key: str) -> bool:
    """Does a tensor with this key change the values of its module (a scale, a zero point, a bias)?"""
    return bool(CHANGES_VALUES.search(key.rpartition(".")[2])) and not IGNORABLE.fullmatch(key)


def require_values_read(model: PreTrainedModel, unused: Iterable[str]) -> None:
    """Raise UnsupportedModelError if an unused tensor would change the values of a loaded module.

    For checkpoints that transformers reads: with such a tensor the weights are quantised, although the config does not
    say so. unused: keys as in the model. Biases are not checked, since old classes stored masks under that name.
    """
    modules = {name for name, _ in model.named_modules()}
    for key in sorted(unused):
        stem = key.rpartition(".")[0]
        one = OF_ONE_EXPERT.fullmatch(stem)
        if not changes_values(key) or key.endswith("bias"):
            continue
        if not modules.isdisjoint(with_and_without(one["experts"] if one else stem, model.base_model_prefix)):
            raise UnsupportedModelError(
                f"{key} is not used, and the module that it lies in is: weights are stored quantised, and no "
                "quantization_config in config.json says how; give a checkpoint that has one"
            )
