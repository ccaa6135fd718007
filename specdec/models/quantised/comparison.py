"""Compares a checkpoint with the promises of its `quantization_config`. It reads only the headers of the files.

Each tensor is one of these; any other raises an error with its name:

    plain       a parameter of the model, in 16 bits or more; a module with nothing else is not quantised
    packed      if a module's tensors are not all plain, they must be those of its format, in its shapes and types
    unused      belongs to a module that the model class lacks, such as a vision encoder or MTP heads
    ignorable   matches IGNORABLE, or is a bias of zeros that the class lacks (older GPTQ tools wrote these)

Any other tensor next to a known module whose name ends in scale, zero or bias is an error: the module's values depend
on it.
"""

import logging
import re
from collections.abc import Iterable, Mapping

import torch
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModelError
from specdec.models.quantised.formats import NOT_AS_PROMISED, dtype_name
from specdec.models.quantised.quantization_config import Quantization
from specdec.models.quantised.stored_tensors import StoredTensor
from specdec.models.quantised.weight_places import (
    OF_ONE_EXPERT,
    StoredWeight,
    WeightPlace,
    WeightPlaces,
    with_and_without,
)

logger = logging.getLogger("specdec")

PLAIN_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

IGNORABLE = re.compile(r"(k|v|kv)_scale|(k|v)_zero_point")
"""Scales for 8-bit K/V. They are not read, since they multiply no weight."""

CHANGES_VALUES = re.compile(r"(scales?(_inv|_\d+)?|zeros?|zero_points?|bias)$")

OF_ALL_EXPERTS = re.compile(r"(?P<stem>.+\.experts\.\w+)_(?P<name>blocks|scales)")
"""Keys of tensors that hold all experts, in formats whose joint is "_"."""


def changes_values(name: str) -> bool:
    """Does a tensor with this name change the values of its module (a scale, a zero point, a bias)?"""
    return bool(CHANGES_VALUES.search(name)) and not IGNORABLE.fullmatch(name)


def place_quantised(stored: Mapping[str, StoredTensor], promised: Quantization, places: WeightPlaces) -> None:
    """Add every quantised weight to `places`. Raises UnsupportedModelError for a tensor that breaks a promise, and
    CheckpointError for a missing one."""
    by_stem = _by_stem(stored, promised)
    found = {stem: places.find(stem) for stem in by_stem}
    used = {part for stem, place in found.items() if place is not None for part in _ancestors(stem)}
    for stem, tensors in by_stem.items():
        place = found[stem]
        if place is None:
            if stem in used or places.has_module(stem):
                _require_unused(tensors, places)
            continue
        tensors = {name: tensor for name, tensor in tensors.items() if not IGNORABLE.fullmatch(name)}
        bias = tensors.pop("bias", None)
        if bias is not None:
            _require_bias(bias, places)
        if _is_plain(tensors, place, places):
            continue
        if "weight" in tensors and tensors["weight"].dtype in PLAIN_TYPES:
            others = (tensor.key for name, tensor in sorted(tensors.items()) if name != "weight")
            dtype = dtype_name(tensors["weight"].dtype)
            raise UnsupportedModelError(
                f"{stem} has a plain weight ({dtype}), and {', '.join(others)} next to it, which is not read; "
                f"{NOT_AS_PROMISED}"
            )
        format = promised.format_of(stem, place.path)
        if place.shape is not None:
            format.compare(stem, tensors, place.shape, place.num_stacked)
        if format.joint == "_" and stem in stored:
            raise UnsupportedModelError(f"{stem} is stored twice, as it is and in {format.title}; {NOT_AS_PROMISED}")
        places.add(StoredWeight(stem, format, tensors, place))
    places.require_whole()
    ignored = [key for key in stored if IGNORABLE.fullmatch(key.rpartition(".")[2])]
    if ignored:
        message = "%d tensors of the checkpoint, %s first, are not read: K/V may be stored in 8 bits by it "
        message += "(kv_cache_scheme), and no weight is multiplied by it; K/V stay in the model's dtype"
        logger.info(message, len(ignored), ignored[0])


def _by_stem(stored: Mapping[str, StoredTensor], promised: Quantization) -> dict[str, dict[str, StoredTensor]]:
    """Tensors by their module's name in the checkpoint (the stem), then by the rest of their key."""
    by_stem: dict[str, dict[str, StoredTensor]] = {}
    has_joined = any(format.joint == "_" for _, format in promised.rules)
    for key, tensor in stored.items():
        stem, _, name = key.rpartition(".")
        if has_joined and (joined := OF_ALL_EXPERTS.fullmatch(key)):
            stem, name = joined["stem"], joined["name"]
        by_stem.setdefault(stem, {})[name] = tensor
    return by_stem


def _ancestors(stem: str) -> list[str]:
    parts = stem.split(".")
    return [".".join(parts[:number]) for number in range(len(parts) + 1)]


def _is_plain(tensors: Mapping[str, StoredTensor], place: WeightPlace, places: WeightPlaces) -> bool:
    if place.shape is not None:
        return set(tensors) <= {"weight"} and all(tensor.dtype in PLAIN_TYPES for tensor in tensors.values())
    return not any(_is_left_over(name, tensor, places) for name, tensor in tensors.items())


def _is_left_over(name: str, tensor: StoredTensor, places: WeightPlaces) -> bool:
    """Would the module compute something else because this tensor is ignored, or read as another type?"""
    parameter = places.parameter(tensor.key)
    if parameter is not None:
        return parameter.is_floating_point() and tensor.dtype not in PLAIN_TYPES
    return changes_values(name) and not places.ignores(tensor.key) and not (name.endswith("bias") and _is_idle(tensor))


def _is_idle(bias: StoredTensor) -> bool:
    """Is the bias zero, or the causal mask (4-D) or its constant (0-D), which older classes stored as biases?"""
    return len(bias.shape) not in (1, 2) or not bias.read().count_nonzero()


def _require_bias(bias: StoredTensor, places: WeightPlaces) -> None:
    if _is_left_over("bias", bias, places):
        raise UnsupportedModelError(
            f"{bias.key} is not read: it is not zero, and the model's class has no bias there, or it is not plain; "
            "correct what config.json says of biases (attention_bias, mlp_bias), or give a checkpoint without it"
        )


def _require_unused(tensors: Mapping[str, StoredTensor], places: WeightPlaces) -> None:
    for name, tensor in tensors.items():
        if _is_left_over(name, tensor, places):
            raise UnsupportedModelError(
                f"{tensor.key} is not read as {dtype_name(tensor.dtype)}, and the module that it lies in is; "
                f"{NOT_AS_PROMISED}"
            )


def require_values_read(model: PreTrainedModel, unused: Iterable[str]) -> None:
    """Raise UnsupportedModelError if an unused tensor would change the values of a loaded module.

    For checkpoints that transformers reads: with such a tensor the weights are quantised, although the config does not
    say so. unused: keys as in the model. Biases are not checked, since old classes stored masks under that name.
    """
    modules = {name for name, _ in model.named_modules()}
    for key in sorted(unused):
        stem, _, name = key.rpartition(".")
        one = OF_ONE_EXPERT.fullmatch(stem)
        if not changes_values(name) or name.endswith("bias"):
            continue
        if not modules.isdisjoint(with_and_without(one["experts"] if one else stem, model.base_model_prefix)):
            raise UnsupportedModelError(
                f"{key} is not used, and the module that it lies in is: weights are stored quantised, and no "
                "quantization_config in config.json says how; give a checkpoint that has one"
            )
