"""Tiny random targets of every family by name, and EAGLE-3 heads for them. The cases of `bench/` use them too."""

import copy
from typing import Any

import torch
import transformers
from transformers import Gemma4TextConfig, PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.models.target import TargetModel

VOCAB = 96
WINDOW = 8
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SLIDES = {"sliding_window": WINDOW}
ALTERNATING = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], **SLIDES}
EXPERTS = {"num_experts_per_tok": 2}
PARTLY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
SPARSE = {"num_experts_per_tok": 3, "moe_intermediate_size": 16}
GROUPS = {**SPARSE, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
SLIDES_TWICE = {"layer_types": [SLIDING, FULL, SLIDING], **SLIDES}
BY_KIND = {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: {"rope_type": "default", "rope_theta": 1e5}}
TWO_ROPES = {"rope_parameters": BY_KIND}
PARTLY_BY_KIND = {"rope_parameters": {**BY_KIND, FULL: {**BY_KIND[FULL], "partial_rotary_factor": 0.5}}}
GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    **SLIDES,
}
K_IS_V = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
SHARED_KV = {
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}
TWO_OWNERS = {  # of a kind: sharers read the last
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 3,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22, "logits_scaling": 6.0}
LATENT = {  # multi-head latent attention, with V narrower than K
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "head_dim": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
RECURRENT = {
    **PARTLY,
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SHARED_EXPERT = {**SPARSE, "num_experts": 6, "shared_expert_intermediate_size": 24}
MAMBA = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "shared_intermediate_size": 24,
}
NEMOTRON = {
    "num_hidden_layers": 6,
    "layer_types": [LINEAR, "mlp", FULL, "moe", LINEAR, "mlp"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
}
CONVOLVES = {"layer_types": ["conv", "conv", FULL, "conv"], "block_auto_adjust_ff_dim": False}
QWEN2 = {**SLIDES, "use_sliding_window": True, "max_window_layers": 1}
LOW = {"query_pre_attn_scalar": 1}  # so that softcaps and sinks matter
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-e2b": ("Gemma4", {**GEMMA4, **SHARED_KV}),
    "gemma4-31b": ("Gemma4", {**GEMMA4, **K_IS_V}),
    "gemma4-moe": ("Gemma4", {**GEMMA4, **K_IS_V, **GEMMA4_EXPERTS}),
    "gemma4-unified": ("Gemma4Unified", {**GEMMA4, **K_IS_V}),  # a 12B, which transformers has in a file of its own
    "gemma3": ("Gemma3", {**SLIDES, **LOW, "num_hidden_layers": 4, "layer_types": [SLIDING] * 3 + [FULL]}),
    "gemma2": ("Gemma2", {**ALTERNATING, **LOW, "attn_logit_softcapping": 2.0}),
    "gpt_oss": ("GptOss", {**ALTERNATING, **EXPERTS, "num_local_experts": 4}),
    "llama": ("Llama", {"num_hidden_layers": 2}),
    "qwen2": ("Qwen2", QWEN2),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16}),
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4}),
    "mistral": ("Mistral", SLIDES),
    # built by tests of fused layers only
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {**SLIDES, "layer_types": [SLIDING, SLIDING, FULL], "logit_scale": 0.25}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_k": 3, "moe_num_experts": 7, "moe_intermediate_size": 16}),
    "exaone4": ("Exaone4", SLIDES_TWICE),
    "exaone_moe": ("ExaoneMoe", {**GROUPS, **SLIDES_TWICE, "num_experts": 8}),
    "glm": ("Glm", PARTLY),
    "glm4": ("Glm4", {**PARTLY, "attention_bias": True}),
    "glm4_moe": ("Glm4Moe", {**GROUPS, **PARTLY, "n_routed_experts": 12, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, **GROUPS, **DENSE_FIRST, "n_routed_experts": 8, "v_head_dim": 12}),
    "granite": ("Granite", GRANITE),
    "hy_v3": ("HYV3", {**SPARSE, "num_experts": 6}),
    "mellum": ("Mellum", {**SPARSE, **SLIDES_TWICE, **TWO_ROPES, **DENSE_FIRST, "num_experts": 6}),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {**PARTLY, **SLIDES}),
    "qwen2_moe": ("Qwen2Moe", SHARED_EXPERT),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 0]}),
    "starcoder2": ("Starcoder2", {}),  # without fused layers
    "step3p7": (
        "Step3p7",
        {
            **SPARSE,
            **SLIDES_TWICE,
            **PARTLY_BY_KIND,
            **DENSE_FIRST,
            "n_routed_experts": 6,
            "share_expert_dim": 24,
            "num_sliding_attention_heads": 6,
            "moe_router_scaling_factor": 1.5,
            "swiglu_limits": [0, 0, 0.5],
            "swiglu_limits_shared": [2, 0, 0.5],
        },
    ),
    # built by tests of cache groups only
    "deepseek_v3": ("DeepseekV3", {**LATENT, **ROUTED, "first_k_dense_replace": 1}),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {**ROUTED, **SLIDES, "head_dim": 12, "v_head_dim": 8, "layer_types": [FULL, SLIDING, SLIDING]},
    ),
    # with recurrent layers
    "qwen3_next": ("Qwen3Next", {**RECURRENT, **SHARED_EXPERT}),
    "qwen3_5": ("Qwen3_5", RECURRENT),
    "qwen3_5_moe": ("Qwen3_5Moe", {**RECURRENT, **SHARED_EXPERT}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**GRANITE, **MAMBA, **EXPERTS, "num_local_experts": 4}),
    "nemotron_h": ("NemotronH", NEMOTRON),
    "lfm2": ("Lfm2", {**CONVOLVES, "num_hidden_layers": 4, "conv_L_cache": 3}),
    "two_windows": ("Qwen2", {**QWEN2, "num_hidden_layers": 4}),
}
"""Family -> beginning of its classes in transformers, and the fields of its config besides `BASE`."""


def build_target(family: str, **overrides: Any) -> PreTrainedModel:
    """Build an untrained model of the family; `overrides` go to its text config."""
    if family == "gemma4-multimodal":
        return transformers.Gemma4ForConditionalGeneration(multimodal_config(**overrides))
    name, fields = TARGETS[family]
    text = text_fields(fields, overrides)
    if name in ("Qwen2", "Qwen2Moe", "Ernie4_5_Moe"):
        del text["head_dim"]
    if family == "step3p7":
        tower = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
        config = transformers.Step3p7Config(text_config=transformers.Step3p7TextConfig(**text), vision_config=tower)
        return transformers.Step3p7ForConditionalGeneration(config)
    kind = "TextConfig" if name in ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe") else "Config"
    config = getattr(transformers, name + kind)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config(**text))
    if family == "two_windows":
        narrower = model.model.layers[2].self_attn
        narrower.__class__, narrower.sliding_window = NarrowerAttention, text["sliding_window"] // 2 - 1
    return model


class NarrowerAttention(Qwen2Attention):
    """Attention with a narrower window than the config's, which it cuts out of the mask of all layers."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if isinstance(attention_mask, torch.Tensor):  # [1, 1, T, T], without a cache
            steps = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
            unseen = steps[:, None] - steps >= self.sliding_window
            attention_mask = attention_mask.masked_fill(unseen, torch.finfo(hidden_states.dtype).min)
        return super().forward(hidden_states, *args, attention_mask=attention_mask, **kwargs)


def text_fields(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    text = copy.deepcopy({**BASE, **fields, **overrides})  # configs write into what they are given
    if text.get("hidden_size_per_layer_input"):
        text.setdefault("vocab_size_per_layer_input", text["vocab_size"])
    return text


def multimodal_config(**overrides: Any) -> transformers.Gemma4Config:
    """Gemma 4 E2B with towers for images and sound."""
    text = text_fields({**GEMMA4, **SHARED_KV, **TWO_OWNERS}, overrides)
    tower = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = {"intermediate_size": 8, "num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 4}
    audio = {"subsampling_conv_channels": [8, 8], "output_proj_dims": 8}
    return transformers.Gemma4Config(
        text_config=Gemma4TextConfig(**text),
        vision_config=transformers.Gemma4VisionConfig(**tower, **vision),
        audio_config=transformers.Gemma4AudioConfig(**tower, **audio),
    )


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Widen the weights, sinks and norms included, so that greedy output varies; remove the end token.

    Embeddings stay small next to the layers' outputs: with a tied head they would predict their own token forever.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02 if "embed_tokens." in name else 0.45)
            elif name.endswith("sinks"):
                weight.normal_()
            elif name.endswith("A_log"):  # a state that remembers hundreds of tokens
                weight.uniform_(-7.0, -2.0)
            elif "norm" in name:
                weight.add_(torch.randn_like(weight), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model.eval()


def random_eagle3(
    model: PreTrainedModel | TargetModel, windows: tuple[int | None, ...] = (None, 6), **fields: Any
) -> Eagle3Drafter:
    """Build an EAGLE-3 drafter with a random head that drafts nine of the model's tokens. fields: of its spec. By
    default it reads the inputs of the first two layers and the output of the last."""
    target = model if isinstance(model, TargetModel) else TargetModel(model)
    torch.manual_seed(3)
    sizes = {"intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 6, "draft_vocab_size": 9}
    taps = {"aux_layers": (0, 1, len(target.layout.layers))}
    spec = Eagle3Spec(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        windows=windows,
        **sizes | taps | fields,
    )
    head = Eagle3Head(spec)
    for weight in head.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.4)
    head.target_ids = torch.randperm(target.vocab_size)[:9].sort().values
    return Eagle3Drafter(head.place(target.device, target.dtype).eval(), target)
