"""A checkpoint compared with what its `quantization_config` promises, by the headers of its files: before it is read.

Each tensor is one of these, or an error that names it:
    plain       a parameter of the model, in 16 bits or more; a module that has nothing else is not quantised
    packed      a module's tensors that are not all plain: exactly those of its format, in their shapes and types
    unused      of a module that the model's class does not have, as an encoder or heads that predict further tokens
    ignorable   IGNORABLE, or a bias of zeros where the class has none, which GPTQ's tools used to write
What is left beside a module of the model and ends in scale, zero or bias would change its values.
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
"""Names of tensors by which K/V may be stored in 8 bits: not read, as no weight is multiplied by them."""

CHANGES_VALUES = re.compile(r"(scales?(_inv|_\d+)?|zeros?|zero_points?|bias)$")

OF_ALL_EXPERTS = re.compile(r"(?P<stem>.+\.experts\.\w+)_(?P<name>blocks|scales)")
"""Keys of tensors of all experts, in a format whose joint is "_"."""


def changes_values(name: str) -> bool:
    """Whether an unused tensor of this name would have changed the values of what it lies beside."""
    return bool(CHANGES_VALUES.search(name)) and not IGNORABLE.fullmatch(name)


def place_quantised(stored: Mapping[str, StoredTensor], promised: Quantization, places: WeightPlaces) -> None:
    """Add every quantised weight to `places`. Raises UnsupportedModelError for what is not as promised, and
    CheckpointError for what is lacking."""
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
        said = "%d tensors of the checkpoint, %s first, are not read: K/V may be stored in 8 bits by it "
        said += "(kv_cache_scheme), and no weight is multiplied by it; K/V stay in the model's dtype"
        logger.info(said, len(ignored), ignored[0])


def _by_stem(stored: Mapping[str, StoredTensor], promised: Quantization) -> dict[str, dict[str, StoredTensor]]:
    """Tensors by what precedes their last name, and by that name."""
    by_stem: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in stored.items():
        stem, _, name = key.rpartition(".")
        if "_" in promised.joints and (joined := OF_ALL_EXPERTS.fullmatch(key)):
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
    """Whether the values of a module change as this tensor is not read, or not read as what it is."""
    parameter = places.parameter(tensor.key)
    if parameter is not None:
        return parameter.is_floating_point() and tensor.dtype not in PLAIN_TYPES
    return changes_values(name) and not places.ignores(tensor.key) and not (name.endswith("bias") and _is_idle(tensor))


def _is_idle(bias: StoredTensor) -> bool:
    """Zeros, or the causal mask of four dimensions and the constant for it that older classes stored as biases."""
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
    """Raise UnsupportedModelError where a tensor that was not used changes values of a module that was loaded.

    For checkpoints that transformers reads: such a one is stored quantised, and its config does not say so. unused:
    names as in the model. Biases are left to it, as old classes stored masks under that name.
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
