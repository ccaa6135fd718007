"""Loads packed weights into modules that a model's class lacks, such as MTP modules, with that model's quantiser."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform, convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from specdec.models.quantised.packed_quantizer import PackedConfig, PackedQuantizer
from specdec.models.quantised.quantization_config import Quantization
from specdec.models.quantised.stored_tensors import StoredTensor


def load_packed(
    promised: Quantization,
    dtype: torch.dtype,
    model: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    keys: Mapping[str, str],
    conversions: list[WeightTransform],
) -> Any:
    """Fill `model` with these tensors, by parameter name. Modules that are stored packed become packed modules.

    keys: the key in the checkpoint for each name. Returns transformers' report of the load.
    """
    stems = {name.rpartition(".")[0]: key.rpartition(".")[0] for name, key in keys.items()}
    quantizer = PackedQuantizer(PackedConfig(replace(promised, renamed=stems)))
    quantizer.preprocess_model(model, dtype, checkpoint_files=())
    quantizer.stored = {
        name: StoredTensor(name, tuple(t.shape), t.dtype, partial(tensors.__getitem__, name))
        for name, t in tensors.items()
    }
    mapping: list[Any] = quantizer.update_weight_conversions(conversions)
    plain = {name: tensor for name, tensor in tensors.items() if name not in quantizer.places.keys}
    config = LoadStateDictConfig(weight_mapping=mapping, hf_quantizer=quantizer)
    info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=plain, load_config=config)
    if not (info.missing_keys or info.unexpected_keys or info.mismatched_keys):
        quantizer.postprocess_model(model)
    return info
