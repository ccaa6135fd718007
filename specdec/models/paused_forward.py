"""A target's forward that can pause between two layers, so that other work can run in between.

    paused = start(...)  ->  paused.advance(4)  ->  ...  ->  paused.advance(number of layers)  ->  paused.finish()

`start_forward_of` returns `start`. A fused decoder is our own loop, which can stop anywhere. A transformers decoder
runs twice with stand-ins for its layers. In the first run each stand-in notes its layer's arguments. Then the real
layers are called, a few at a time. In the second run the last stand-in returns their result. So embeddings, rotary
tables and the final norm are the model's own; the result is checked when the target is made. Invariant: no module
changes, so several forwards may be in progress.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from specdec.attention.bridge import ForwardContext
from specdec.kvcache.layer_context import EarlyExit, Narrowing
from specdec.layers.decoder import FusedDecoder, PausedDecoder
from specdec.models.probe import ProbeResult
from specdec.models.probe_context import ProbeContext
from specdec.modules.transformers_names import layers_of


def collected(
    context: ForwardContext | ProbeContext, aux_layers: Sequence[int], shape: torch.Size
) -> torch.Tensor | None:
    """The concatenated states that entered `aux_layers`, [B, N, A * H]; None: there are no such layers."""
    if not aux_layers:
        return None
    states = [state for layer in aux_layers if (state := context.states[layer]) is not None]
    assert len(states) == len(aux_layers), f"{len(states)} states of layers {aux_layers}"
    return torch.cat(states, dim=-1).view(*shape, -1)


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
        paused: PausedOutline = kwargs["specdec_ctx"]
        return paused.enter(self.layer, args, kwargs)


def outline_of(decoder: nn.Module) -> nn.Module:
    """Returns a copy of the module with stand-ins as layers."""
    outline, layers = copy.copy(decoder), layers_of(decoder)
    stand_ins = nn.ModuleList(map(LayerStandIn, layers or ()))
    parts = {name: stand_ins if part is layers else part for name, part in decoder._modules.items()}
    outline.__dict__["_modules"] = parts
    return outline


class PausedOutline:
    """A forward of a transformers decoder that is paused between two layers. Stand-ins get it in place of the
    context."""

    def __init__(self, outline: nn.Module, ids: torch.Tensor, positions: torch.Tensor, context: Any) -> None:
        self._outline, self._context = outline, context
        self._inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        self._calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._hidden: torch.Tensor | None = None  # input of the next layer; None: the first layer's own argument
        outline(**self._inputs, specdec_ctx=self)
        self._done = 0

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Called in place of each layer. The first run notes the call; the second returns the last layer's result,
        which no stand-in changes."""
        if self._hidden is not None:
            return self._hidden
        self._calls.append((layer, args, {**kwargs, "specdec_ctx": self._context}))
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden

    def advance(self, end: int) -> None:
        """Run the remaining layers before number `end`."""
        for layer, args, kwargs in self._calls[self._done : end]:
            if self._hidden is not None and args:
                args = (self._hidden, *args[1:])
            elif self._hidden is not None:
                kwargs["hidden_states"] = self._hidden
            out = layer(*args, **kwargs)
            self._hidden = out[0] if isinstance(out, tuple) else out
        self._done = max(self._done, end)

    def finish(self) -> torch.Tensor:
        """After the last layer, return the decoder's last hidden state."""
        out: torch.Tensor = self._outline(**self._inputs, specdec_ctx=self).last_hidden_state
        return out


PausedLayers = PausedDecoder | PausedOutline
"""A forward that is paused between two layers."""
StartForward = Callable[[torch.Tensor, torch.Tensor, Any, Narrowing | EarlyExit | None], PausedLayers]
"""(packed ids and positions [1, T], attention context, narrowing) -> a paused forward."""


def start_forward_of(decoder: nn.Module, proof: ProbeResult) -> StartForward | None:
    """A function that starts pausable forwards of this decoder; None: it cannot pause, or the result would differ."""
    if isinstance(decoder, FusedDecoder):
        return decoder.begin_forward
    layers = layers_of(decoder)
    if layers is None:
        return None
    outline = outline_of(decoder)

    def start(ids: torch.Tensor, positions: torch.Tensor, context: Any, narrowing: object) -> PausedLayers:
        assert narrowing is None, "layers of transformers run for every row"
        return PausedOutline(outline, ids, positions, context)

    def run(tokens: torch.Tensor, positions: torch.Tensor, context: object) -> torch.Tensor:
        paused = start(tokens, positions, context, None)
        for layer in range(len(layers)):
            paused.advance(layer + 1)
        return cast(torch.Tensor, paused.finish())

    try:
        with torch.inference_mode(), torch.autocast(proof.texts.device.type, enabled=False):
            return start if proof.difference(run) is None else None
    except Exception:  # any error: its loop over layers is not supported
        return None
