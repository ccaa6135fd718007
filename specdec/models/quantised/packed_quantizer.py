"""The quantiser with which transformers loads packed weights. transformers calls its methods in this order:

    preprocess_model            notes the model and the headers of its files
    update_weight_conversions   compares the checkpoint with its config (`comparison.py`), empties quantised modules
    (transformers)              loads the other tensors
    postprocess_model           reads and packs the quantised weights, module by module (`packing.py`)

A module is quantised if the checkpoint has more than plain tensors for it. No bfloat16 copy of a weight is made.
"""

import copy
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from specdec.errors import CheckpointError, UnsupportedModelError, about
from specdec.layers.moe.experts import Experts
from specdec.layers.moe.moe_families import experts_of
from specdec.layers.packed.packed_experts import PackedExperts
from specdec.layers.packed.packed_linear import PackedLinear
from specdec.models.quantised.comparison import place_quantised
from specdec.models.quantised.formats import Int4
from specdec.models.quantised.packing import OnlyBiases, packed_experts, packed_weights
from specdec.models.quantised.quantization_config import Quantization
from specdec.models.quantised.stored_tensors import stored_tensors
from specdec.models.quantised.weight_places import WeightPlaces

METHOD = "specdec-packed"


class PackedConfig(QuantizationConfigMixin):
    """The `quantization_config` that is passed to `from_pretrained`."""

    def __init__(self, promised: Quantization) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # any registered name will do
        self.promised = promised


def without_quantization(config: Any) -> Any:
    """A copy of a transformers config without its `quantization_config`."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


@register_quantizer(METHOD)
class PackedQuantizer(HfQuantizer):
    """The quantizer of one `from_pretrained` call."""

    def __init__(self, quantization_config: PackedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # True: transformers would read all mapped tensors first, in their stored dtype
        self.pre_quantized = False
        self.promised = quantization_config.promised

    def preprocess_model(self, model: PreTrainedModel, dtype: Any = None, **kwargs: Any) -> None:
        self.model: PreTrainedModel = model
        self.dtype: torch.dtype = dtype
        self.stored = stored_tensors(kwargs["checkpoint_files"] or ())

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], *model: PreTrainedModel
    ) -> list[WeightTransform]:
        """Returns the conversions unchanged, and removes the weights of quantised modules, so that transformers does
        not load them.

        model: passed by later versions of transformers.
        """
        self.places = places = WeightPlaces(self.model, weight_conversions)
        place_quantised(self.stored, self.promised, places)
        if not places.keys:
            raise CheckpointError("its config.json says that it is quantised, but none of its tensors is")
        _require_plain_groups(places)
        self.experts: dict[str, tuple[Experts, nn.Module | None]] = {}  # by path: description, activation
        for path in places.experts:
            module: Any = places.modules[path]
            with about(path):
                experts = experts_of(module)
                if experts is None:
                    raise UnsupportedModelError(f"{type(module).__name__} of another activation")
            self.experts[path] = experts, getattr(module, "act_fn", None)
        for path in (*places.linears, *places.experts):
            _put(self.model, path, OnlyBiases(places.modules[path]))
        loaded: Any = self.model
        self._ignored = loaded._keys_to_ignore_on_load_unexpected
        loaded._keys_to_ignore_on_load_unexpected = {""}  # `place_quantised` has judged every tensor
        return weight_conversions

    def postprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Read and pack the quantised weights. Afterwards nothing of the quantizer is left in the model."""
        device, loaded = model.device, cast(Any, model)
        loaded._keys_to_ignore_on_load_unexpected = self._ignored
        for path, linear in self.places.linears.items():
            emptied: Any = model.get_submodule(path)
            [weight] = packed_weights(linear, self.dtype, device)
            _put(model, path, PackedLinear(weight, emptied.kept("bias")))
        for path, weights in self.places.experts.items():
            emptied, (described, act_fn) = model.get_submodule(path), self.experts[path]
            described = described._replace(
                gate_up_bias=emptied.kept("gate_up_proj_bias"), down_bias=emptied.kept("down_proj_bias")
            )
            _put(model, path, PackedExperts(packed_experts(weights, described, self.dtype, device), act_fn))
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        self.stored = {}
        del self.places
        if device.type == "cuda":
            torch.cuda.empty_cache()  # leave the memory that packing used to the K/V

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module.eval()


def _require_plain_groups(places: WeightPlaces) -> None:
    """Refuse reordered columns (`desc_act`) after looking at one weight, before gigabytes are read."""
    for weight in places.linears.values():
        for name, tensor in weight.tensors.items():
            if name.endswith("g_idx") and isinstance(weight.format, Int4):
                with about(weight.stem):
                    weight.format.require_in_order(tensor.read())
                return
