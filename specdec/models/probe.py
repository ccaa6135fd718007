"""What a model must prove before it is served: that paged, packed attention computes what its own forward does.

It knows what one layer may ask of attention and what is wrong with what it asks. It does not know pools, plans or
requests. Invariant: a model that passes is served exactly; one that does not is refused in one sentence.
"""

from dataclasses import dataclass, field

import torch

from specdec.attention.bridge import IGNORED_KWARGS, AttentionCall
from specdec.errors import UnsupportedModelError
from specdec.kvcache.layout import KVLayout


@dataclass(slots=True)
class ProbeContext:
    """Records what each layer asks of attention, so that a model is refused at construction and not mid-generation."""

    layout: KVLayout
    seen: dict[int, str | None] = field(default_factory=dict)  # layer -> what is wrong with it

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer in self.seen:
            self.seen[call.layer] = "calls attention more than once in a forward, and has one K/V slot a token"
        else:
            self.seen[call.layer] = self._fault(call)
        query = call.query
        return query.new_zeros((len(query), query.shape[2], query.shape[1], call.value.shape[3]))  # [1, T, Hq, Dv]

    def _fault(self, call: AttentionCall) -> str | None:
        if not 0 <= call.layer < len(self.layout.layers):
            return f"reports layer_idx {call.layer}, but the config has {len(self.layout.layers)} layers"
        spec = self.layout.layers[call.layer]
        query, key, value = call.query, call.key, call.value
        kv_shape = (spec.num_kv_heads, spec.head_dim)
        if (key.shape[1], key.shape[3]) != kv_shape or value.shape != key.shape:
            return f"has K {tuple(key.shape)} and V {tuple(value.shape)}, but the config says heads x size {kv_shape}"
        if not query.dtype == key.dtype == value.dtype:
            return f"has queries in {query.dtype}, K in {key.dtype} and V in {value.dtype}; one dtype is supported"
        if query.shape[3] != spec.head_dim or query.shape[1] % spec.num_kv_heads:
            return f"has queries {tuple(query.shape)} that do not group over {kv_shape} keys"
        if call.sliding_window != spec.window:
            return f"uses sliding_window={call.sliding_window}, but the config says {spec.window}"
        if call.sinks is not None and call.sinks.shape != (query.shape[1],):
            return f"has attention sinks of shape {tuple(call.sinks.shape)}; one per query head is supported"
        odd = sorted(k for k, v in call.extra.items() if k not in IGNORED_KWARGS and isinstance(v, torch.Tensor))
        return f"passes {odd} to attention, which specdec does not know how to honour" if odd else None

    def verify(self, name: str) -> None:
        """Raise UnsupportedModelError unless every layer called, and asked only for what specdec can do."""
        missing = [spec.layer for spec in self.layout.layers if spec.layer not in self.seen]
        if missing:
            raise UnsupportedModelError(
                f"{name}: layers {missing} never called the attention interface of transformers, so their K/V cannot "
                "be paged; the architecture must support AttentionInterface"
            )
        faults = [f"layer {layer} {fault}" for layer, fault in sorted(self.seen.items()) if fault]
        if faults:
            raise UnsupportedModelError(f"{name}: {faults[0]}" + (f" (and {len(faults) - 1} more)" * (len(faults) > 1)))
