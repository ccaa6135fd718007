"""Compares a checkpoint with the promises of its `quantization_config`, by the names, shapes and types of its tensors.

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
from specdec.models.quantised.weight_places import OF_ONE_EXPERT, StoredWeight, WeightPlaces, with_and_without

logger = logging.getLogger("specdec")

PLAIN_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

IGNORABLE = re.compile(r"(k|v|kv)_scale|(k|v)_zero_point")
"""Scales for 8-bit K/V. They are not read, since they multiply no weight."""

CHANGES_VALUES = re.compile(r"(scales?(_inv|_\d+)?|zeros?|zero_points?|bias)$")

OF_ALL_EXPERTS = re.compile(r"(?P<stem>.+\.experts\.\w+)_(?P<name>blocks|scales)")
"""Keys of tensors that hold all experts, in formats whose joint is "_"."""


def changes_values(key: str) -> bool:
    """Does a tensor with this key change the values of its module (a scale, a zero point, a bias)?"""
    name = key.rpartition(".")[2]
    return bool(CHANGES_VALUES.search(name)) and not IGNORABLE.fullmatch(name)


def place_quantised(stored: Mapping[str, torch.Tensor], promised: Quantization, places: WeightPlaces) -> None:
    """Add every quantised weight to `places`. Raises UnsupportedModelError for a tensor that breaks a promise, and
    CheckpointError for a missing one."""

    def is_left_over(key: str) -> bool:
        """Would the module compute something else because this tensor is ignored, or read as another type?"""
        tensor, parameter = stored[key], places.parameter(key)
        if parameter is not None:
            return parameter.is_floating_point() and tensor.dtype not in PLAIN_TYPES
        return changes_values(key) and not places.ignores(key) and not (key.endswith("bias") and _is_idle(tensor))

    by_stem = _by_stem(stored, promised)
    found = {stem: places.find(stem) for stem in by_stem}
    used = {part for stem, place in found.items() if place is not None for part in _ancestors(stem)}
    for stem, keys in by_stem.items():
        place = found[stem]
        if place is None:
            for key in filter(is_left_over, keys.values()) if stem in used or places.has_module(stem) else ():
                raise UnsupportedModelError(
                    f"{key} is not read as {dtype_name(stored[key].dtype)}, and the module that it lies in is; "
                    f"{NOT_AS_PROMISED}"
                )
            continue
        keys = {name: key for name, key in keys.items() if not IGNORABLE.fullmatch(name)}
        bias = keys.pop("bias", None)
        if bias is not None and is_left_over(bias):
            raise UnsupportedModelError(
                f"{bias} is not read: it is not zero, and the model's class has no bias there, or it is not plain; "
                "correct what config.json says of biases (attention_bias, mlp_bias), or give a checkpoint without it"
            )
        tensors = {name: stored[key] for name, key in keys.items()}
        if place.shape is None:
            is_plain = not any(map(is_left_over, keys.values()))
        else:
            is_plain = set(tensors) <= {"weight"} and all(tensor.dtype in PLAIN_TYPES for tensor in tensors.values())
        if is_plain:
            continue
        if "weight" in tensors and tensors["weight"].dtype in PLAIN_TYPES:
            others = (key for name, key in sorted(keys.items()) if name != "weight")
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
