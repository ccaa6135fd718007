"""The routers and experts of transformers' models as `route` and `apply_experts` take them: views, nothing copied.

Experts are stored alike in every family and say how (`is_transposed`, `is_concatenated`, `has_bias`); routers differ.
"""

from typing import Any

from torch import nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from specdec.layers.moe.experts import Experts
from specdec.layers.moe.routing import Router
from specdec.layers.norm import Gain
from specdec.layers.packed.packed_experts import PackedExperts

EXPERT_CLASSES = (Gemma4TextExperts, GptOssExperts, MixtralExperts, Qwen3MoeExperts)


def router_of(module: nn.Module) -> Router | None:
    """None: not a router of a family known here."""
    m: Any = module
    if isinstance(module, Gemma4TextRouter):
        gain = Gain(m.scale, m.norm.eps, round_first=True)
        options = {"gain": gain, "factor": m.scalar_root_size, "expert_scale": m.per_expert_scale}
        return Router(m.proj.weight, m.config.top_k_experts, **options)
    if not isinstance(module, GptOssTopKRouter | MixtralTopKRouter | Qwen3MoeTopKRouter):
        return None
    return Router(m.weight, m.top_k, getattr(m, "bias", None), normalised=getattr(m, "norm_topk_prob", True))


def experts_of(module: nn.Module) -> Experts | None:
    """None: not experts of a family known here, or with another activation."""
    m: Any = module
    if isinstance(module, PackedExperts):
        return module.experts
    if not isinstance(module, EXPERT_CLASSES):
        return None
    if isinstance(module, GptOssExperts):
        activation = "swiglu_clamped"
    elif isinstance(m.act_fn, GELUTanh | nn.SiLU | SiLUActivation):
        activation = "gelu_tanh" if isinstance(m.act_fn, GELUTanh) else "silu"
    else:
        return None
    gate_up, down = (p.transpose(1, 2) if m.is_transposed else p for p in (m.gate_up_proj, m.down_proj))
    return Experts(
        gate_up,
        down,
        activation,
        m.gate_up_proj_bias if m.has_bias else None,
        m.down_proj_bias if m.has_bias else None,
        interleaved=not m.is_concatenated,
        alpha=getattr(m, "alpha", 0.0),
        limit=getattr(m, "limit", 0.0),
    )
