"""What each layer keeps, read from its first call of attention: a config says it in too many ways.

    config          layer types, owners, a first guess of heads and sizes
    the calls       K/V heads, their sizes, the width of a window: these count

Multi-head latent attention expands K to 192 and V to 128 numbers a head where `config.head_dim` is 64; a window may
count the query's own key or not. Whether a layer has a window at all is not taken from its call: some classes apply it
in a mask alone, so where call and config disagree in that, the probe refuses the model.
"""

from dataclasses import dataclass, field, replace

import torch

from specdec.attention.bridge import AttentionCall
from specdec.kvcache.layout import CacheField, KVLayout, LayerCache, Window


@dataclass(slots=True)
class GeometryContext:
    """A forward that records what each layer calls attention with, and answers with zeros."""

    calls: dict[int, tuple[torch.Size, torch.Size, int | None]] = field(default_factory=dict)  # of K, of V, window

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.setdefault(call.layer, (call.key.shape, call.value.shape, call.sliding_window))
        query = call.query
        return query.new_zeros((len(query), query.shape[2], query.shape[1], call.value.shape[3]))


def measured_layout(layout: KVLayout, context: GeometryContext) -> KVLayout:
    """`layout`, with the heads, sizes and windows of the recorded calls. A layer reads what its owner keeps; one that
    made no call stays as it was."""

    def measured(spec: LayerCache) -> LayerCache:
        if spec.owner not in context.calls:
            return spec
        k, v, window = context.calls[spec.owner]
        fields = CacheField("k", k[1], k[3]), CacheField("v", v[1], v[3])
        retention = spec.retention
        if isinstance(retention, Window) and window is not None:
            retention = Window(window)
        return replace(spec, fields=fields, retention=retention)

    return layout.map(measured)
