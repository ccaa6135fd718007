"""Interface between a layer and the forward that it runs in, over T packed rows: all that layers know of attention.

Layers know no plan, no pool and no backend. Whatever runs a forward hands them a `LayerContext`, and a `Narrowing` or
an `EarlyExit` if the last layers run for some of the rows only, or for none.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Required, TypedDict, Unpack

import torch

from specdec.kvcache.index_spaces import GroupLoc


class Destination(NamedTuple):
    """Pools [slots, Hkv, D] that a layer writes its new K/V to, and their slots [T], all of one group."""

    pool_k: Any
    pool_v: Any
    slots: GroupLoc


class ScoreOptions(TypedDict, total=False):
    """From q . k to a weight: times `scaling`, then c tanh(x / c) of `softcap` c; `sinks` [Hq]: one more logit a head,
    which has no value."""

    scaling: Required[float]
    softcap: float | None
    sinks: torch.Tensor | None


OwnRows = torch.Tensor | None
"""K or V [T, Hkv, D] of the rows themselves, stored already; None: another layer's."""


class Recurrence(NamedTuple):
    """Inputs of the recurrence for T rows: q and k [T, HK, DK], v [T, HV, DV], log decays g [T, HV], and beta [T, HV],
    by which records are corrected; None: they are not. HV is a multiple of HK."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor | None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Recurrence":
        return Recurrence(*(None if x is None else function(x) for x in self))  # type: ignore[arg-type]


class RecurrentContext(Protocol):
    """A forward in progress, as recurrent layers see it: each of T rows follows its own path."""

    def convolve(
        self, layer: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """A causal convolution a channel: inputs [T, C], weight [C, K], the newest last -> [T, C]."""

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        """Run the recurrence over these rows -> [T, HV, DV] float32."""


class LayerContext(Protocol):
    """A forward in progress."""

    def destination(self, layer: int) -> Destination | None:
        """Destination of this layer's new K/V; None when it stores none: it shares another's, or reads a frozen
        cache."""

    def attend_rows(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        """Attend: q [T, Hq, D] -> [T, Hq, D], contiguous."""


class SplitContext(LayerContext, Protocol):
    """A forward in progress on several ranks: the context of rank 0, and those of the other ranks."""

    @property
    def other_ranks(self) -> Sequence[LayerContext]: ...


class Narrowing(NamedTuple):
    """The packed rows [R] that a forward continues with, in a context of their own, once the K/V of `layer` are
    stored."""

    layer: int
    rows: torch.Tensor
    context: LayerContext


class EarlyExit(NamedTuple):
    """The forward ends once the K/V of `layer` are stored, since no later result is needed."""

    layer: int
