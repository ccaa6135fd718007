"""The quantiser by which transformers loads packed weights: it finds their places, and packs what was read.

transformers knows the files (`preprocess_model`), quantised modules give way to raw ones (`update_weight_conversions`,
`raw_modules.py`), it reads the tensors, and raw modules give way to packed ones (`postprocess_model`). A module is
quantised if the checkpoint has more for it than plain tensors; then it has what the config promises, which is compared
first (`comparison.py`). No bfloat16 copy of a weight is made.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from specdec.errors import CheckpointError, UnsupportedModelError, about
from specdec.layers.moe.moe_families import experts_of
from specdec.models.quantised.comparison import place_quantised
from specdec.models.quantised.formats import Int4
from specdec.models.quantised.quantization_config import Quantization
from specdec.models.quantised.raw_modules import RawExperts, RawLinear
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
        self.places: list[str] = []

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], *model: PreTrainedModel
    ) -> list[WeightTransform]:
        """Those of the model, after the ones that stack the experts' tensors. Puts raw modules in their places.

        model: given again by later versions of transformers.
        """
        places = WeightPlaces(self.model, weight_conversions)
        place_quantised(self.stored, self.promised, places)
        if not (places.linears or places.experts):
            raise CheckpointError("its config.json says that it is quantised, but none of its tensors is")
        places.require_apart()
        _require_plain_groups(places)
        for path, linear in places.linears.items():
            self._place(path, RawLinear(linear, places.modules[path]))
        for path, weights in places.experts.items():
            module: Any = places.modules[path]
            with about(path):
                experts = experts_of(module)
                if experts is None:
                    raise UnsupportedModelError(f"{type(module).__name__} of another activation")
                raw = RawExperts(weights, experts, getattr(module, "act_fn", None))
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
        self.stored = {}
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # what packing used is left to the K/V

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


def _require_plain_groups(places: WeightPlaces) -> None:
    """Refuse columns in the order of their importance (`desc_act`) by one weight, before gigabytes are read."""
    for weight in places.linears.values():
        for name, tensor in weight.tensors.items():
            if name.endswith("g_idx") and isinstance(weight.format, Int4):
                with about(weight.stem):
                    weight.format.require_in_order(tensor.read())
                return
