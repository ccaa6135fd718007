"""How each family's Hugging Face text model reads as `DecoderParts`: where its weights are, and what it does to them.

A model is described only as it is: whatever the description could not say raises `Unfusable` with the reason, and the
model runs as Hugging Face wrote it. Describing a model merges its QKV and gate / up weights in place (`merge.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specdec.errors import UnsupportedModelError
from specdec.layers.decoder import DecoderParts, EmbeddingParts, LayerParts, MoeParts, PleParts
from specdec.layers.linear import Mlp, reference_activate
from specdec.layers.merge import is_merged, merge_rows
from specdec.layers.moe.moe_families import experts_of, router_of
from specdec.layers.norm import Gain
from specdec.layers.rope_store import Heads
from specdec.modules.hf_norms import fused_rms_norm
from specdec.modules.module_watch import RECORDING_HOOKS

STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Kinds of rotary embedding whose frequencies do not depend on the sequence."""

PLAIN_MODULES = frozenset(
    {"torch.nn.modules.linear", "torch.nn.modules.container", "torch.nn.modules.sparse", "torch.nn.modules.activation"}
    | {"transformers.activations"}
)
"""Where the classes inside a text model come from, besides the file of the model itself."""

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class Unfusable(UnsupportedModelError):
    """This instance does something that its fused form would not."""


Groups = list[tuple[torch.Tensor, ...]]
"""Parameters that were merged, as they are gathered."""


def describe_gemma4(model: Any) -> DecoderParts:
    """Gemma 4's text model: with or without per-layer embeddings, shared K/V, keys as values, experts beside an MLP."""
    _check_tree(model)
    merged: Groups = []
    layers = tuple(_gemma4_layer(layer, model.config.hidden_activation, merged) for layer in model.layers)
    embeddings = None
    if getattr(model, "hidden_size_per_layer_input", 0):
        embedding = model.embed_tokens_per_layer
        embeddings = EmbeddingParts(
            context=model.per_layer_model_projection.weight,
            table=embedding.weight,
            norm=_float_gain(model.per_layer_projection_norm),
            context_scale=model.per_layer_model_projection_scale,
            table_scale=float(embedding.embed_scale.to(embedding.weight.dtype)),
        )
    rotary = {}
    for kind in {layer.kind for layer in layers}:
        _check_rope(model.rotary_emb.rope_type.get(kind))
        frequencies = getattr(model.rotary_emb, f"{kind}_inv_freq")
        rotary[kind] = frequencies, float(getattr(model.rotary_emb, f"{kind}_attention_scaling"))
    return DecoderParts(
        layers=layers,
        final_norm=_float_gain(model.norm),
        rotary=rotary,
        merged=_checked(merged),
        embeddings=embeddings,
    )


def _gemma4_layer(layer: Any, activation: str, merged: Groups) -> LayerParts:
    attention = layer.self_attn
    shared = attention.is_kv_shared_layer
    heads = Heads(
        num_q=attention.q_proj.out_features // attention.head_dim,
        num_kv=0 if shared else attention.k_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        q_norm=_float_gain(attention.q_norm),
        k_norm=None if shared else _float_gain(attention.k_norm),
        v_norm=None if shared else _float_gain(attention.v_norm),
        values_are_keys=not shared and attention.v_proj is None,
    )
    projections = [attention.q_proj] if shared else [attention.q_proj, attention.k_proj, attention.v_proj]
    ple = moe = None
    if getattr(layer, "hidden_size_per_layer_input", 0):
        ple = PleParts(
            gate=layer.per_layer_input_gate.weight,
            activation=_activation(layer.act_fn, activation),
            projection=layer.per_layer_projection.weight,
            norm=_float_gain(layer.post_per_layer_input_norm),
        )
    if getattr(layer, "enable_moe_block", False):  # the unified models have no such attribute
        moe = _moe(layer.router, layer.experts)
        moe = replace(
            moe,
            input_norm=_float_gain(layer.pre_feedforward_layernorm_2),
            mlp_norm=_float_gain(layer.post_feedforward_layernorm_1),
            norm=_float_gain(layer.post_feedforward_layernorm_2),
        )
    return LayerParts(
        kind=attention.layer_type,
        heads=heads,
        scaling=attention.scaling,
        **_attention_products(attention, [p for p in projections if p is not None], merged),
        input_norm=_float_gain(layer.input_layernorm),
        attention_norm=_float_gain(layer.post_attention_layernorm),
        mlp_input_norm=_float_gain(layer.pre_feedforward_layernorm),
        mlp=_mlp(layer.mlp, activation, merged),
        mlp_norm=_float_gain(layer.post_feedforward_layernorm),
        moe=moe,
        ple=ple,
        scale=layer.layer_scalar,
    )


def describe_llama(model: Any) -> DecoderParts:
    """Llama and its kin: norm, attention, residual, norm, gated MLP or experts, residual."""
    return _describe_llama(model, _rounding_gain)


def describe_gpt_oss(model: Any) -> DecoderParts:
    """GPT-OSS: the same with attention sinks, biases, experts, and norms in float32 throughout."""
    return _describe_llama(model, lambda norm: Gain(norm.weight, norm.variance_epsilon))


def _describe_llama(model: Any, gain: Callable[[Any], Gain]) -> DecoderParts:
    _check_tree(model)
    _check_rope(model.rotary_emb.rope_type)
    merged: Groups = []
    layers = []
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        normed, mixed = hasattr(attention, "q_norm"), hasattr(mlp, "experts")
        heads = Heads(
            num_q=attention.q_proj.out_features // attention.head_dim,
            num_kv=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            q_norm=gain(attention.q_norm) if normed else None,
            k_norm=gain(attention.k_norm) if normed else None,
        )
        layers.append(
            LayerParts(
                kind="",
                heads=heads,
                scaling=attention.scaling,
                sinks=getattr(attention, "sinks", None),
                **_attention_products(attention, [attention.q_proj, attention.k_proj, attention.v_proj], merged),
                input_norm=gain(layer.input_layernorm),
                attention_norm=None,
                mlp_input_norm=gain(layer.post_attention_layernorm),
                mlp=None if mixed else _mlp(mlp, model.config.hidden_act, merged),
                mlp_norm=None,
                moe=_moe(mlp.router if hasattr(mlp, "router") else mlp.gate, mlp.experts) if mixed else None,
            )
        )
    return DecoderParts(
        layers=tuple(layers),
        final_norm=gain(model.norm),
        rotary={"": (model.rotary_emb.inv_freq, float(model.rotary_emb.attention_scaling))},
        merged=_checked(merged),
    )


def _attention_products(attention: Any, projections: list[Any], merged: Groups) -> dict[str, Any]:
    """The weights of a layer's attention, QKV merged; adds what was merged to `merged`."""
    weights = tuple(p.weight for p in projections)
    biases = tuple(p.bias for p in projections if p.bias is not None)
    if len(biases) not in (0, len(weights)):
        raise Unfusable("some of its attention projections have biases and others none")
    merged.extend([weights, biases] if biases else [weights])
    return {
        "qkv": merge_rows(weights),
        "qkv_bias": merge_rows(biases) if biases else None,
        "out": attention.o_proj.weight,
        "out_bias": attention.o_proj.bias,
    }


def _mlp(mlp: Any, activation: str, merged: Groups) -> Mlp:
    """An MLP, gate and up merged."""
    if any(linear.bias is not None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        raise Unfusable("its MLP has biases")
    merged.append((mlp.gate_proj.weight, mlp.up_proj.weight))
    return Mlp(
        gate_up=merge_rows(merged[-1]), activation=_activation(mlp.act_fn, activation), down=mlp.down_proj.weight
    )


def _moe(router: nn.Module, experts: nn.Module) -> MoeParts:
    described_router, described_experts = router_of(router), experts_of(experts)
    if described_router is None or described_experts is None:
        raise Unfusable(f"its experts ({type(experts).__name__}) compute something else than their class says")
    return MoeParts(router=described_router, experts=described_experts)


def _checked(merged: Groups) -> tuple[tuple[torch.Tensor, ...], ...]:
    """A parameter that two groups hold is merged with one of them only."""
    if not all(map(is_merged, merged)):
        raise Unfusable("some of its weights are tied to one another")
    return tuple(merged)


def _float_gain(norm: Any) -> Gain:
    """A Gemma 4 norm: in float32 throughout."""
    return Gain(norm.weight if norm.with_scale else None, norm.eps)


def _rounding_gain(norm: Any) -> Gain:
    """A Llama norm: rounded to the model's dtype before the weight."""
    return Gain(norm.weight, norm.variance_epsilon, round_first=True)


def _activation(act_fn: nn.Module, name: str) -> str:
    """The kernels' name of an activation, if it computes what its name says."""
    if name not in ACTIVATIONS:
        raise Unfusable(f"its MLP is gated by {name!r}; known: {sorted(ACTIVATIONS)}")
    x = torch.linspace(-4.0, 4.0, 33)
    if not torch.allclose(act_fn(x), reference_activate(x, ACTIVATIONS[name]), atol=1e-5):
        raise Unfusable(f"its MLP's act_fn ({type(act_fn).__name__}) is not {name!r}, as its config says")
    return ACTIVATIONS[name]


def _check_rope(rope_type: str | None) -> None:
    if rope_type not in STATIC_ROPE:
        raise Unfusable(f"its rotary embedding is of type {rope_type!r}; known: {sorted(STATIC_ROPE)}")


def _check_tree(model: nn.Module) -> None:
    """Refuse what the family's file does not contain: adapters, quantised layers, hooks; and a mix of dtypes."""
    allowed = {type(model).__module__, *PLAIN_MODULES}
    for name, module in model.named_modules():
        if type(module).__module__ not in allowed:
            raise Unfusable(f"its module {name} is a {type(module).__module__}.{type(module).__name__}")
        if not is_untouched(module):
            raise Unfusable(f"the forward of its module {name} is hooked or replaced")
    for name, param in model.named_parameters():
        if not is_plain(param):
            raise Unfusable(f"its parameter {name} is no plain tensor of floats ({type(param.data).__name__})")
        if param.device.type == "cpu" and param.is_shared():
            raise Unfusable(f"its parameter {name} is in memory that other processes share")
    kinds = {(param.dtype, param.device) for param in model.parameters()}
    if len(kinds) > 1:
        raise Unfusable(f"its parameters are of more than one dtype or device: {sorted(map(str, kinds))}")


def is_untouched(module: nn.Module) -> bool:
    """Does it run the forward of its class, and nothing else but notes that transformers takes for itself?"""
    forward = vars(module).get("forward")  # the norms of a private copy have one that is the same norm
    replaced = forward is not None and getattr(forward, "__func__", None) is not fused_rms_norm
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return not replaced and all(getattr(hook, "__module__", None) == RECORDING_HOOKS for hook in hooks)


def is_plain(param: torch.Tensor) -> bool:
    """A dense floating tensor: not quantised, not sharded."""
    return type(param.data) is torch.Tensor and param.layout == torch.strided and param.is_floating_point()
