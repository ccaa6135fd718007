"""Refuses configs, placements and stacks of layers that the runtime does not reproduce, before anything runs."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModelError

UNSUPPORTED_ATTRIBUTES = {
    "alibi": "uses ALiBi biases",
    "attention_chunk_size": "uses chunked attention",
    "index_topk": "uses sparse attention",
}
"""Config attributes that change the result in ways the runtime does not reproduce."""


DYNAMIC_INT8 = ("torch.ao.nn.quantized", "torch.nn.quantized")
"""Packages of torch's modules that quantise activations."""


def require_supported(name: str, model: PreTrainedModel, config: Any) -> None:
    """Raise UnsupportedModelError for an unsupported setting in the model's text config."""
    if getattr(model.config, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} ({type(model).__name__}) is an encoder-decoder; specdec serves decoder-only models"
        )
    for attribute, what in UNSUPPORTED_ATTRIBUTES.items():
        value = getattr(config, attribute, None)
        if value:
            raise UnsupportedModelError(f"{name} {what} ({attribute}={value}), which specdec does not support")


def require_placed(name: str, model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for weights that torch quantises dynamically, or that are not on one device."""
    for path, module in model.named_modules():
        if type(module).__module__.startswith(DYNAMIC_INT8):
            raise UnsupportedModelError(
                f"{name} is quantised dynamically (its module {path} is a {type(module).__module__}."
                f"{type(module).__name__}), which specdec does not support: activations are rounded by the batch "
                "that they are in; give the model before quantisation, or quantise its weights alone"
            )
    placement = getattr(model, "hf_device_map", None) or {}
    devices = {str(device) for device in placement.values()} | {w.device.type for w in model.parameters()}
    if devices == {"meta"}:
        raise UnsupportedModelError(f"{name} is on the meta device, without weights; load it onto a real one")
    if len(devices) > 1 or "meta" in devices:
        raise UnsupportedModelError(f"{name} is spread over {sorted(devices)}; specdec runs on one device")


def find_decoder(name: str, model: PreTrainedModel, num_layers: int) -> nn.Module:
    """The text decoder of a model: `get_decoder()`, or the decoder inside it in multimodal checkpoints. Raises
    UnsupportedModelError unless it is a stack of `num_layers` layers."""
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
