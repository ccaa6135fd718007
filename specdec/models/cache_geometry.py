"""Measures the K/V of each layer in its first attention call, since configs describe them in too many ways.

    config          layer types, owners, a first guess of heads and sizes
    the calls       K/V heads, sizes and window widths, which count; channels and states of recurrent layers

For example, multi-head latent attention expands K to 192 and V to 128 numbers per head while `config.head_dim` is 64;
and a window may or may not count the query's own key. Whether a layer has a window is taken from the config, since some
classes apply windows only in a mask; if call and config disagree, the probe refuses the model.
"""

from dataclasses import dataclass, field, replace

import torch

from specdec.attention.bridge import AttentionCall
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.layout import CacheField, KVLayout, LayerSpec, Retention
from specdec.kvcache.recurrent_state import StateShape


@dataclass(slots=True)
class GeometryContext:
    """A forward context that records each layer's attention call and returns zeros."""

    calls: dict[int, tuple[torch.Size, torch.Size, int | None]] = field(default_factory=dict)  # of K, of V, window
    convolutions: dict[int, torch.Size] = field(default_factory=dict)  # channels and taps
    recurrences: dict[int, tuple[torch.Size, torch.Size]] = field(default_factory=dict)  # of k, of v

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.setdefault(call.layer, (call.key.shape, call.value.shape, call.sliding_window))
        query = call.query
        return query.new_zeros((len(query), query.shape[2], query.shape[1], call.value.shape[3]))

    def convolve(
        self, layer: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        self.convolutions[layer] = weight.shape
        return inputs

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        self.recurrences[layer] = rows.k.shape, rows.v.shape
        return rows.v.float()


def measured_layout(layout: KVLayout, context: GeometryContext) -> KVLayout:
    """`layout` with the heads, sizes and windows of the recorded calls. A layer gets its owner's; a layer without a
    call is unchanged."""

    def measured(spec: LayerSpec) -> LayerSpec:
        if spec.layer in context.convolutions:
            return _recurrent(spec, context)
        if spec.owner not in context.calls:
            return spec
        k, v, window = context.calls[spec.owner]
        fields = CacheField("k", k[1], k[3]), CacheField("v", v[1], v[3])
        retention = spec.retention
        if spec.window is not None and window is not None:
            retention = Retention(window)
        return replace(spec, fields=fields, retention=retention)

    return layout.map(measured)


def _recurrent(spec: LayerSpec, context: GeometryContext) -> LayerSpec:
    """The cache of a recurrent layer: its records, in the order of `recurrence/forward.py`, and its state."""
    channels, taps = context.convolutions[spec.layer]
    inputs = CacheField("inputs", 1, channels)
    if spec.layer not in context.recurrences:
        return replace(spec, fields=(inputs,), state=StateShape(0, 0, 0, taps - 1, channels))
    (_, key_heads, k_dim), (_, heads, v_dim) = context.recurrences[spec.layer]
    records = (("k", key_heads, k_dim), ("u", heads, v_dim), ("g", heads, 1))
    fields = inputs, *(CacheField(*record, dtype=torch.float32) for record in records)
    return replace(spec, fields=fields, state=StateShape(heads, k_dim, v_dim, taps - 1, channels))
