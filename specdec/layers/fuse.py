"""Replaces Hugging Face modules by fused ones, which read the weights of these modules.

    fuse(text_model, KERNELS) -> a FusedDecoder over the same weights, called with the same keywords

An engine fuses its private copy, never the user's module. Classes are matched exactly (`FAMILIES`), since a subclass
may compute something else.
"""

import logging
from typing import Any

import torch
from torch import nn

from specdec.gpu.operations import Operations
from specdec.layers.decoder import FusedDecoder
from specdec.layers.description.decoder_parts import DecoderParts
from specdec.layers.description.families import FAMILIES, SCALED_EMBEDDINGS
from specdec.layers.description.fusable import Unfusable, is_dense, is_untouched
from specdec.layers.description.merge import merging
from specdec.layers.embedding import embed
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import Product, finish
from specdec.layers.norm import norm
from specdec.layers.packed.packed_modules import PackedLinear, weight_of
from specdec.modules.transformers_names import family_name

logger = logging.getLogger("specdec")


def fuse(source: nn.Module, ops: Operations) -> FusedDecoder:
    """The fused replacement of a text model. Raises Unfusable, with the reason as a clause."""
    embedding = fuse_embedding(source.get_input_embeddings(), ops)  # type: ignore[operator]
    return FusedDecoder(source, embedding, describe_decoder, ops)


class FusedModule(nn.Module):
    """Replaces a module, and reads the module's weights at each call."""

    def __init__(self, source: nn.Module, ops: Operations) -> None:
        super().__init__()
        self.source: Any = source
        self.ops = ops

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.source.weight
        return weight


class FusedLinear(FusedModule):
    """Replaces an `nn.Linear` or a `PackedLinear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        rows = self.ops(linear)(x.reshape(-1, x.shape[-1]), weight_of(self.source), self.source.bias)
        return self.ops(finish)(rows).view(*x.shape[:-1], -1)


class FusedNorm(FusedModule):
    """Replaces a norm of the text model's kind."""

    def __init__(self, source: nn.Module, model: nn.Module, ops: Operations) -> None:
        super().__init__(source, ops)
        self.gain_of = FAMILIES[family_name(model)].gain_of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] -> [..., H]."""
        rows = Product.from_value(x.reshape(-1, x.shape[-1]))
        return self.ops(norm)(rows, pre=self.gain_of(self.source))[1].view_as(x)


class FusedEmbedding(FusedModule):
    """Replaces an embedding, scaled or not."""

    def forward(self, tokens: torch.Tensor, right: torch.Tensor | None = None) -> torch.Tensor:
        """tokens [...] -> [..., H]; with right [..., Z]: [..., H + Z], the embeddings first."""
        scale: torch.Tensor | None = getattr(self.source, "embed_scale", None)
        rows = None if right is None else right.reshape(tokens.numel(), -1)
        return self.ops(embed)(tokens.reshape(-1), self.weight, scale, rows).view(*tokens.shape, -1)


def fuse_linear(module: nn.Module, ops: Operations) -> nn.Module:
    """A module that computes the same product by `ops`; the module itself if it does more than a product."""
    plain = (
        type(module) in (nn.Linear, PackedLinear) and is_untouched(module) and all(map(is_dense, module.parameters()))
    )
    return FusedLinear(module, ops) if plain else module


def fuse_embedding(module: nn.Module, ops: Operations) -> nn.Module:
    """A module that looks up the same rows by `ops`; the module itself if it is no known embedding or does more."""
    known = type(module) is nn.Embedding or family_name(module) in SCALED_EMBEDDINGS
    if not known or not isinstance(module, nn.Embedding):
        return module
    plain = is_untouched(module) and is_dense(module.weight) and module.weight.is_contiguous()
    return FusedEmbedding(module, ops) if plain and module.max_norm is None else module


def describe_decoder(source: nn.Module, *, unmerged: bool = False) -> DecoderParts:
    """Describe a text model for its fused form. unmerged: merge nothing, for ranks, which take slices. Raises
    Unfusable, with the reason as a clause."""
    describe = FAMILIES.get(family_name(source))
    if describe is None:
        known = ", ".join(sorted(name.partition(".")[2] for name in FAMILIES))
        raise Unfusable(f"{type(source).__name__} has no fused form; {known} have one")
    with merging():
        return describe(source, unmerged=unmerged)
