"""The forward context of the probe: dense causal attention within short texts, with every call of a layer recorded.

It knows no pools and no plans. A layer whose calls the paged cache could not serve is a fault, by its number. Recurrent
layers run text by text (`convolved_text`, `recurred_text`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch.nn.functional import pad

from specdec.attention.bridge import IGNORED_KWARGS
from specdec.attention.dense import VisibleKeys, attend_alone, attend_together
from specdec.attention.recurrence.blocks import NewPlaces, RecordBlock, convolved, folded, run_blocks
from specdec.errors import UnsupportedModelError, counted
from specdec.kvcache.layer_context import AttentionCall, LayerContext, OwnRows, Recurrence, ScoreOptions
from specdec.kvcache.layout import KVLayout
from specdec.kvcache.recurrent_state import FOLD


@dataclass(slots=True)
class ProbeContext(LayerContext):
    """Records each layer's attention call, and computes dense causal attention within each text.

    text, positions: [T] of the packed tokens. past: an earlier forward whose K/V, and earlier ones, these rows see too.
    by_row: compute each row alone, so that its bits do not depend on other rows.
    """

    layout: KVLayout
    text: torch.Tensor
    positions: torch.Tensor
    past: "ProbeContext | None" = None
    by_row: bool = False
    rows: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # q, k, v [T, h, D]
    convolutions: dict[int, torch.Tensor] = field(default_factory=dict)  # inputs [T, C]
    recurrences: dict[int, Recurrence] = field(default_factory=dict)  # in float32
    faults: dict[int, str] = field(default_factory=dict)
    states: dict[int, torch.Tensor | None] = field(default_factory=dict)  # states that enter the layers of its keys
    shares: "Sequence[ProbeContext]" = ()  # one per rank, if several run the forward
    other_ranks: "Sequence[ProbeContext]" = ()  # on the first rank's context: those of the others

    def divide(self, devices: Sequence[torch.device]) -> "Sequence[ProbeContext]":
        """See `shared_weights.py`."""
        layout = self.layout.share(len(devices))
        pasts = [None] * len(devices) if self.past is None else self.past.shares
        self.shares = [
            ProbeContext(layout, self.text.to(device), self.positions.to(device), past, self.by_row)
            for device, past in zip(devices, pasts, strict=True)
        ]
        return self.shares

    def unite(self, shares: "Sequence[ProbeContext]") -> None:
        """Merge the ranks' records: heads in the order of ranks, repeated heads once. See `shared_weights.py`."""
        home = self.text.device
        for layer in shares[0].rows:
            distinct = shares[:: len(shares) // shares[0].layout.layers[layer].shares]
            kinds = enumerate((shares, distinct, distinct))
            q, k, v = (torch.cat([rank.rows[layer][kind].to(home) for rank in ranks], dim=1) for kind, ranks in kinds)
            self.rows[layer] = q, k, v

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer, query = call.layer, call.query
        fault = self._fault(call)
        if fault is None and layer in self.rows:
            fault = "calls attention more than once in a forward, and has one K/V slot a token"
        if fault is None and self.layout.layers[layer].owner not in {layer, *self.rows}:
            fault = "reads the K/V of a layer that has not run"
        if fault is not None:
            self.faults[layer] = fault
            return query.new_zeros((len(query), query.shape[2], query.shape[1], call.value.shape[3]))
        return LayerContext.attend(self, call)

    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        """q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, DV], or None: the owner's -> [T, Hq, DV]."""
        spec = self.layout.layers[layer]
        if k is None or v is None:
            _, k, v = self.rows[spec.owner]
        self.rows[layer] = q, k, v
        keys, values = (torch.cat([context.rows[spec.owner][kind] for context in self._seen()]) for kind in (1, 2))
        text, positions = self._places()
        order = positions.argsort()
        distance = self.positions[:, None] - positions[order]
        visible = (self.text[:, None] == text[order]) & (distance >= 0)  # [T, L]
        if spec.window is not None:
            visible &= distance < spec.window
        attend = (attend_alone if self.by_row else attend_together)(VisibleKeys(order[None], visible[None]))
        return attend(q.float().transpose(0, 1)[None], keys.float(), values.float(), **options)[0].to(q.dtype)

    def convolve(
        self, layer: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        self.convolutions[layer] = inputs
        seen = torch.cat([context.convolutions[layer] for context in self._seen()])
        return self._by_text(lambda rows: convolved_text(seen[rows], weight, bias))

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        self.rows[layer] = rows.q, rows.k, rows.v
        self.recurrences[layer] = rows.map(torch.Tensor.float)
        parts = zip(*(context.recurrences[layer] for context in self._seen()), strict=True)
        seen = Recurrence(*(None if part[0] is None else torch.cat(part) for part in parts))  # type: ignore[arg-type]
        return self._by_text(lambda rows: recurred_text(seen.map(lambda x: x[rows])))

    def _by_text(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """compute: indices of all rows seen of one text, in order -> a result for each. Returns these rows' results."""
        text, positions = self._places()
        order = positions.argsort()
        rows = [order[text[order] == one] for one in self.text.unique()]
        out = torch.cat([compute(each) for each in rows])
        return out[torch.cat(rows).argsort()][-len(self.text) :]

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Text and position of all rows that these rows see, [L] each."""
        seen = self._seen()
        return torch.cat([context.text for context in seen]), torch.cat([context.positions for context in seen])

    def _seen(self) -> "list[ProbeContext]":
        """The forwards whose K/V these rows see, earliest first."""
        return [self] if self.past is None else [*self.past._seen(), self]

    def _fault(self, call: AttentionCall) -> str | None:
        if not 0 <= call.layer < len(self.layout.layers):
            return f"reports layer_idx {call.layer}, but the config has {counted(len(self.layout.layers), 'layer')}"
        spec = self.layout.layers[call.layer]
        query, key, value = call.query, call.key, call.value
        kept = [(field.heads, field.dim) for field in spec.fields]
        if [(key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])] != kept or spec.k.heads != spec.v.heads:
            return f"has K {tuple(key.shape)} and V {tuple(value.shape)}, but its owner keeps heads x size {kept}"
        if not query.dtype == key.dtype == value.dtype:
            return f"has queries in {query.dtype}, K in {key.dtype} and V in {value.dtype}; one dtype is supported"
        if query.shape[3] != spec.k.dim or query.shape[1] % spec.k.heads:
            return f"has queries {tuple(query.shape)} that do not group over {kept[0]} keys"
        if not key.shape[2] == value.shape[2] == query.shape[2] or query.shape[0] * query.shape[2] != len(self.text):
            return f"asks for {query.shape[2]} queries and {key.shape[2]} keys for {len(self.text)} tokens"
        if call.sliding_window != spec.window:
            return f"uses sliding_window={call.sliding_window}, but the config says {spec.window}"
        if call.sinks is not None and call.sinks.shape != (query.shape[1],):
            return f"has attention sinks of shape {tuple(call.sinks.shape)}; one per query head is supported"
        odd = sorted(k for k, v in call.extra.items() if k not in IGNORED_KWARGS and isinstance(v, torch.Tensor))
        return f"passes {odd} to attention, which specdec does not know how to honour" if odd else None

    def verify(self, name: str) -> None:
        """Raise UnsupportedModelError unless every layer called attention, and with supported arguments only."""
        called = {*self.rows, *self.faults, *self.convolutions}
        missing = [spec.layer for spec in self.layout.layers if spec.fields and spec.layer not in called]
        if missing:
            raise UnsupportedModelError(
                f"{name}: layers {missing} never called the attention interface of transformers, so their K/V cannot "
                "be paged; the architecture must support AttentionInterface"
            )
        faults = [f"layer {layer} {fault}" for layer, fault in sorted(self.faults.items())]
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise UnsupportedModelError(f"{name}: {faults[0]}{more}")


def convolved_text(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`RecurrentContext.convolve` for the rows of one whole text."""
    taps = weight.shape[1]
    path = pad(inputs, (0, 0, taps - 1, 0)).unfold(0, taps, 1).transpose(1, 2)  # [T, K, C]
    return convolved(path, weight, bias)


def recurred_text(rows: Recurrence) -> torch.Tensor:
    """`RecurrentContext.recur` for the rows of one whole text. Its blocks run one by one, since a GPU's library chooses
    products by the number of blocks."""
    length, heads, v_dim = rows.v.shape
    state = rows.v.new_zeros((1, heads, rows.k.shape[2], v_dim), dtype=torch.float32)
    places = torch.arange(FOLD, device=rows.v.device)[None]
    outs = []
    for begin in range(0, length, FOLD):
        count = min(FOLD, length - begin)
        part = rows.map(lambda x: x.new_zeros((1, FOLD, *x.shape[1:]), dtype=torch.float32))
        for whole, own in zip(rows, part, strict=True):
            if whole is not None and own is not None:
                own[0, :count] = whole[begin : begin + count]
        block = RecordBlock(state, part.k, torch.zeros_like(part.v), part.g)
        out, u = run_blocks(block, NewPlaces(places < count, part.q, part.v, part.beta))
        state = folded(block._replace(u=u))
        outs.append(out[0, :count])
    return torch.cat(outs)
