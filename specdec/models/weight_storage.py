"""Size of a model's weights in memory. Packed weights are buffers, which `parameters()` omits."""

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.layers.packed.packed_experts import packed_of
from specdec.layers.packed.packed_weight import PackedWeight


class StoredWeights(NamedTuple):
    """Storage of a model's weights.

    numbers: number of weights. form: format of packed weights, with the columns per scale; empty: none are packed.
    """

    numbers: int
    bytes: int
    form: str

    def words(self, dtype: torch.dtype) -> str:
        """Describe the storage in words. dtype: of weights that are not packed."""
        return f"{self.form}, the rest {_name(dtype)}" if self.form else _name(dtype)


def stored_weights(*models: nn.Module) -> StoredWeights:
    """Count the weights of several models together; shared weights count once."""
    parameters = {weight for model in models for weight in model.parameters()}
    modules = (module for model in models for module in model.modules())
    packed = {id(weight.words): weight for module in modules for weight in packed_of(module)}.values()
    return StoredWeights(
        sum(weight.numel() for weight in parameters) + sum(weight.shape.numel() for weight in packed),
        sum(weight.nbytes for weight in parameters) + sum(weight.nbytes for weight in packed),
        " and ".join(sorted({_form(weight) for weight in packed})),
    )


def is_quantised(model: PreTrainedModel) -> bool:
    """Whether specdec or transformers runs weights of the model from a quantised form."""
    return getattr(model, "hf_quantizer", None) is not None or bool(stored_weights(model).form)


def weights_in_words(model: PreTrainedModel) -> str:
    """Storage and size of a model's weights, as the log says it."""
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:  # its tensors may not tell their bytes
        method = quantizer.quantization_config.quant_method
        return f"{getattr(method, 'value', method)} as transformers runs it, the rest {_name(model.dtype)}"
    stored = stored_weights(model)
    size = f"{stored.bytes / 1e9:.1f} GB" if stored.bytes >= 1e9 else f"{stored.bytes / 1e6:.0f} MB"
    return f"{stored.words(model.dtype).replace('-g', ' in groups of ')} ({size})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _form(weight: PackedWeight) -> str:
    if weight.code == "e2m1":
        return "mxfp4"
    if weight.code == "e4m3":
        return "fp8" if weight.has_row_scales else f"fp8-g{weight.group}"
    return f"int4-g{weight.group}"
