"""Parts of a decoder of fused layers: descriptions made from Hugging Face modules, with references to their weights.

`decoder.py` runs them, `families.py` makes them or raises `Unfusable`, `split/layer_shares.py` gives each rank its
share.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec.errors import UnsupportedModelError
from specdec.layers.gated_delta import DeltaMixer
from specdec.layers.gemm.linear import Mlp
from specdec.layers.gemm.product import SplitK
from specdec.layers.latent import LatentParts
from specdec.layers.moe.experts import Experts
from specdec.layers.moe.routing import Router
from specdec.layers.norm import Norm
from specdec.layers.packed.packed_weight import BITS, PackedWeight, Weight
from specdec.layers.per_layer_embedding import EmbeddingParts
from specdec.layers.rope_store import Heads

NO_HEADS = Heads(0, 0, 0)
"""Heads of a layer without attention."""


class Unfusable(UnsupportedModelError):
    """The fused form of this model would compute something else, or there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PleParts:
    """Gemma 4's per-layer embedding in one layer: W_gate [P, H], W_proj [H, P], and the norm after them."""

    gate: Weight
    activation: str
    projection: Weight
    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeParts:
    """Experts instead of an MLP, or next to one. A shared expert is an MLP with the same input; its output, times a
    gate [1, H] if it has one, is added to the experts'. Next to an MLP of Gemma 4 (`fork_join.py`), router and experts
    read their own norms of the residual stream, and both outputs are normed separately before the sum."""

    router: Router
    experts: Experts
    shared_gate: Weight | None = None
    input_norm: Norm | None = None
    mlp_norm: Norm | None = None
    norm: Norm | None = None


class SumShare(NamedTuple):
    """A rank's share of a weight whose product sums over divided columns (`layers/split`). Either whole ranges of K
    (`split_k`), and ranks exchange their parts; or some rows, cut like the whole weight, and ranks exchange x and y."""

    split_k: SplitK
    by_rows: bool


class WideNorms(NamedTuple):
    """Norms over all heads of the queries and of the keys. With `num_ranks` ranks, over the heads of all ranks.

    kv_shares: number of parts into which K/V heads are divided; fewer than ranks if heads are repeated."""

    q: Norm
    k: Norm
    rank: int = 0
    num_ranks: int = 1
    kv_shares: int = 1


class SplitKs(NamedTuple):
    """Cuts of the weights in a rank's share of a layer, equal to those of the whole layer. down: None without an
    MLP."""

    qkv: SplitK | None = None
    out: SumShare | None = None
    down: SumShare | None = None


WHOLE = SplitKs()
"""A layer that one device has as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One decoder layer, with an MLP, experts or both. `qkv` is a merged weight (of latents if `latent` is set); `kind`
    names the rotary table. If there is a `mixer`, it runs between `qkv` and `out` instead of attention."""

    kind: str = ""
    heads: Heads = NO_HEADS
    wide_norms: WideNorms | None = None
    scaling: float = 1.0
    qkv: Weight
    qkv_bias: torch.Tensor | None = None
    latent: LatentParts | None = None
    mixer: DeltaMixer | None = None
    out: Weight
    out_bias: torch.Tensor | None = None
    input_norm: Norm | None
    attention_norm: Norm | None  # of attention's output
    mlp_input_norm: Norm | None
    mlp: Mlp | None
    mlp_norm: Norm | None  # of the MLP's output
    parallel: bool = False  # MLP and attention read the same input
    factor: float = 1.0  # multiplies both outputs
    sinks: torch.Tensor | None = None
    head_gates: Weight | None = None  # [Hq, H]
    softcap: float | None = None  # of attention scores
    moe: MoeParts | None = None
    ple: PleParts | None = None
    scale: torch.Tensor | None = None
    split_ks: SplitKs = WHOLE

    @property
    def norms_late(self) -> bool:
        """Do norms trigger late (`triton_shim.py`) for few rows too? On an H200, a plain step of Gemma 4 E4B at one
        request is 8 % faster so with FP8 weights, and 1 to 2 % slower with 4 or 16 bits."""
        return isinstance(self.qkv, PackedWeight) and BITS[self.qkv.code] == 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """Description of a decoder for its fused form.

    rotary: (frequencies, attention factor) by kind of layer; tables are float32 (`float_rotary`) or in the model's
    dtype. factor: multiplies embeddings, after their module's own factor. final_norm: None for MTP modules without one.
    """

    layers: tuple[LayerParts, ...]
    final_norm: Norm | None
    rotary: dict[str, tuple[torch.Tensor, float]]
    float_rotary: bool = False
    factor: float = 1.0
    embeddings: EmbeddingParts | None = None

    @property
    def next_norms(self) -> list[Norm | None]:
        """For each layer, the first norm of the next one. None after the last layer: the final norm is separate."""
        return [*(layer.input_norm for layer in self.layers[1:]), None]
