"""Interface between a layer and the forward that it runs in, over T packed tokens. Layers know nothing else of
attention.

They know no plan, no pool and no backend. The code that runs a forward gives them a `LayerContext`:

    fused layer            store K/V at `destination`, then `attend_tokens`
    transformers' layer    `attend`, which does both
    recurrent layer        `convolve`, `recur`: only forwards of models with such layers have them (`RecurrentContext`)

The same code passes a `Narrowing` if the last layers run for some rows only, or an `EarlyExit` if they run for none.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Required, TypedDict, Unpack

import torch

from specdec.kvcache.layout import GroupLoc


class Destination(NamedTuple):
    """Pools [slots, Hkv, D] that a layer writes its new K/V to, and the slots [T] to write, all of one group."""

    pool_k: Any
    pool_v: Any
    slots: GroupLoc


class ScoreOptions(TypedDict, total=False):
    """How q . k becomes a softmax logit: times `scaling`, then c tanh(x / c) for a `softcap` c. `sinks` [Hq]: one more
    logit per head, without a value."""

    scaling: Required[float]
    softcap: float | None
    sinks: torch.Tensor | None


OwnRows = torch.Tensor | None
"""K or V [T, Hkv, D] of the rows themselves, already stored; None: the layer reads the K/V of another layer."""


class AttentionCall(NamedTuple):
    """One layer's call of attention, as transformers passes it.

    query [X, Hq, T, D], key and value [X, Hkv, T, D] after RoPE, with rows packed [1, B*N] or as a batch [B*N, 1];
    sinks [Hq] or None; extra: all other keywords.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    sliding_window: int | None
    sinks: torch.Tensor | None
    softcap: float | None
    extra: dict[str, Any]


class Recurrence(NamedTuple):
    """Inputs of the recurrence for T rows: q and k [T, HK, DK], v [T, HV, DV], log decays g [T, HV], and beta [T, HV]
    of the delta rule (None: the layer has no delta rule). HV is a multiple of HK."""

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
        """Causal convolution of each channel: inputs [T, C], weight [C, K], the newest tap last -> [T, C]."""

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        """Run the recurrence over these rows -> [T, HV, DV] float32."""


class LayerContext(Protocol):
    """A forward in progress. Unless a subclass says otherwise, it stores no K/V and runs on one device."""

    __slots__ = ()

    @property
    def other_ranks(self) -> Sequence["LayerContext"]:
        """On the context of rank 0: those of the other ranks that run the forward."""
        return ()

    def destination(self, layer: int) -> Destination | None:
        """Destination of this layer's new K/V. None if it stores none: it shares another layer's K/V, or the cache is
        frozen."""
        return None

    def store(self, destination: Destination, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [T, Hkv, D] to a destination."""
        raise AssertionError(f"{type(self).__name__} has no destination")

    @abstractmethod
    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        """Attend: q [T, Hq, D] -> [T, Hq, D], contiguous."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the call's K/V, then attend -> [X, T, Hq, D]."""
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (call.query, call.key, call.value))
        destination = self.destination(call.layer)
        if destination is not None:
            self.store(destination, k, v)
        out = self.attend_tokens(call.layer, q, k, v, scaling=call.scaling, softcap=call.softcap, sinks=call.sinks)
        return out.view(len(call.query), -1, *out.shape[1:])


class Narrowing(NamedTuple):
    """The packed tokens [R] with which the forward continues once the K/V of `layer` are stored, and their own
    context."""

    layer: int
    rows: torch.Tensor
    context: LayerContext


class EarlyExit(NamedTuple):
    """The forward ends once the K/V of `layer` are stored, since no later result is needed."""

    layer: int
