"""The quantiser by which transformers loads packed weights: it finds their places, and packs what was read.

transformers knows the files (`preprocess_model`); quantised modules are emptied (`update_weight_conversions`); it loads
the rest; then the tensors of quantised weights are read and packed (`postprocess_model`, `packing.py`). A module is
quantised if the checkpoint has more for it than plain tensors; then it has what the config promises, which is compared
first (`comparison.py`). No bfloat16 copy of a weight is made.
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
    """`quantization_config` of a load."""

    def __init__(self, promised: Quantization) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # any registered name will do
        self.promised = promised


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
        self.promised = quantization_config.promised

    def preprocess_model(self, model: PreTrainedModel, dtype: Any = None, **kwargs: Any) -> None:
        self.model: PreTrainedModel = model
        self.dtype: torch.dtype = dtype
        self.stored = stored_tensors(kwargs["checkpoint_files"] or ())

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], *model: PreTrainedModel
    ) -> list[WeightTransform]:
        """Those of the model, unchanged. Empties the modules whose weights are quantised.

        model: given again by later versions of transformers.
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
        """Read and pack the quantised weights, module by module. What remains is a model as any other."""
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
            torch.cuda.empty_cache()  # what packing used is left to the K/V

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module.eval()


def _require_plain_groups(places: WeightPlaces) -> None:
    """Refuse columns in the order of their importance (`desc_act`) by one weight, before gigabytes are read."""
    for weight in places.linears.values():
        for name, tensor in weight.tensors.items():
            if name.endswith("g_idx") and isinstance(weight.format, Int4):
                with about(weight.stem):
                    weight.format.require_in_order(tensor.read())
                return
