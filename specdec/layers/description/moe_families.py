"""Describes the routers and experts of transformers' models for `route` and `apply_experts`, as views without copies.

A family is a line of `MIXTURES`: how its router computes scores, and how its experts gate. Everything else is read from
the modules: the storage of experts (`is_transposed`, `is_concatenated`, `has_bias`), how many are chosen, from which
groups, with which correction, and how their weights are scaled.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import GELUTanh, ReLUSquaredActivation, SiLUActivation

from specdec.layers.moe.experts import Experts
from specdec.layers.moe.routing import Router
from specdec.layers.norm import Norm
from specdec.layers.packed.packed_modules import PackedExperts
from specdec.modules.transformers_names import family_name


class MoeTraits(NamedTuple):
    """Facts about a mixture that its modules do not show. sigmoid, float_logits: fields of `Router`. clamped: experts
    with a finite `limit` clamp both the output of `act_fn` and the gated factor. ungated: down(act(up))."""

    sigmoid: bool = False
    float_logits: bool = False
    clamped: bool = False
    ungated: bool = False


DEEPSEEK = MoeTraits(sigmoid=True, float_logits=True)

MIXTURES = {
    "deepseek_v3": DEEPSEEK,
    "ernie4_5_moe": MoeTraits(float_logits=True),
    "exaone_moe": DEEPSEEK,
    "gemma4": MoeTraits(),
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "gpt_oss": MoeTraits(),
    "hy_v3": DEEPSEEK,
    "mellum": MoeTraits(),
    "mimo_v2_flash": DEEPSEEK,
    "mixtral": MoeTraits(),
    "qwen2_moe": MoeTraits(),
    "qwen3_5_moe": MoeTraits(),
    "qwen3_moe": MoeTraits(),
    "qwen3_next": MoeTraits(),
    "step3p7": MoeTraits(sigmoid=True, clamped=True),
}
"""Folder of a family in transformers (with one router class and one experts class) -> its mixture."""

UNFUSED = (
    *("afmoe", "axk1", "cohere2_moe", "deepseek_v2", "dots1", "flex_olmo", "glm4v_moe", "hunyuan_v1_moe", "laguna"),
    *("lfm2_moe", "minimax_m2", "olmoe", "phimoe", "qwen3_omni_moe", "qwen3_vl_moe", "solar_open"),
)
"""Folders of families whose experts are those of Qwen3-MoE, and whose layers have no fused form."""

EXPERTS = MIXTURES | dict.fromkeys(UNFUSED, MoeTraits()) | {"nemotron_h": MoeTraits(ungated=True)}
"""Folder of each family whose experts are known."""

ACTIVATIONS: dict[Any, str] = {
    GELUTanh: "gelu_tanh",
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    nn.functional.silu: "silu",
}
"""The kernels' names for activations of transformers: classes of modules, and functions."""

MIN_SUM = 1e-20
"""The epsilon that DeepSeek's routers add to the divisor of weights."""


def mixture_of(module: nn.Module, ending: str) -> MoeTraits | None:
    """The mixture of a router (ending "Router") or of experts ("Experts") of transformers; None: its family is not
    known."""
    folder, _, kind = family_name(module).partition(".")
    known = MIXTURES if ending == "Router" else EXPERTS
    return known.get(folder) if kind.endswith(ending) else None


def router_of(module: nn.Module, block: nn.Module | None = None) -> Router | None:
    """The router's description; None: its family is not known. block: the module that calls it, which may hold fields
    that other routers hold themselves."""
    m: Any = module
    mixture = mixture_of(module, "Router")
    if mixture is None:
        return None
    if hasattr(m, "per_expert_scale"):
        gain = Norm(m.scale, m.norm.eps, round_first=True)
        options = {"gain": gain, "factor": m.scalar_root_size, "expert_scale": m.per_expert_scale}
        return Router(m.proj.weight, m.config.top_k_experts, **options)
    holders = [module, getattr(m, "moe_statics", None), block]
    correction: torch.Tensor | None = first_attribute(holders, "e_score_correction_bias")
    return Router(
        m.weight,
        m.top_k,
        getattr(m, "bias", None),
        normalised=getattr(m, "norm_topk_prob", True),
        sigmoid=mixture.sigmoid,
        float_logits=mixture.float_logits,
        correction=None if correction is None else correction.view(-1),
        groups=getattr(m, "num_group", 1),
        kept_groups=getattr(m, "topk_group", 1),
        min_sum=getattr(m, "norm_min", MIN_SUM if mixture.sigmoid else 0.0),
        scaling=first_attribute(holders, "routed_scaling_factor", "router_scaling_factor", default=1.0),
    )


def first_attribute(holders: list[Any], *names: str, default: Any = None) -> Any:
    found = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in found if value is not None), default)


def experts_of(module: nn.Module) -> Experts | None:
    """The experts' description; None: their family or activation is not known."""
    m: Any = module
    if isinstance(module, PackedExperts):
        return module.experts
    mixture = mixture_of(module, "Experts")
    if mixture is None:
        return None
    if mixture.ungated:
        return Experts(m.up_proj, m.down_proj, "relu2") if type(m.act_fn) is ReLUSquaredActivation else None
    limit = getattr(m, "limit", 0.0)
    activation: str | None = "swiglu_clamped"
    if hasattr(m, "act_fn"):
        activation = ACTIVATIONS.get(type(m.act_fn)) or ACTIVATIONS.get(m.act_fn)
    if mixture.clamped and limit < float("inf"):
        activation = "silu_clamped" if activation == "silu" else None
    if activation is None:
        return None
    transposed, has_bias = getattr(m, "is_transposed", False), getattr(m, "has_bias", False)
    gate_up, down = (p.transpose(1, 2) if transposed else p for p in (m.gate_up_proj, m.down_proj))
    return Experts(
        gate_up,
        down,
        activation,
        m.gate_up_proj_bias if has_bias else None,
        m.down_proj_bias if has_bias else None,
        interleaved=not getattr(m, "is_concatenated", True),
        alpha=getattr(m, "alpha", 0.0),
        limit=limit,
    )
