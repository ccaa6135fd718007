"""An engine's private copy of a module tree: shared parameters and buffers, but separate modules and configs.

    user's model     modules ---- configs (sdpa, eager, ...)          never touched
                        | parameters and buffers: the same dicts, so an in-place update of the user's weights is seen
    private copy     modules ---- configs ("specdec")                 attention, norms and fused layers put in place
    once

Neither the user's objects nor any global state are changed, so any number of engines and threads can share a model.
"""

import copy
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import (
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
    use_experts_implementation,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedRMSNorm
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from specdec.modules.own_attention import ATTENTION_NAME, use_own_attention

HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]
OFFLOADING = ("_hf_hook", "_old_forward", "forward")
"""Attributes that accelerate sets on an offloaded module. They are bound to the original; a copy is never offloaded."""

GROWING_ROPE = ("dynamic", "longrope")
"""RoPE types that write new frequencies to their buffer in a long forward. At the lengths served the original
frequencies are right (`models/described_model.py`); a user's own long forward must not change them here."""

DECOMPOSED_NORMS = (Gemma4RMSNorm, Gemma4UnifiedRMSNorm)
"""Norms that transformers computes with seven operators (float, pow, mean, pow, mul, mul, cast)."""

LOOPED_EXPERTS = (Step3p7Experts,)
"""Experts that transformers runs in a loop over the chosen ones. The host reads their number, so a graph cannot capture
it."""

WITHOUT_KEYWORDS = frozenset({"StableLmDecoderLayer", "NemotronDecoderLayer"})
"""Classes of layers that pass attention their mask and none of our keywords."""


@use_experts_implementation
class _Grouped(nn.Module):
    """Receives the attributes that the installed transformers sets on experts that it groups itself."""

    def __init__(self, config: None) -> None:
        super().__init__()


OF_GROUPED = {name: value for name, value in vars(_Grouped(None)).items() if name not in {*vars(nn.Module()), "config"}}
"""Attributes of experts that the grouped products read: the layout of their weights, and other steps of their
forward."""


def grouped_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Their `forward` with grouped products, as transformers runs the experts of other families (on `meta`, which
    groups only bfloat16, with batched products)."""
    run = batched_mm_experts_forward if hidden_states.is_meta else grouped_mm_experts_forward
    return run(self, hidden_states, top_k_index, top_k_weights)


def fused_rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Their `forward` as one operator over hidden_states [..., D]: the same arithmetic in the same order, in float32.

    y = x * (mean(x^2) + eps)^(-1/2) * w,  cast back to the input's dtype
    """
    weight = self.weight.float() if self.with_scale else None
    normed = F.rms_norm(hidden_states.float(), hidden_states.shape[-1:], weight, self.eps)
    return normed.type_as(hidden_states)


OWN_FORWARDS = (fused_rms_norm, grouped_experts)
"""Replacements for the forward of these classes in a copy."""


def private_copy(module: nn.Module, attention: str = ATTENTION_NAME) -> nn.Module:
    """A copy of the tree of `module` in evaluation mode, with our attention: parameters and buffers are shared.

    Shared sub-modules stay shared, and modules that shared a config share its copy.
    """
    modules: dict[int, nn.Module] = {}
    configs: dict[int, Any] = {}

    def visit(original: nn.Module) -> nn.Module:
        if id(original) in modules:
            return modules[id(original)]
        twin: nn.Module = object.__new__(type(original))
        modules[id(original)] = twin
        state = dict(original.__dict__)
        if "_hf_hook" in state:
            state = {name: value for name, value in state.items() if name not in OFFLOADING}
        for name, value in state.items():
            if isinstance(value, PreTrainedConfig):
                state[name] = copy.deepcopy(value, configs)
            elif isinstance(value, MethodType) and value.__self__ is original:
                state[name] = MethodType(value.__func__, twin)
        state |= {name: copy.copy(state[name]) for name in HOOKS}
        state["training"] = False
        state["_compiled_call_impl"] = None  # compiled code calls the original
        if state.get("rope_type") in GROWING_ROPE:
            state["_buffers"] = {**state["_buffers"], "inv_freq": original.original_inv_freq}
            state["rope_type"] = "default"
        if isinstance(original, DECOMPOSED_NORMS):
            state["forward"] = MethodType(fused_rms_norm, twin)
        elif isinstance(original, LOOPED_EXPERTS):
            state |= {**OF_GROUPED, "forward": MethodType(grouped_experts, twin)}
        state["_modules"] = {name: None if child is None else visit(child) for name, child in original._modules.items()}
        twin.__dict__ = state
        return twin

    twin = visit(module)
    for config in text_configs(twin):
        config._attn_implementation_internal = attention
    for part in twin.modules() if attention == ATTENTION_NAME else ():
        use_own_attention(part)
        if type(part).__name__ in WITHOUT_KEYWORDS:
            part.register_forward_pre_hook(_context_as_mask, with_kwargs=True)
    return twin


def _context_as_mask(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass the context where our attention, for which transformers makes no mask, gets one."""
    return args, {**kwargs, "attention_mask": kwargs.get("specdec_ctx")}


def text_configs(module: nn.Module) -> list[Any]:
    """The distinct config objects held inside `module` that name an attention implementation."""
    found = {id(config): config for m in module.modules() if (config := getattr(m, "config", None)) is not None}
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]
