"""The quantiser by which transformers loads packed weights: it finds their places, and packs what was read.

    from_pretrained    preprocess_model            the files are known, the model is on "meta"
                       update_weight_conversions   quantised modules give way to raw ones (`raw_modules.py`)
                       (tensors are read)          names, shards, devices and the progress bar are transformers'
                       postprocess_model           raw modules give way to packed ones, and nothing else is left of it

A module is quantised if the checkpoint has the tensors of a quantised weight for it. No bfloat16 copy of a weight is
made: memory holds what the file holds, and one module more.
"""

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from specdec.errors import CheckpointError, UnsupportedModelError
from specdec.layers.moe.moe_families import EXPERT_CLASSES, experts_of
from specdec.models.quantised.checkpoint_tensors import StoredWeight, stored_tensors, stored_weights
from specdec.models.quantised.formats import Format
from specdec.models.quantised.raw_modules import RawExperts, RawLinear, about
from specdec.models.quantised.repack import require_in_order

METHOD = "specdec-packed"

OF_ONE_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<name>gate_proj|up_proj|down_proj|w1|w2|w3)")
PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class PackedConfig(QuantizationConfigMixin):
    """`quantization_config` of a load: the formats that quantised weights may have."""

    def __init__(self, formats: Iterable[Format]) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # any registered name will do
        self.formats = tuple(formats)


def without_quantization(config: Any) -> Any:
    """A copy of a config of transformers as that of a plain checkpoint."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


@register_quantizer(METHOD)
class PackedQuantizer(HfQuantizer):
    """One load. transformers makes it, and drops it with what `postprocess_model` leaves."""

    def __init__(self, quantization_config: PackedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # it would read tensors whose names it maps in their own dtype, and all ahead of those that use them
        self.pre_quantized = False
        self.formats = quantization_config.formats

    def preprocess_model(self, model: PreTrainedModel, dtype: Any = None, **kwargs: Any) -> None:
        self.model: PreTrainedModel = model
        self.dtype: torch.dtype = dtype
        self.weights = stored_weights(stored_tensors(kwargs["checkpoint_files"] or ()), self.formats)
        self.places: list[str] = []

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], *model: PreTrainedModel
    ) -> list[WeightTransform]:
        """Those of the model, after the ones that stack the experts' tensors. Puts raw modules in their places.

        model: given again by later versions of transformers.
        """
        places = _Places(self.model, weight_conversions)
        for weight in self.weights:
            places.find(weight)
        if not (places.linears or places.experts):
            raise CheckpointError("its config.json says that it is quantised, but none of its tensors is")
        _require_plain_groups(self.weights)
        for path, linear in places.linears.items():
            self._place(path, RawLinear(linear, places.modules[path]))
        for path, weights in places.experts.items():
            module: Any = places.modules[path]
            with about(path):
                experts = experts_of(module)
                if experts is None:
                    raise UnsupportedModelError(f"{type(module).__name__} of another activation")
                raw = RawExperts(weights, experts, getattr(module, "act_fn", None), path in places.stacked)
            self._place(path, raw)
        self.shapes = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        self.own = list(places.conversions())
        return [*self.own, *weight_conversions]

    def postprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Pack what was read, module by module. What remains is a model as any other."""
        for name, tensor in model.state_dict().items():
            if tensor.shape != self.shapes.get(name, tensor.shape):
                raise CheckpointError(f"{name} is {list(tensor.shape)}, expected {list(self.shapes[name])}")
        for path in self.places:
            raw: Any = model.get_submodule(path)
            _put(model, path, raw.replacement(self.dtype))
        loaded: Any = model
        loaded._weight_conversions = [one for one in loaded._weight_conversions if one not in self.own]
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        self.weights = []

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    def _place(self, path: str, raw: nn.Module) -> None:
        _put(self.model, path, raw)
        self.places.append(path)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module.eval()


class _Places:
    """Where quantised weights belong in a model: found by the name that transformers would give their `weight`."""

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
                f"{weight.stem} is quantised, and in {type(self.modules[path]).__name__} it is {last} of a "
                f"{type(module).__name__}; quantised weights are read of nn.Linear and of the experts of "
                f"{', '.join(one.__name__ for one in EXPERT_CLASSES)}"
            )

    def _find_experts(self, path: str, last: str, weight: StoredWeight, one: re.Match[str] | None) -> None:
        if one is None:
            self.stacked.add(path)
            self._joints.setdefault(last, set()).update(weight.tensors)
        else:
            last = PROJECTIONS.get(one["name"], one["name"])
            self._stacks.setdefault((one["name"], last), set()).update(weight.tensors)
        self.experts.setdefault(path, {}).setdefault(last, weight)

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


def _require_plain_groups(weights: list[StoredWeight]) -> None:
    """Columns in the order of their importance (`desc_act`) are refused before gigabytes are read: one weight shows
    it."""
    first = next((weight for weight in weights if "g_idx" in weight.tensors), None)
    if first is not None:
        g_idx = first.tensors["g_idx"].read()
        with about(first.stem):
            require_in_order(g_idx, len(g_idx) // first.tensors["scales"].shape[0])
