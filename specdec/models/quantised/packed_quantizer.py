"""The quantiser with which transformers loads packed weights. transformers calls its methods in this order:

    preprocess_model            notes the model and the headers of its files
    update_weight_conversions   compares the checkpoint with its config (`comparison.py`), empties quantised modules
    (transformers)              loads the other tensors
    postprocess_model           reads and packs the quantised weights, module by module

A module is quantised if the checkpoint has more than plain tensors for it. No bfloat16 copy of a weight is made.
`load_packed` does the same for modules that a model's class lacks, such as MTP modules.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform, convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from specdec.errors import CheckpointError, UnsupportedModelError, about
from specdec.layers.packed.packed_modules import PackedExperts, PackedLinear
from specdec.layers.packed.packed_weight import PackedWeight
from specdec.models.quantised.comparison import place_quantised
from specdec.models.quantised.quantization_config import Quantization
from specdec.models.quantised.weight_places import StoredWeight, WeightPlaces

METHOD = "specdec-packed"


class PackedConfig(QuantizationConfigMixin):
    """The `quantization_config` that is passed to `from_pretrained`."""

    def __init__(self, promised: Quantization) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # any registered name will do
        self.promised = promised


def stored_tensors(files: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors by key, as maps of the files: values are read from the disk when they are used. Raises CheckpointError
    for a file that is not safetensors."""
    stored: dict[str, torch.Tensor] = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise CheckpointError(f"{Path(file).name} is no safetensors file; packed weights are read from no other")
        stored |= load_file(file)
    return stored


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
        self.stored: Mapping[str, torch.Tensor] = stored_tensors(kwargs["checkpoint_files"] or ())

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
            [weight] = packed_weights(linear, self.dtype, device)
            _put(model, path, PackedLinear(weight, model.get_submodule(path)._parameters.get("bias")))
        for path, weights in self.places.experts.items():
            biases = model.get_submodule(path)._parameters
            names = ("gate_up_proj",) if "gate_up_proj" in weights else ("gate_proj", "up_proj")
            described = self.places.descriptions[path]
            assert described is not None, path
            experts = described._replace(
                gate_up=_stacked([weights[name] for name in names], self.dtype, device),
                down=_stacked([weights["down_proj"]], self.dtype, device),
                gate_up_bias=biases.get("gate_up_proj_bias"),
                down_bias=biases.get("down_proj_bias"),
            )
            _put(model, path, PackedExperts(experts))
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


class OnlyBiases(nn.Module):
    """Replaces a quantised module while transformers loads the rest of the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, parameter in module._parameters.items():
            if name.endswith("bias"):
                self.register_parameter(name, parameter)


def packed_weights(stored: StoredWeight, dtype: torch.dtype, device: torch.device) -> Iterator[PackedWeight]:
    """Yield the packed weight, or one per expert if its tensors hold several, for products in `dtype`. Scales keep the
    checkpoint's dtype, except that they are float32 for products in float32."""
    tensors = {name: tensor.to(device) for name, tensor in stored.tensors.items()}
    count, shape = stored.place.num_stacked, stored.place.shape
    assert shape is not None, f"{stored.stem=}"
    for expert in range(count or 1):
        own = tensors if count is None else {name: tensor[expert] for name, tensor in tensors.items()}
        with about(stored.stem):
            weight = stored.format.repack(own, shape)
        if not weight.scales.float().isfinite().all():
            scales = ", ".join(name for name in own if "scale" in name)
            raise CheckpointError(
                f"{stored.stem}: {scales} holds numbers that are not finite (NaN); the file is damaged"
            )
        if dtype == torch.float32:
            zeros = None if weight.zeros is None else weight.zeros.float()
            weight = replace(weight, scales=weight.scales.float(), zeros=zeros)
        yield weight


def _stacked(projections: Sequence[Sequence[StoredWeight]], dtype: torch.dtype, device: torch.device) -> PackedWeight:
    """Concatenate the rows of the projections, expert by expert, and stack the experts."""
    in_order = (sorted(each, key=lambda stored: stored.place.number or 0) for each in projections)
    by_projection = [
        [weight for stored in each for weight in packed_weights(stored, dtype, device)] for each in in_order
    ]
    if len({(weight.code, weight.group, weight.zeros is None) for each in by_projection for weight in each}) > 1:
        stem = projections[0][0].stem
        raise UnsupportedModelError(f"{stem}: gate and up are in different formats, or in different groups")
    joined = [PackedWeight.join(weights, torch.cat) for weights in zip(*by_projection, strict=True)]
    words, scales = (torch.stack([getattr(weight, part) for weight in joined]) for part in ("words", "scales"))
    zeros = [weight.zeros for weight in joined if weight.zeros is not None]
    return PackedWeight(joined[0].code, words, scales, torch.stack(zeros) if zeros else None, joined[0].group)


def load_packed(
    promised: Quantization,
    dtype: torch.dtype,
    model: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    keys: Mapping[str, str],
    conversions: list[WeightTransform],
) -> Any:
    """Fill a part of a model with these tensors, by parameter name. Modules that are stored packed become packed
    modules.

    keys: the key in the checkpoint for each name. Returns transformers' report of the load.
    """
    stems = {name.rpartition(".")[0]: key.rpartition(".")[0] for name, key in keys.items()}
    quantizer = PackedQuantizer(PackedConfig(replace(promised, renamed=stems)))
    quantizer.preprocess_model(model, dtype, checkpoint_files=())
    quantizer.stored = tensors
    mapping: list[Any] = quantizer.update_weight_conversions(conversions)
    plain = {name: tensor for name, tensor in tensors.items() if name not in quantizer.places.keys}
    config = LoadStateDictConfig(weight_mapping=mapping, hf_quantizer=quantizer)
    info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=plain, load_config=config)
    if not (info.missing_keys or info.unexpected_keys or info.mismatched_keys):
        quantizer.postprocess_model(model)
    return info
