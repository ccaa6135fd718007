"""Replaces Hugging Face modules by fused ones, and follows later changes of their weights.

    fuse(text_model, KERNELS) -> a FusedDecoder over the same weights, called with the same keywords

An engine fuses its private copy, never the user's module. Classes are matched exactly (`FAMILIES`), since a subclass
may compute something else. Describing a model merges weights in place, one thread at a time.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from specdec.errors import UnsupportedModelError
from specdec.gpu.operations import Operations
from specdec.layers.decoder import FusedDecoder
from specdec.layers.decoder_parts import DecoderParts
from specdec.layers.embedding import embed
from specdec.layers.families import FAMILIES, SCALED_EMBEDDINGS
from specdec.layers.fusable import Unfusable, is_dense, is_untouched
from specdec.layers.linear import linear
from specdec.layers.merge import MERGING, StorageWatch
from specdec.layers.norm import norm
from specdec.layers.packed.packed_linear import PackedLinear, weight_of
from specdec.layers.product import Product, finish
from specdec.modules.family_name import family_name
from specdec.modules.module_watch import ModuleWatch
from specdec.modules.weights_lock import holds_weights_lock

logger = logging.getLogger("specdec")


def fuse(source: nn.Module, ops: Operations) -> FusedDecoder:
    """The fused replacement of a text model. Raises Unfusable, with the reason as a clause."""
    embedding = fuse_embedding(source.get_input_embeddings(), ops)  # type: ignore[operator]
    return FusedDecoder(source, embedding, describe_decoder(source), ops)


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


class Weights:
    """The weights that one or more modules read. Other code may re-point them at any time.

    Ask for `generation` before each forward: if weights have moved, a fused decoder is described again. A holder of
    addresses, such as a captured graph, remembers its generation.

    original: the user's modules, if the modules are a private copy. If these change (another active adapter, a hook, a
    replaced sub-module), `copy_again` replaces the copy and returns its weights.
    split: ranks have copies of the weights, so after any change every look raises UnsupportedModelError.
    """

    def __init__(
        self,
        name: str,
        *modules: nn.Module,
        original: ModuleWatch | None = None,
        copy_again: Callable[[], "Weights"] | None = None,
        split: bool = False,
    ) -> None:
        self.name = name
        self._original, self._copy_again = original, copy_again
        self._stale = False  # the private copy differs from the user's modules
        self._in_sync = True
        self._generation = 0
        self._lock = threading.Lock()
        self._modules = modules
        self._decoders = [m for root in modules for m in root.modules() if isinstance(m, FusedDecoder)]
        self._watch = StorageWatch(*modules)
        self._placement, self._sizes = self._where(), self._shapes()
        self._split_at = self.updates() if split else None

    @holds_weights_lock()
    def generation(self) -> int:
        """A number that is incremented if weights have moved or modules were copied again. Raises UnsupportedModelError
        while the weights have another dtype or device, for which K/V would not fit, or if the modules cannot be served.
        """
        with self._lock:
            if self._original is not None and self._original.changed():
                self._stale = True
            return self._sync()

    @holds_weights_lock()
    def find_hidden_changes(self) -> None:
        """Find changes that `generation` has no time to look for: see `ModuleWatch.differs`. Modules that may have
        changed without a trace are copied again. Raises like `generation`."""
        with self._lock:
            if self._original is not None and (self._original.untraceable or self._original.differs()):
                self._stale = True
            self._sync()

    def updates(self) -> object:
        """A value that changes whenever the weights that `generation` last found are changed in place: see
        `StorageWatch.versions`. If they have no version counters, each call returns another value."""
        return self._watch.versions() if self._watch.counts_updates() else object()

    def counts_updates(self) -> bool:
        """Are in-place updates visible? Not for tensors made under `torch.inference_mode()`."""
        return self._watch.counts_updates()

    def _sync(self) -> int:
        if self._watch.moved():
            self._in_sync = False
            self._stale |= self._sizes != self._shapes()
        if self._split_at is not None:
            updated = self.counts_updates() and self.updates() != self._split_at
            if updated or self._stale or not self._in_sync:
                raise UnsupportedModelError(
                    f"the weights of {self.name} changed after they were split over several devices, which have "
                    "copies; make a new engine"
                )
        if self._stale and self._copy_again is not None:
            new = self._copy_again()
            self._original, self._modules, self._decoders = new._original, new._modules, new._decoders
            self._watch, self._placement, self._sizes = new._watch, new._placement, new._sizes
            self._stale, self._in_sync = False, True
            self._generation += 1
        if not self._in_sync:
            self._adopt()
            self._in_sync = True
            self._generation += 1
        return self._generation

    def _adopt(self) -> None:
        now = self._where()
        if now != self._placement:
            raise UnsupportedModelError(
                f"the weights of {self.name} are {_shown(now)} now, and were {_shown(self._placement)} when its engine "
                "was made; make a new one, or move them back"
            )
        for decoder in self._decoders:
            try:
                decoder.adopt(describe_decoder(decoder.source))
            except Unfusable as reason:
                raise UnsupportedModelError(
                    f"the weights of {self.name} were replaced by others that its fused layers cannot run ({reason}); "
                    "make a new engine"
                ) from reason
        self._watch.moved()  # the merge has just moved them

    def _shapes(self) -> list[torch.Size]:
        return [param.shape for module in self._modules for param in module.parameters()]

    def _where(self) -> set[tuple[torch.dtype, torch.device]]:
        return {(param.dtype, param.device) for module in self._modules for param in module.parameters()}


def _shown(placement: set[tuple[torch.dtype, torch.device]]) -> str:
    return " and ".join(sorted(f"{dtype} on {device}" for dtype, device in placement))


@holds_weights_lock()
def describe_decoder(source: nn.Module, *, unmerged: bool = False) -> DecoderParts:
    """Describe a text model for its fused form. unmerged: merge nothing, for ranks, which take slices. Raises
    Unfusable, with the reason as a clause."""
    describe = FAMILIES.get(family_name(source))
    if describe is None:
        known = ", ".join(sorted(name.partition(".")[2] for name in FAMILIES))
        raise Unfusable(f"{type(source).__name__} has no fused form; {known} have one")
    # in inference mode a parameter's data cannot be replaced
    with MERGING, torch.inference_mode(False), torch.no_grad():
        return describe(source, unmerged=unmerged)


def watched_weights(target: Any, drafter: Any) -> list[Weights]:
    """The weights of a target, and of a drafter if it has any."""
    drafts = getattr(drafter, "weights", None)
    return [target.weights] if drafts is None else [target.weights, drafts]


def updates_are_counted(target: Any, drafter: Any) -> bool:
    """Does every update of these weights change `Weights.updates`? Logs a warning if not."""
    blind = [weights.name for weights in watched_weights(target, drafter) if not weights.counts_updates()]
    if blind:
        logger.warning(
            "%s: weights that were made under torch.inference_mode() do not count their updates, so no K/V are "
            "kept for later requests; load the model outside of it, or set prefix_cache=False",
            " and ".join(blind),
        )
    return not blind
