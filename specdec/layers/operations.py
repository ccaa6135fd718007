"""What the fused modules compute with, as one object; the choice is made once, where a model is fused.

    REFERENCE   plain torch                                    runs anywhere, and is the oracle
    KERNELS     the kernels of this folder                     a row's bits do not depend on the number of rows
    FAST        the same, the vendor's products at many rows   faster prefill and large batches, without that property

Signatures are the references' own. The references may wait for the device; the kernels never do.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from specdec.attention.backend import choose_backend
from specdec.draft_models.centroid_head import (
    centroid_best,
    centroid_sample,
    reference_centroid_best,
    reference_centroid_sample,
)
from specdec.layers.branches import Fork, fork_norm, join_norm, reference_fork_norm, reference_join_norm
from specdec.layers.embedding import embed, reference_embed
from specdec.layers.linear import (
    Product,
    finish,
    gated_linear,
    linear,
    reference_finish,
    reference_gated_linear,
    reference_linear,
    vendor_gated_linear,
    vendor_linear,
)
from specdec.layers.moe.dense_and_moe import mlp_and_experts, reference_mlp_and_experts, vendor_mlp_and_experts
from specdec.layers.moe.mixture import Routing, apply_experts, reference_apply_experts, reference_route, route
from specdec.layers.norm import norm, reference_norm
from specdec.layers.pair_norm import pair_norm, reference_pair_norm
from specdec.layers.path_rows import keep_last, path_rows, reference_keep_last, reference_path_rows
from specdec.layers.per_layer_embedding import (
    gated_projection,
    layer_inputs,
    reference_gated_projection,
    reference_layer_inputs,
)
from specdec.layers.rope_store import Attended, reference_rope_store, rope_store
from specdec.layers.rotary import Rotary, reference_rotary, rotary
from specdec.sampling.fused_sample import Best
from specdec.sampling.softcap import reference_softcap, softcap


class Operations(NamedTuple):
    linear: Callable[..., Product]
    gated_linear: Callable[..., torch.Tensor]
    finish: Callable[[Product], torch.Tensor]
    norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    fork_norm: Callable[..., Fork]
    join_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    pair_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    path_rows: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    keep_last: Callable[..., None]
    rotary: Callable[[torch.Tensor, torch.Tensor, float, torch.dtype], Rotary]
    rope_store: Callable[..., Attended]
    layer_inputs: Callable[..., torch.Tensor]
    gated_projection: Callable[..., Product]
    route: Callable[..., Routing]
    apply_experts: Callable[..., Product]
    mlp_and_experts: Callable[..., tuple[Product, Product]]
    centroid_sample: Callable[..., torch.Tensor]
    centroid_best: Callable[..., Best]
    embed: Callable[..., torch.Tensor]
    softcap: Callable[[torch.Tensor, float], torch.Tensor]


KERNELS = Operations(
    linear,
    gated_linear,
    finish,
    norm,
    fork_norm,
    join_norm,
    pair_norm,
    path_rows,
    keep_last,
    rotary,
    rope_store,
    layer_inputs,
    gated_projection,
    route,
    apply_experts,
    mlp_and_experts,
    centroid_sample,
    centroid_best,
    embed,
    softcap,
)

FAST = KERNELS._replace(linear=vendor_linear, gated_linear=vendor_gated_linear, mlp_and_experts=vendor_mlp_and_experts)

REFERENCE = Operations(
    reference_linear,
    reference_gated_linear,
    reference_finish,
    reference_norm,
    reference_fork_norm,
    reference_join_norm,
    reference_pair_norm,
    reference_path_rows,
    reference_keep_last,
    reference_rotary,
    reference_rope_store,
    reference_layer_inputs,
    reference_gated_projection,
    reference_route,
    reference_apply_experts,
    reference_mlp_and_experts,
    reference_centroid_sample,
    reference_centroid_best,
    reference_embed,
    reference_softcap,
)


def choose_operations(fused: str | bool, attention: str, device: torch.device, dtype: torch.dtype) -> Operations | None:
    """What `EngineConfig.fused` means beside `EngineConfig.attention`; None: Hugging Face's own modules.

    Raises ConfigError when attention is "triton" and the kernels cannot run here.
    """
    if not fused or (fused == "auto" and device.type != "cuda"):
        return None
    if choose_backend(attention, device, dtype, head_dim=0).name == "triton":
        return FAST
    return None if fused == "auto" else REFERENCE
