"""How each family's Hugging Face text model reads as `DecoderParts`: where its weights are, and what it does to them.

A model is described only as it is: whatever the description could not say raises `Unfusable` with the reason, and the
model runs as Hugging Face wrote it. Describing a model merges its QKV and gate / up weights in place (`merge.py`).
"""

from typing import Any

import torch
from torch import nn

from specdec.attention.hf_norms import fused_rms_norm
from specdec.errors import UnsupportedModelError
from specdec.layers.decoder import DecoderParts, EmbeddingParts, LayerParts, PleParts
from specdec.layers.linear import reference_activate
from specdec.layers.merge import merge_rows
from specdec.layers.norm import Gain
from specdec.layers.rope_store import Heads

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


def describe_gemma4(model: Any) -> DecoderParts:
    """Gemma 4's text model, dense: with or without per-layer embeddings, shared K/V, keys as values."""
    config = model.config
    _check_tree(model)
    if getattr(config, "enable_moe_block", False):  # the unified models have no such field
        raise Unfusable("its layers have experts beside the MLP")
    activation = _activation(model.layers[0].mlp.act_fn, config.hidden_activation)
    merged: list[tuple[torch.Tensor, ...]] = []
    layers = []
    for layer in model.layers:
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
        ple = None
        if getattr(layer, "hidden_size_per_layer_input", 0):
            ple = PleParts(
                gate=layer.per_layer_input_gate.weight,
                projection=layer.per_layer_projection.weight,
                norm=_float_gain(layer.post_per_layer_input_norm),
            )
        layers.append(
            LayerParts(
                kind=attention.layer_type,
                heads=heads,
                scaling=attention.scaling,
                **_products(attention, [p for p in projections if p is not None], layer.mlp, merged),
                activation=activation,
                input_norm=_float_gain(layer.input_layernorm),
                attention_norm=_float_gain(layer.post_attention_layernorm),
                mlp_input_norm=_float_gain(layer.pre_feedforward_layernorm),
                mlp_norm=_float_gain(layer.post_feedforward_layernorm),
                ple=ple,
                scale=layer.layer_scalar,
            )
        )
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
        layers=tuple(layers),
        final_norm=_float_gain(model.norm),
        rotary=rotary,
        merged=tuple(merged),
        embeddings=embeddings,
    )


def describe_llama(model: Any) -> DecoderParts:
    """Llama and its kin: norm, attention, residual, norm, gated MLP, residual."""
    config = model.config
    _check_tree(model)
    _check_rope(model.rotary_emb.rope_type)
    activation = _activation(model.layers[0].mlp.act_fn, config.hidden_act)
    merged: list[tuple[torch.Tensor, ...]] = []
    layers = []
    for layer in model.layers:
        attention = layer.self_attn
        normed = hasattr(attention, "q_norm")
        heads = Heads(
            num_q=attention.q_proj.out_features // attention.head_dim,
            num_kv=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            q_norm=_rounding_gain(attention.q_norm) if normed else None,
            k_norm=_rounding_gain(attention.k_norm) if normed else None,
        )
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        layers.append(
            LayerParts(
                kind="",
                heads=heads,
                scaling=attention.scaling,
                **_products(attention, projections, layer.mlp, merged),
                activation=activation,
                input_norm=_rounding_gain(layer.input_layernorm),
                attention_norm=None,
                mlp_input_norm=_rounding_gain(layer.post_attention_layernorm),
                mlp_norm=None,
            )
        )
    return DecoderParts(
        layers=tuple(layers),
        final_norm=_rounding_gain(model.norm),
        rotary={"": (model.rotary_emb.inv_freq, float(model.rotary_emb.attention_scaling))},
        merged=tuple(merged),
    )


def _products(
    attention: Any, projections: list[nn.Linear], mlp: Any, merged: list[tuple[torch.Tensor, ...]]
) -> dict[str, Any]:
    """The weights of a layer's products, QKV and gate / up merged; adds what was merged to `merged`."""
    gate_up = (mlp.gate_proj, mlp.up_proj)
    if any(linear.bias is not None for linear in (*gate_up, mlp.down_proj)):
        raise Unfusable("its MLP has biases")
    groups = [tuple(p.weight for p in projections), tuple(p.weight for p in gate_up)]
    qkv_bias = None
    if any(p.bias is not None for p in projections):
        groups.append(tuple(p.bias for p in projections))
        qkv_bias = merge_rows(groups[2])
    merged.extend(groups)
    return {
        "qkv": merge_rows(groups[0]),
        "qkv_bias": qkv_bias,
        "out": attention.o_proj.weight,
        "out_bias": attention.o_proj.bias,
        "gate_up": merge_rows(groups[1]),
        "down": mlp.down_proj.weight,
    }


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
        forward = vars(module).get("forward")  # the norms of a private copy have one that is the same norm
        replaced = forward is not None and getattr(forward, "__func__", None) is not fused_rms_norm
        if module._forward_hooks or module._forward_pre_hooks or replaced:
            raise Unfusable(f"the forward of its module {name} is hooked or replaced")
    kinds = {(param.dtype, param.device) for param in model.parameters()}
    if len(kinds) > 1:
        raise Unfusable(f"its parameters are of more than one dtype or device: {sorted(map(str, kinds))}")
