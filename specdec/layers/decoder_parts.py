"""Parts of a decoder of fused layers: descriptions read off Hugging Face modules, whose weights they hold.

`decoder.py` runs them, `families.py` makes them, `split/layer_shares.py` gives each rank its share.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from specdec.gpu.operations import Operations
from specdec.kvcache.layer_context import RecurrentContext
from specdec.layers.latent import LatentParts
from specdec.layers.linear import Mlp
from specdec.layers.moe.experts import Experts
from specdec.layers.moe.routing import Router
from specdec.layers.norm import Norm
from specdec.layers.packed.packed_weight import Weight
from specdec.layers.per_layer_embedding import EmbeddingParts
from specdec.layers.product import Cut, Product
from specdec.layers.rope_store import Heads

NO_HEADS = Heads(0, 0, 0)
"""Heads of a layer without attention."""


class FusedMixer(Protocol):
    """The part of a recurrent layer that replaces attention, between its first product and its last."""

    def run(
        self, product: Product, x: torch.Tensor, layer: int, context: RecurrentContext, ops: Operations
    ) -> tuple[torch.Tensor, ...]:
        """product [T, N] of x [T, H] by the layer's first weight -> tensors of T rows, which `finish` reads."""

    def finish(self, rows: tuple[torch.Tensor, ...], ops: Operations) -> torch.Tensor:
        """Some rows of what `run` returns [R, ...] -> what the last product reads [R, K]."""

    @property
    def sections(self) -> list[int]:
        """Rows of the layer's first weight, in sections of which each rank has an equal part."""

    def obstacle(self, count: int) -> str | None:
        """Why `count` ranks cannot divide its heads, as the end of a sentence."""

    def share(self, rank: int, count: int) -> "FusedMixer":
        """The heads of one rank; weights are views, in pieces (`StackedWeights`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PleParts:
    """Gemma 4's per-layer embedding in one layer: W_gate [P, H], W_proj [H, P], the norm after them."""

    gate: Weight
    activation: str
    projection: Weight
    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeParts:
    """Experts in the place of an MLP, or next to one that reads what they read, a shared expert: it is added to them,
    times a gate [1, H] where it has one. Or next to an MLP of Gemma 4 (`fork_join.py`): then router and experts read
    norms of the residual stream of their own, and what both add is normed each for itself before the sum."""

    router: Router
    experts: Experts
    shared_gate: Weight | None = None
    input_norm: Norm | None = None
    mlp_norm: Norm | None = None
    norm: Norm | None = None


class SumShare(NamedTuple):
    """What a rank has of a weight over whose columns a product sums (`layers/split`): whole ranges of K, as `cut`
    says, whose parts ranks exchange; or rows of it, cut as the whole weight: then ranks exchange x and y."""

    cut: Cut
    by_rows: bool


class WideNorms(NamedTuple):
    """Norms over all heads of the queries, and of the keys: of one of `num_ranks`, over those of all ranks.

    kv_shares: parts in which ranks hold the K/V heads; fewer than ranks where heads are repeated."""

    q: Norm
    k: Norm
    rank: int = 0
    num_ranks: int = 1
    kv_shares: int = 1


class Cuts(NamedTuple):
    """How the weights of one rank's share of a layer are cut: as in the whole layer. down: None without an MLP."""

    qkv: Cut
    out: SumShare
    down: SumShare | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One decoder layer, with an MLP, experts or both. `qkv` is a merged weight, of latents where there is `latent`;
    `kind` names its rotary table. Where there is a `mixer`, that runs between `qkv` and `out`, and not attention."""

    kind: str = ""
    heads: Heads = NO_HEADS
    wide_norms: WideNorms | None = None
    scaling: float = 1.0
    qkv: Weight
    qkv_bias: torch.Tensor | None = None
    latent: LatentParts | None = None
    mixer: FusedMixer | None = None
    out: Weight
    out_bias: torch.Tensor | None = None
    input_norm: Norm | None
    attention_norm: Norm | None  # on what attention adds
    mlp_input_norm: Norm | None
    mlp: Mlp | None
    mlp_norm: Norm | None  # on what the MLP adds
    parallel: bool = False  # the MLP reads what attention reads
    factor: float = 1.0  # of what each of the two adds
    sinks: torch.Tensor | None = None
    head_gates: Weight | None = None  # [Hq, H]
    softcap: float | None = None  # of attention scores
    moe: MoeParts | None = None
    ple: PleParts | None = None
    scale: torch.Tensor | None = None
    cuts: Cuts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """Description of a decoder for its fused form.

    rotary: (frequencies, attention factor) by kind of layer, whose tables are float32 (`float_rotary`) or in the
    model's dtype. factor: of embeddings, after their module's own. final_norm: None for MTP modules without one.
    """

    layers: tuple[LayerParts, ...]
    final_norm: Norm | None
    rotary: dict[str, tuple[torch.Tensor, float]]
    float_rotary: bool = False
    factor: float = 1.0
    embeddings: EmbeddingParts | None = None

    @property
    def next_norms(self) -> list[Norm | None]:
        """Norm after each layer, with which the next one begins. After the last it is None: the final norm follows
        apart."""
        return [*(layer.input_norm for layer in self.layers[1:]), None]
