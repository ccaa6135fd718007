"""Describes transformers' recurrent modules for fused layers: the classes of `GATED_DELTA`.

A module may have been replaced (`models/recurrent_layers.py`); the stand-in holds it as `source`.
"""

from collections.abc import Callable
from typing import Any

from specdec.layers.fusable import Unfusable
from specdec.layers.gated_delta import DeltaHeads, DeltaMixer
from specdec.layers.merged_weights import WeightGroups, are_alike
from specdec.layers.norm import Norm
from specdec.layers.packed.packed_linear import weight_of
from specdec.modules.family_name import family_name

GATED_DELTA = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})


def described_mixer(module: Any, merged: WeightGroups, activation_of: Callable[[str], str]) -> dict[str, Any]:
    """Fields of `LayerParts` for a recurrent layer: its first and last weight, and the mixer between them.

    activation_of: converts transformers' name of an activation to the kernels'. Raises Unfusable."""
    module = getattr(module, "source", module)
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
            activation=activation_of(module.activation),
            decay=module.A_log,
            step_bias=module.dt_bias,
            norm=Norm(module.norm.weight, module.norm.variance_epsilon, round_first=True),
            gates=merged.linears(gates) if apart else None,
        ),
    }
