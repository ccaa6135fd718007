"""Random weights for a shape, made on the device that they are used on: no checkpoint, nothing on the CPU first.

Scales are such that activations stay near 1 through all layers: products keep the variance, norms are about 1, and
attention scores are about 1, since with large ones every softmax picks one key and rounding picks which.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.draft_models.base import Drafter
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter, constructible_assistants
from specdec.errors import CapacityError
from specdec.evaluation.model_shapes import Shape, Shrink
from specdec.gpu.memory import free_bytes
from specdec.models.target import TargetModel
from specdec.runtime.sizing import MEMORY_SHARE

META = torch.device("meta")
ROUTER_SCORES, MIXTURE_GAIN = 4.0, 0.5


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many numbers the two models of a shape hold."""

    target: int
    drafter: int


def count_parameters(shape: Shape, shrink: Shrink) -> Parameters:
    """Counted on `meta`, where nothing is allocated."""
    config: Any = shape.target(shrink)
    target = _target_module(config, META, torch.float32)
    drafter = _drafter_module(shape.drafter(config, shrink), META, torch.float32)
    return Parameters(*(sum(weight.numel() for weight in module.parameters()) for module in (target, drafter)))


def require_room(shape: Shape, shrink: Shrink, device: torch.device, dtype: torch.dtype) -> Parameters:
    """Raises CapacityError with the numbers where the weights leave no room on the device."""
    parameters = count_parameters(shape, shrink)
    needed = (parameters.target + parameters.drafter) * dtype.itemsize
    there = free_bytes(device)
    if needed > there * MEMORY_SHARE.get(device.type, 0.5):
        raise CapacityError(
            f"{shape.name} takes {needed / 1e9:.1f} GB of weights in {str(dtype).removeprefix('torch.')} and "
            f"{there / 1e9:.1f} GB are free on {device}, of which K/V need a part; make it smaller with --layers or "
            "--shrink, or use another device"
        )
    return parameters


def make_target(shape: Shape, shrink: Shrink, device: torch.device, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    model = _target_module(shape.target(shrink), device, dtype)
    randomise(model, seed)
    model.generation_config.eos_token_id = None  # random tokens end no text
    return model


def make_drafter(shape: Shape, shrink: Shrink, target: TargetModel, seed: int) -> Drafter:
    described = shape.drafter(target.config, shrink)
    module = _drafter_module(described, target.device, target.dtype)
    randomise(module, seed)
    if isinstance(described, Eagle3Spec):
        assert isinstance(module, Eagle3Head) and described.draft_vocab_size is not None
        head = module.place(target.device, target.dtype)
        step = described.vocab_size / described.draft_vocab_size
        ids = (torch.arange(described.draft_vocab_size, device=target.device) * step).long()  # ascending, distinct
        return Eagle3Drafter(head, ids, target)
    centroids = getattr(module, "masked_embedding", None)
    if centroids is not None:
        ordering: torch.Tensor = centroids.token_ordering
        ordering.copy_(torch.randperm(len(ordering), device=ordering.device))
    return Gemma4MTPDrafter(module, target)


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Fill every parameter in place, on its device."""
    done: set[int] = set()
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            if id(weight) in done:  # a tied head is its embedding
                continue
            done.add(id(weight))
            generator = torch.Generator(weight.device).manual_seed(seed + len(done))
            if weight.dim() > 1:
                plain = isinstance(part, nn.Embedding) and not hasattr(part, "embed_scale")
                weight.normal_(std=1.0 if plain else weight.shape[-1] ** -0.5, generator=generator)
            elif name == "sinks":
                weight.normal_(generator=generator)
            elif name.endswith("bias"):
                weight.normal_(std=0.02, generator=generator)
            else:  # gains of norms, scales of routers
                weight.normal_(mean=1.0, std=0.05, generator=generator)
    parts: list[Any] = list(module.modules())
    for part in parts:
        if getattr(part, "scaling", None) == 1.0 and hasattr(part, "q_norm"):
            part.q_norm.weight.mul_(part.head_dim**-0.5)
        if type(part).__name__.endswith("Router"):
            scores = part.proj if hasattr(part, "proj") else part
            scores.weight.mul_(ROUTER_SCORES / getattr(part, "scalar_root_size", 1.0))
        if hasattr(part, "experts") and hasattr(part, "post_feedforward_layernorm_2"):
            part.post_feedforward_layernorm_2.weight.mul_(MIXTURE_GAIN)


def _target_module(config: Any, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return model


def _drafter_module(described: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    with device:
        if isinstance(described, Eagle3Spec):
            return Eagle3Head(described).eval()
        with constructible_assistants():
            module: nn.Module = AutoModelForCausalLM.from_config(described, dtype=dtype).eval()
    return module
