"""The quantiser with which transformers loads packed weights. transformers calls its methods in this order:

    preprocess_model            notes the model and the headers of its files
    update_weight_conversions   finds the quantised weights (`quantised_weights.py`), empties their modules
    (transformers)              loads the other tensors
    postprocess_model           reads and packs the quantised weights, module by module

A module is quantised if the checkpoint has more than plain tensors for it. No bfloat16 copy of a weight is made.
`load_packed` does the same for modules that a model's class lacks, such as MTP modules.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
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
from specdec.layers.moe.experts import Experts
from specdec.layers.packed.packed_modules import PackedExperts, PackedLinear
from specdec.layers.packed.packed_weight import PackedWeight, join_weights
from specdec.models.quantised.quantised_weights import PLAIN_TYPES, QuantisedWeights, StoredWeight
from specdec.models.quantised.quantization_config import Quantization

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
            raise CheckpointError(f"{Path(file).name} is not a safetensors file, which packed weights need")
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
        self.quantised = QuantisedWeights(self.model, weight_conversions, self.stored, self.promised)
        if not self.quantised.keys:
            packed = sorted(key for key, tensor in self.stored.items() if tensor.dtype not in PLAIN_TYPES)
            if packed:
                raise CheckpointError(
                    f"{type(self.model).__name__} has no module for its {len(packed)} quantised tensors, {packed[0]} "
                    "first; give a config.json and weights that belong together"
                )
            raise CheckpointError("its config.json says that it is quantised, but none of its tensors is")
        for path in self.quantised.by_module:
            biases = nn.Module()  # replaces it while transformers loads the rest of the model
            for name, parameter in self.model.get_submodule(path)._parameters.items():
                if name.endswith("bias"):
                    biases.register_parameter(name, parameter)
            self.model.set_submodule(path, biases)
            parent: Any = self.model.get_submodule(path.rpartition(".")[0])
            if not (parent._parameters or parent._buffers):  # nothing of its own needs to be initialised
                parent._is_hf_initialized = True  # some classes initialise weights of their modules
        loaded: Any = self.model
        self._ignored = loaded._keys_to_ignore_on_load_unexpected
        loaded._keys_to_ignore_on_load_unexpected = {""}  # every tensor has been judged
        return weight_conversions

    def postprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Read and pack the quantised weights. Afterwards nothing of the quantizer is left in the model."""
        device, loaded = model.device, cast(Any, model)
        loaded._keys_to_ignore_on_load_unexpected = self._ignored
        for path, weights in self.quantised.by_module.items():
            biases = model.get_submodule(path)._parameters
            packed = {last: list(packed_weights(stored, self.dtype, device)) for last, stored in weights.items()}
            if "weight" in packed:
                [weight] = packed["weight"]
                model.set_submodule(path, PackedLinear(weight, biases.get("bias")).eval())
            else:
                [stored, *_] = next(iter(weights.values()))
                assert stored.place.experts is not None, stored.stem
                with about(stored.stem):
                    experts = PackedExperts(_packed_experts(stored.place.experts, packed, biases))
                model.set_submodule(path, experts.eval())
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        self.stored = {}
        del self.quantised
        if device.type == "cuda":
            torch.cuda.empty_cache()  # leave the memory that packing used to the K/V

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _packed_experts(
    experts: Experts, packed: Mapping[str, list[PackedWeight]], biases: Mapping[str, torch.Tensor | None]
) -> Experts:
    """These experts with packed weights, which are given by projection."""
    rows = [packed[name] for name in ("gate_up_proj", "gate_proj", "up_proj") if name in packed]
    if len({(weight.code, weight.group, weight.zeros is None) for weight in chain.from_iterable(rows)}) > 1:
        raise UnsupportedModelError("gate and up are in different formats, or in different groups")
    joined = [join_weights(parts, torch.cat) for parts in zip(*rows, strict=True)]
    gate_up, down = (join_weights(parts, _stack) for parts in (joined, packed["down_proj"]))
    bias, down_bias = biases.get("gate_up_proj_bias"), biases.get("down_proj_bias")
    return experts._replace(gate_up=gate_up, down=down, gate_up_bias=bias, down_bias=down_bias)


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return torch.stack(list(tensors))


def packed_weights(weights: Iterable[StoredWeight], dtype: torch.dtype, device: torch.device) -> Iterator[PackedWeight]:
    """Yield a packed weight for each stored one, or for each expert, in order, for products in `dtype`. Scales keep the
    checkpoint's dtype, except that they are float32 for products in float32."""
    for stored in sorted(weights, key=lambda stored: stored.place.number or 0):
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
    plain = {name: tensor for name, tensor in tensors.items() if name not in quantizer.quantised.keys}
    config = LoadStateDictConfig(weight_mapping=mapping, hf_quantizer=quantizer)
    info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=plain, load_config=config)
    if not (info.missing_keys or info.unexpected_keys or info.mismatched_keys):
        quantizer.postprocess_model(model)
    return info
