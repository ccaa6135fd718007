"""Finds the text stack of a model."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModelError


def find_decoder(name: str, model: PreTrainedModel, num_layers: int) -> nn.Module:
    """`get_decoder()`, or what lies inside it in multimodal checkpoints. Raises UnsupportedModelError unless it is a
    stack of `num_layers` layers."""
    decoder: Any = model.get_decoder()
    while getattr(decoder, "layers", None) is None:
        inner = getattr(decoder, "language_model", None)
        inner = decoder.get_decoder() if inner is None and hasattr(decoder, "get_decoder") else inner
        if inner is None or inner is decoder:
            break
        decoder = inner
    if len(getattr(decoder, "layers", None) or ()) != num_layers:
        raise UnsupportedModelError(f"{name}: {type(decoder).__name__} is not a stack of {num_layers} decoder layers")
    found: nn.Module = decoder
    return found
