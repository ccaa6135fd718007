"""Replaces Hugging Face modules by fused ones, which read the weights of these modules.

    fuse(text_model, KERNELS) -> a FusedDecoder over the same weights, called with the same keywords

An engine fuses its private copy, never the user's module. Classes are matched exactly (`FAMILIES`), since a subclass
may compute something else. A text model runs fused only if it contains nothing but unmodified classes of its own file
and of torch, over plain tensors.
"""

from typing import Any

import torch
from torch import nn

from specdec.gpu.operations import Operations
from specdec.layers.decoder import FusedDecoder
from specdec.layers.description.decoder_parts import DecoderParts, Unfusable
from specdec.layers.description.families import FAMILIES, SCALED_EMBEDDINGS
from specdec.layers.description.merge import merging
from specdec.layers.description.moe_families import mixture_of
from specdec.layers.embedding import embed
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import Product, finish
from specdec.layers.norm import norm
from specdec.layers.packed.packed_modules import PackedLinear, packed_of, weight_of
from specdec.layers.packed.packed_tile import runs_in_tiles
from specdec.modules.module_watch import RECORDING_HOOKS
from specdec.modules.private_copy import OWN_FORWARDS
from specdec.modules.transformers_names import family_name

PLAIN_MODULES = frozenset(
    {"torch.nn.modules.linear", "torch.nn.modules.container", "torch.nn.modules.sparse", "torch.nn.modules.activation"}
    | {"torch.nn.modules.dropout", "transformers.activations"}  # private copies do not train, so dropout does nothing
    | {PackedLinear.__module__}  # and of `PackedExperts`
    | {"torch.nn.modules.conv", "specdec.models.recurrent_layers"}  # stand-ins read recurrent modules' weights
)
"""Modules, besides the model's own file, that may define classes inside a text model."""

FLOAT_PARAMETERS = (".A_log", ".dt_bias")
"""Parameters of recurrent layers that may be float32 in a model of any dtype."""


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
        """Multiply: x [..., K] -> [..., N]."""
        rows = self.ops(linear)(x.reshape(-1, x.shape[-1]), weight_of(self.source), self.source.bias)
        return self.ops(finish)(rows).view(*x.shape[:-1], -1)


class FusedNorm(FusedModule):
    """Replaces a norm of the text model's kind."""

    def __init__(self, source: nn.Module, model: nn.Module, ops: Operations) -> None:
        super().__init__(source, ops)
        self.gain_of = FAMILIES[family_name(model)].gain_of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm the rows of x [..., H]."""
        rows = Product.from_value(x.reshape(-1, x.shape[-1]))
        return self.ops(norm)(rows, pre=self.gain_of(self.source))[1].view_as(x)


class FusedEmbedding(FusedModule):
    """Replaces an embedding, scaled or not."""

    def forward(self, tokens: torch.Tensor, right: torch.Tensor | None = None) -> torch.Tensor:
        """Embed tokens [...] -> [..., H]; with right [..., Z]: [..., H + Z], the embeddings first."""
        scale: torch.Tensor | None = getattr(self.source, "embed_scale", None)
        rows = None if right is None else right.reshape(tokens.numel(), -1)
        return self.ops(embed)(tokens.reshape(-1), self.weight, scale, rows).view(*tokens.shape, -1)


def fuse_linear(module: nn.Module, ops: Operations) -> nn.Module:
    """A module that computes the same product by `ops`; the module itself if it does more than a product."""
    known = type(module) in (nn.Linear, PackedLinear)
    plain = known and is_untouched(module) and all(map(is_dense, module.parameters()))
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
    check_tree(source)
    with merging():
        return describe(source, unmerged=unmerged)


def check_tree(model: nn.Module) -> None:
    """Refuse everything that the family's file does not contain (adapters, quantised layers, hooks) and mixed
    dtypes."""
    allowed = {type(model).__module__, *PLAIN_MODULES}
    for name, module in model.named_modules():
        if type(module).__module__ not in allowed:
            raise Unfusable(f"its module {name} is a {type(module).__module__}.{type(module).__name__}")
        if not is_untouched(module):
            raise Unfusable(f"the forward of its module {name} is hooked or replaced")
        for weight in packed_of(module):
            if not runs_in_tiles(weight):
                raise Unfusable(f"its module {name} has {weight.code} weights in groups of {weight.group} columns")
    for name, param in model.named_parameters():
        if not is_dense(param):
            raise Unfusable(f"its parameter {name} is no plain tensor of floats ({type(param.data).__name__})")
        if param.device.type == "cpu" and param.is_shared():
            raise Unfusable(f"its parameter {name} is in memory that other processes share")
    routers = (module for module in model.modules() if mixture_of(module, "Router") is not None)
    of_routers = {id(param) for router in routers for param in router.parameters()}  # some are float32
    own = {id(param) for name, param in model.named_parameters() if name.endswith(FLOAT_PARAMETERS)}
    kinds = {(param.dtype, param.device) for param in model.parameters() if id(param) not in of_routers | own}
    if len(kinds) > 1:
        raise Unfusable(f"its parameters are of more than one dtype or device: {sorted(map(str, kinds))}")


def is_untouched(module: nn.Module) -> bool:
    """Does it run the forward of its class, without hooks other than transformers' own recorders?"""
    forward = vars(module).get("forward")  # norms and experts of a private copy have an equal one
    replaced = forward is not None and getattr(forward, "__func__", None) not in OWN_FORWARDS
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return not replaced and all(getattr(hook, "__module__", None) == RECORDING_HOOKS for hook in hooks)


def is_dense(param: torch.Tensor) -> bool:
    """Is it a dense floating tensor, neither quantised nor sharded?"""
    return type(param.data) is torch.Tensor and param.layout == torch.strided and param.is_floating_point()
