"""The families that run fused, and how the text model of each is described as `DecoderParts`.

A family like Llama is one line of `FAMILIES`, with the differences from Llama that its modules do not show. A
description must be exact: if it cannot express a model, it raises `Unfusable` with the reason, and the model runs
transformers' modules. Describing a model merges its QKV and gate / up weights in place (`merge.py`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from specdec.layers.description.decoder_parts import DecoderParts, LayerParts, MoeParts, PleParts, Unfusable, WideNorms
from specdec.layers.description.merge import WeightGroups, are_alike
from specdec.layers.description.moe_families import ACTIVATIONS, experts_of, first_attribute, router_of
from specdec.layers.gated_delta import DeltaHeads, DeltaMixer
from specdec.layers.gemm.linear import Mlp
from specdec.layers.latent import LatentParts, LatentProduct
from specdec.layers.norm import Norm
from specdec.layers.packed.packed_modules import weight_of
from specdec.layers.per_layer_embedding import EmbeddingParts
from specdec.layers.rope_store import Heads
from specdec.modules.transformers_names import family_name

STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""RoPE types whose frequencies do not depend on the sequence."""

SCALED_EMBEDDINGS = frozenset(
    {"gemma2.Gemma2TextScaledWordEmbedding", "gemma3.Gemma3TextScaledWordEmbedding"}
    | {"gemma4.Gemma4TextScaledWordEmbedding", "gemma4_unified.Gemma4UnifiedTextScaledWordEmbedding"}
)
"""Embeddings [V, H] that are multiplied by their `embed_scale`, by `family_name`."""

GATED_DELTA = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
"""Recurrent modules with a fused form, which several families have."""

NORM_FIELDS = ("input_norm", "attention_norm", "mlp_input_norm", "mlp_norm")
NORM_NAMES = (  # of GLM-4, Gemma, Llama, OLMo 2, Cohere
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", None, "post_attention_layernorm", None),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("input_layernorm", None, None, None),
)
"""Attributes of a layer that are its norms, in the order of NORM_FIELDS. The first row that a layer has counts."""

ROUNDED = Norm(None, 0.0, round_first=True)
FLOAT = Norm(None, 0.0)
PLUS_ONE = Norm(None, 0.0, plus_one=True)
CENTRED = Norm(None, 0.0, centred=True)

UNROTATED = "unrotated"
"""The kind of layers without a rotary embedding."""


def rotates_in_windows(attention: Any) -> bool:
    """EXAONE's rule: full-attention layers use RoPE only if the model has no sliding layers."""
    return attention.sliding_window is None or bool(attention.is_sliding)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLike:
    """Llama's layer (norm, attention, residual, norm, gated MLP or experts, residual) with a family's differences.

    Other properties are read from the modules: places of norms, biases, q/k norms, experts, sinks, merged weights,
    partial rotary, multipliers of embeddings and residuals, rotary tables by kind of layer; and for Gemma 4 per-layer
    embeddings, shared K/V, keys as values, experts next to an MLP. The defaults are Llama's.

    norm_form: the form of its norms.   parallel: MLP and attention read one input.
    interleaved: RoPE rotates channels 2 j and 2 j + 1.   rotates: does a layer's attention use RoPE?
    softcaps: attention scores are capped at `attn_logit_softcapping`.   float_rotary: see `DecoderParts`.
    """

    norm_form: Norm = ROUNDED
    parallel: bool = False
    interleaved: bool = False
    rotates: Callable[[Any], bool] = lambda attention: getattr(attention, "use_rope", True)
    softcaps: bool = False
    float_rotary: bool = False

    def __call__(self, model: Any, *, unmerged: bool = False) -> DecoderParts:
        """Describe a text model. unmerged: see `WeightGroups`. Raises Unfusable."""
        merged = WeightGroups(unmerged=unmerged)
        layers = tuple(self.layer(layer, model, merged, index) for index, layer in enumerate(model.layers))
        if not merged.are_merged():
            raise Unfusable("some of its weights are tied to one another")
        return DecoderParts(
            layers=layers,
            final_norm=None if isinstance(model.norm, nn.Identity) else self.gain_of(model.norm),
            rotary=_rotary(model.rotary_emb, {layer.kind for layer in layers}),
            float_rotary=self.float_rotary,
            factor=float(getattr(model, "embedding_multiplier", 1.0)),
            embeddings=self._embeddings(model) if getattr(model, "hidden_size_per_layer_input", 0) else None,
        )

    def layer(self, layer: Any, model: Any, merged: WeightGroups, index: int) -> LayerParts:
        """Describe layer `index` of a model, or of a head with layers like a model's."""
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            mixing = described_mixer(layer.linear_attn, merged)
        else:
            mixing = self._attention(attention, model, merged, index)
        names = next(row for row in NORM_NAMES if all(name is None or hasattr(layer, name) for name in row))
        norms: dict[str, Any] = {
            field: None if name is None else self.gain_of(getattr(layer, name))
            for field, name in zip(NORM_FIELDS, names, strict=True)
        }
        has_experts = hasattr(layer.mlp, "experts")
        mlp = first_attribute([layer.mlp], "shared_experts", "shared_expert") if has_experts else layer.mlp
        return LayerParts(
            **mixing,
            **norms,
            parallel=self.parallel,
            factor=float(getattr(layer, "residual_multiplier", 1.0)),
            mlp=None if mlp is None else _mlp(mlp, merged),
            moe=self._moe(layer),
            ple=self._ple(layer) if getattr(layer, "hidden_size_per_layer_input", 0) else None,
            scale=getattr(layer, "layer_scalar", None),
        )

    def _attention(self, attention: Any, model: Any, merged: WeightGroups, index: int) -> dict[str, Any]:
        """The fields of `LayerParts` for attention."""
        products = _attention_products(attention, merged)
        is_latent = hasattr(attention, "kv_a_proj_with_mqa")
        kind = ""
        if not self.rotates(attention):
            kind = UNROTATED
        elif isinstance(model.rotary_emb.rope_type, dict):
            kind = getattr(attention, "layer_type", None) or model.config.layer_types[index]
        return {
            "kind": kind,
            "scaling": attention.scaling,
            "sinks": getattr(attention, "sinks", None),
            "softcap": attention.attn_logit_softcapping if self.softcaps else None,
            **products,
            **(self._latent(attention) if is_latent else self._heads(attention, len(products["qkv"]))),
        }

    def _heads(self, attention: Any, width: int) -> dict[str, Any]:
        """How the `width` columns of the QKV product divide, and norms over all heads of queries and keys."""
        head_dim = attention.head_dim
        v_dim: int = getattr(attention, "v_head_dim", head_dim)
        num_q = attention.o_proj.in_features // v_dim
        values_are_keys = getattr(attention, "v_proj", attention) is None
        gated = len(weight_of(attention.q_proj)) == 2 * num_q * head_dim if hasattr(attention, "q_proj") else False
        num_kv = (width - (1 + gated) * num_q * head_dim) // (head_dim if values_are_keys else head_dim + v_dim)
        heads = Heads(num_q, num_kv, head_dim, values_are_keys=values_are_keys, interleaved=self.interleaved)
        heads = heads._replace(gated=gated, narrow_v_dim=v_dim, v_scale=float(getattr(attention, "v_scale", 1.0)))
        found = (getattr(attention, name, None) for name in ("q_norm", "k_norm", "v_norm"))
        q_norm, k_norm, v_norm = (None if norm is None else self.gain_of(norm) for norm in found)
        shapes = [gain.weight.shape for gain in (q_norm, k_norm) if gain is not None and gain.weight is not None]
        if set(shapes) <= {(head_dim,)}:
            return {"heads": heads._replace(q_norm=q_norm, k_norm=k_norm, v_norm=v_norm)}
        if q_norm is not None and k_norm is not None and shapes == [(num_q * head_dim,), (num_kv * head_dim,)]:
            return {"heads": heads, "wide_norms": WideNorms(q_norm, k_norm)}
        raise Unfusable(f"its norms of queries and keys have weights {[list(shape) for shape in shapes]}")

    def _latent(self, attention: Any) -> dict[str, Any]:
        """`_heads` of latent attention, and its weights."""
        num_heads = attention.num_heads
        heads = Heads(num_heads, num_heads, attention.qk_head_dim, last=True, narrow_v_dim=attention.v_head_dim)
        q, kv = None, LatentProduct(self.gain_of(attention.kv_a_layernorm), weight_of(attention.kv_b_proj))
        if attention.q_lora_rank is not None:
            q = LatentProduct(self.gain_of(attention.q_a_layernorm), weight_of(attention.q_b_proj))
        latent = LatentParts(q, kv, attention.qk_rope_head_dim, attention.config.rope_interleave)
        return {"heads": heads, "latent": latent}

    def _moe(self, layer: Any) -> MoeParts | None:
        """Experts instead of the MLP or next to it."""
        has_dense_mlp = getattr(layer, "enable_moe_block", False)
        mixture = layer if has_dense_mlp else layer.mlp
        if not hasattr(mixture, "experts"):
            return None
        router = router_of(mixture.router if hasattr(mixture, "router") else mixture.gate, mixture)
        experts = experts_of(mixture.experts)
        if router is None or experts is None:
            kind = type(mixture.experts).__name__
            raise Unfusable(f"its experts ({kind}) compute something else than their class says")
        if not has_dense_mlp:
            gate = getattr(mixture, "shared_expert_gate", None)
            return MoeParts(router=router, experts=experts, shared_gate=None if gate is None else weight_of(gate))
        return MoeParts(
            router=router,
            experts=experts,
            input_norm=self.gain_of(layer.pre_feedforward_layernorm_2),
            mlp_norm=self.gain_of(layer.post_feedforward_layernorm_1),
            norm=self.gain_of(layer.post_feedforward_layernorm_2),
        )

    def _ple(self, layer: Any) -> PleParts:
        return PleParts(
            gate=weight_of(layer.per_layer_input_gate),
            activation=_activation(layer.act_fn),
            projection=weight_of(layer.per_layer_projection),
            norm=self.gain_of(layer.post_per_layer_input_norm),
        )

    def _embeddings(self, model: Any) -> EmbeddingParts:
        embedding = model.embed_tokens_per_layer
        return EmbeddingParts(
            context=weight_of(model.per_layer_model_projection),
            table=embedding.weight,
            norm=self.gain_of(model.per_layer_projection_norm),
            context_scale=model.per_layer_model_projection_scale,
            table_scale=float(embedding.embed_scale.to(embedding.weight.dtype)),
        )

    def gain_of(self, norm: Any) -> Norm:
        weight = norm.weight if getattr(norm, "with_scale", True) else None
        return self.norm_form._replace(weight=weight, eps=norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def _attention_products(attention: Any, merged: WeightGroups) -> dict[str, Any]:
    """The weights of a layer's attention, with QKV merged. Adds the merged weights to `merged`."""
    if hasattr(attention, "qkv_proj"):
        projections = [attention.qkv_proj]
    elif hasattr(attention, "kv_a_proj_with_mqa"):
        projections = [first_attribute([attention], "q_a_proj", "q_proj"), attention.kv_a_proj_with_mqa]
    else:
        names = ["q_proj"] if getattr(attention, "is_kv_shared_layer", False) else ["q_proj", "k_proj", "v_proj"]
        projections = [p for name in names if (p := getattr(attention, name)) is not None]
    biases = tuple(p.bias for p in projections if p.bias is not None)
    if len(biases) not in (0, len(projections)):
        raise Unfusable("some of its attention projections have biases and others none")
    gates = getattr(attention, "g_proj", None)
    if gates is not None and not attention.gate_per_head:
        raise Unfusable("what its attention gives is gated by channel")
    return {
        "head_gates": None if gates is None else weight_of(gates),
        "qkv": merged.linears(projections),
        "qkv_bias": merged.join(biases) if biases else None,
        "out": weight_of(attention.o_proj),
        "out_bias": attention.o_proj.bias,
    }


def described_mixer(module: Any, merged: WeightGroups) -> dict[str, Any]:
    """Fields of `LayerParts` for a recurrent layer: its first and last weight, and the mixer between them."""
    module = getattr(module, "source", module)  # of a stand-in (`models/recurrent_layers.py`)
    if family_name(module).partition(".")[2] not in GATED_DELTA:
        raise Unfusable(f"its recurrent layers ({type(module).__name__}) have no fused form")
    by_head = hasattr(module, "in_proj_qkvz")
    rows = [module.in_proj_qkvz] if by_head else [module.in_proj_qkv, module.in_proj_z]
    gates = [module.in_proj_ba] if by_head else [module.in_proj_b, module.in_proj_a]
    apart = not are_alike([*rows, *gates])  # quantised checkpoints keep b and a in 16 bits
    groups = module.num_k_heads if by_head else 1
    return {
        "qkv": merged.linears(rows if apart else [*rows, *gates]),
        "out": weight_of(module.out_proj),
        "mixer": DeltaMixer(
            heads=DeltaHeads(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim, groups),
            conv=module.conv1d.weight[:, 0],
            conv_bias=module.conv1d.bias,
            activation=_activation(ACT2FN[module.activation]),
            decay=module.A_log,
            step_bias=module.dt_bias,
            norm=Norm(module.norm.weight, module.norm.variance_epsilon, round_first=True),
            gates=merged.linears(gates) if apart else None,
        ),
    }


def _mlp(mlp: Any, merged: WeightGroups) -> Mlp:
    halves = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]
    if any(linear.bias is not None for linear in (*halves, mlp.down_proj)):
        raise Unfusable("its MLP has biases")
    activation = _activation(mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn)
    limit = float(getattr(mlp, "limit", torch.inf))
    return Mlp(gate_up=merged.linears(halves), activation=activation, down=weight_of(mlp.down_proj), limit=limit)


def _activation(act_fn: nn.Module) -> str:
    """The kernels' name for an activation of transformers."""
    if type(act_fn) not in ACTIVATIONS:
        known = sorted(kind.__name__ for kind in ACTIVATIONS)
        raise Unfusable(f"its MLP is gated by {type(act_fn).__name__}; known: {known}")
    return ACTIVATIONS[type(act_fn)]


def _rotary(module: Any, kinds: Iterable[str]) -> dict[str, tuple[torch.Tensor, float]]:
    """Frequencies and attention factor by kind of layer; one module may have a table for each kind."""
    tables = {}
    for kind in kinds:
        prefix, rope_type = "", module.rope_type
        if isinstance(rope_type, dict):
            prefix, rope_type = f"{kind}_", rope_type.get(kind)
        if rope_type not in STATIC_ROPE:
            raise Unfusable(f"its rotary embedding is of type {rope_type!r}; known: {sorted(STATIC_ROPE)}")
        frequencies: torch.Tensor = getattr(module, f"{prefix}inv_freq")
        factor = float(getattr(module, f"{prefix}attention_scaling"))
        tables[kind] = frequencies[:0] if kind == UNROTATED else frequencies, factor
    return tables


FAMILIES: dict[str, LlamaLike] = {
    "cohere.CohereModel": LlamaLike(norm_form=CENTRED, parallel=True, interleaved=True),
    "cohere2.Cohere2Model": LlamaLike(
        norm_form=CENTRED, parallel=True, interleaved=True, rotates=lambda a: a.sliding_window is not None
    ),
    "deepseek_v3.DeepseekV3Model": LlamaLike(),
    "ernie4_5_moe.Ernie4_5_MoeModel": LlamaLike(interleaved=True, float_rotary=True),
    "exaone4.Exaone4Model": LlamaLike(rotates=rotates_in_windows),
    "exaone_moe.ExaoneMoeModel": LlamaLike(rotates=rotates_in_windows),
    "gemma2.Gemma2Model": LlamaLike(norm_form=PLUS_ONE, softcaps=True),
    "gemma3.Gemma3TextModel": LlamaLike(norm_form=PLUS_ONE),
    "gemma4.Gemma4TextModel": LlamaLike(norm_form=FLOAT),
    "gemma4_unified.Gemma4UnifiedTextModel": LlamaLike(norm_form=FLOAT),
    "glm.GlmModel": LlamaLike(interleaved=True),
    "glm4.Glm4Model": LlamaLike(interleaved=True),
    "glm4_moe.Glm4MoeModel": LlamaLike(),
    "glm4_moe_lite.Glm4MoeLiteModel": LlamaLike(),
    "gpt_oss.GptOssModel": LlamaLike(norm_form=FLOAT),
    "granite.GraniteModel": LlamaLike(),
    "hy_v3.HYV3Model": LlamaLike(),
    "llama.LlamaModel": LlamaLike(),
    "mellum.MellumModel": LlamaLike(),
    "mimo_v2_flash.MiMoV2FlashModel": LlamaLike(),
    "mistral.MistralModel": LlamaLike(),
    "mixtral.MixtralModel": LlamaLike(),
    "olmo2.Olmo2Model": LlamaLike(norm_form=FLOAT),
    "phi3.Phi3Model": LlamaLike(),
    "qwen2.Qwen2Model": LlamaLike(),
    "qwen2_moe.Qwen2MoeModel": LlamaLike(),
    "qwen3.Qwen3Model": LlamaLike(),
    "qwen3_5.Qwen3_5TextModel": LlamaLike(norm_form=PLUS_ONE),
    "qwen3_5_moe.Qwen3_5MoeTextModel": LlamaLike(norm_form=PLUS_ONE),
    "qwen3_moe.Qwen3MoeModel": LlamaLike(),
    "qwen3_next.Qwen3NextModel": LlamaLike(norm_form=PLUS_ONE),
    "smollm3.SmolLM3Model": LlamaLike(),
    "step3p7.Step3p7TextModel": LlamaLike(norm_form=PLUS_ONE),
}
"""All text models that run fused: transformers' class -> the function that describes it for `FusedDecoder`."""
