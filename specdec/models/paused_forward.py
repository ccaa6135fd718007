"""A target's forward that can pause between two layers, so that other work can run in between.

    walk = enter(...)  ->  walk.advance(4)  ->  ...  ->  walk.advance(walk.num_layers)  ->  walk.finish()

A fused decoder is our own loop, which can stop anywhere. A transformers decoder runs twice with stand-ins for its
layers. In the first run each stand-in notes its layer's arguments. Then the real layers are called, a few at a time. In
the second run the last stand-in returns their result. So embeddings, rotary tables and the final norm are the model's
own; the result is checked when the target is made. Invariant: no module changes, so several forwards may be in
progress.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from specdec.attention.bridge import ForwardContext
from specdec.kvcache.layer_context import EarlyExit, Narrowing
from specdec.layers.decoder import FusedDecoder
from specdec.models.probe import ProbeResult


class LayerWalk(Protocol):
    """A forward that is paused between two layers."""

    @property
    def num_layers(self) -> int: ...
    def advance(self, end: int) -> None:
        """Run the remaining layers before number `end`."""

    def finish(self) -> torch.Tensor | None:
        """After the last layer, return the decoder's last hidden state."""


Walker = Callable[[torch.Tensor, torch.Tensor, Any, Narrowing | EarlyExit | None], LayerWalk]
"""(packed ids and positions [1, T], attention context, narrowing) -> a paused forward."""


class PausedForward(NamedTuple):
    """A `TargetModel.forward` in progress. advance: see `LayerWalk`. finish: after the last layer, returns its
    result."""

    advance: Callable[[int], None]
    finish: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


def collected(context: ForwardContext, aux_layers: Sequence[int], shape: torch.Size) -> torch.Tensor | None:
    """The concatenated states that entered `aux_layers`, [B, N, A * H]; None: there are no such layers."""
    if not aux_layers:
        return None
    states = [state for layer in aux_layers if (state := context.states[layer]) is not None]
    assert len(states) == len(aux_layers), f"{len(states)} states of layers {aux_layers}"
    return torch.cat(states, dim=-1).view(*shape, -1)


def walker_of(decoder: nn.Module, proof: ProbeResult) -> Walker | None:
    """A function that starts pausable forwards of this decoder; None: it cannot pause, or the result would differ."""
    if isinstance(decoder, FusedDecoder):
        return decoder.walk
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        return None
    outline = outline_of(decoder)

    def walk(ids: torch.Tensor, positions: torch.Tensor, context: Any, narrowing: object) -> LayerWalk:
        assert narrowing is None, "layers of transformers run for every row"
        return OutlineWalk(outline, ids, positions, context)

    def run(tokens: torch.Tensor, positions: torch.Tensor, context: object) -> torch.Tensor:
        whole = walk(tokens, positions, context, None)
        for layer in range(whole.num_layers):
            whole.advance(layer + 1)
        return cast(torch.Tensor, whole.finish())

    try:
        with torch.inference_mode(), torch.autocast(proof.texts.device.type, enabled=False):
            return walk if proof.difference(run) is None else None
    except Exception:  # any error: its loop over layers is not supported
        return None


class LayerStandIn(nn.Module):
    """Replaces a layer and reports the call to the caller of the decoder."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        visit: _Visit = kwargs["specdec_ctx"]
        return visit.enter(self.layer, args, kwargs)


class _Visit:
    """Replaces the context of a forward while stand-ins are called. last: result of the last stand-in."""

    def __init__(self, num_layers: int = 0, last: torch.Tensor | None = None) -> None:
        self.calls: list[tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]] = []
        self._num_layers, self._last = num_layers, last

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        self.calls.append((layer, args, kwargs))
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        return self._last if self._last is not None and len(self.calls) == self._num_layers else hidden


def outline_of(decoder: nn.Module) -> nn.Module:
    """Returns a copy of the module with stand-ins as layers."""
    outline = copy.copy(decoder)
    layers = nn.ModuleList(LayerStandIn(layer) for layer in cast(nn.ModuleList, decoder.layers))
    outline.__dict__["_modules"] = {**decoder._modules, "layers": layers}
    return outline


class OutlineWalk:
    """A `LayerWalk` over a transformers decoder."""

    def __init__(self, outline: nn.Module, ids: torch.Tensor, positions: torch.Tensor, context: Any) -> None:
        self._outline, self._context = outline, context
        self._inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        visit = _Visit()
        outline(**self._inputs, specdec_ctx=visit)
        self._calls = visit.calls
        self._done = 0
        self._hidden: torch.Tensor | None = None  # input of the next layer; None: the first layer's own argument

    @property
    def num_layers(self) -> int:
        return len(self._calls)

    def advance(self, end: int) -> None:
        for layer, args, kwargs in self._calls[self._done : end]:
            call = {**kwargs, "specdec_ctx": self._context}
            if self._hidden is not None and args:
                args = (self._hidden, *args[1:])
            elif self._hidden is not None:
                call["hidden_states"] = self._hidden
            out = layer(*args, **call)
            self._hidden = out[0] if isinstance(out, tuple) else out
        self._done = max(self._done, end)

    def finish(self) -> torch.Tensor:
        visit = _Visit(len(self._calls), self._hidden)
        out: torch.Tensor = self._outline(**self._inputs, specdec_ctx=visit).last_hidden_state
        return out
