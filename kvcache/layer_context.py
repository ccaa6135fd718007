"""Interface between a layer and the forward that it runs in, over T packed rows: the one that layers know of attention.

Layers know no plan, no pool and no backend. Whatever runs a forward hands them a `LayerContext`, and a `Narrowing` or
an `Ending` if the last layers run for some of the rows only, or for none.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, Required, TypedDict, Unpack

import torch

from specdec.kvcache.index_spaces import GroupLoc


class Destination(NamedTuple):
    """Pools [slots, Hkv, D] that a layer writes its new K/V to, and their slots [T], all of one group."""

    pool_k: torch.Tensor
    pool_v: torch.Tensor
    slots: GroupLoc


class ScoreOptions(TypedDict, total=False):
    """From q . k to a weight: times `scaling`, then c tanh(x / c) of `softcap` c; `sinks` [Hq]: one more logit a head,
    which has no value."""

    scaling: Required[float]
    softcap: float | None
    sinks: torch.Tensor | None


OwnRows = torch.Tensor | None
"""K or V [T, Hkv, D] of the rows themselves, stored already; None: another layer's."""


class LayerContext(Protocol):
    """A forward in progress."""

    def destination(self, layer: int) -> Destination | None:
        """Destination of this layer's new K/V; None when it stores none: it shares another's, or reads a frozen
        cache."""

    def attend_rows(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        """q [T, Hq, D] -> [T, Hq, D], contiguous."""


class SplitContext(LayerContext, Protocol):
    """A forward in progress on several ranks: the context of rank 0, and those of the other ranks."""

    @property
    def peers(self) -> Sequence[LayerContext]: ...


class Narrowing(NamedTuple):
    """The packed rows [R] that a forward continues with, in a context of their own, once the K/V of `layer` are
    stored."""

    layer: int
    rows: torch.Tensor
    context: LayerContext


class Ending(NamedTuple):
    """A forward ends once the K/V of `layer` are stored: it is run for no more."""

    layer: int
