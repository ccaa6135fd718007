"""Does a row have the same bits whatever the other rows of a forward are? Proved for every deterministic model.

Layers that are not so by themselves run in tiles of a fixed number of rows (`attention/row_tiles.py`).

The 12 rows of two texts run all at once, then in pieces: some rows in turn, one alone, the others in reverse among rows
of neither text. Queries, keys, values, states and logits must be equal, bit by bit. Attention sees each row by itself.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Unpack

import torch

from specdec.attention.bridge import AttentionCall, ForwardContext
from specdec.attention.dense import bias_of, dense_attention
from specdec.attention.row_tiles import ROWS, pad_rows, row_tiles, tile_context
from specdec.kvcache.layer_context import OwnRows, ScoreOptions
from specdec.kvcache.layout import KVLayout
from specdec.layers.batch_invariant_torch import ByVectors
from specdec.models.probe import Run

Row = tuple[int, int]
"""(text, position)"""


class RowRecord:
    """Records what each layer asks of attention for rows (text, position), and answers each of them by itself.

    kept: by layer and row, q, k and v [heads, D].   now: the rows of this forward; later ones are padding.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.kept: dict[tuple[int, int, int], tuple[torch.Tensor, ...]] = {}
        self.now: list[Row] = []
        self._shares: list[RowRecord] = []
        self.peers: Sequence[RowRecord] = ()

    def divide(self, devices: Sequence[torch.device]) -> "Sequence[RowRecord]":
        """See `shared_weights.py`."""
        self._shares = self._shares or [RowRecord(self.layout.share(len(devices))) for _ in devices]
        for share in self._shares:
            share.now = self.now
        return self._shares

    def unite(self, shares: "Sequence[RowRecord]") -> None:
        """Take what the ranks recorded, heads in the order of ranks: see `shared_weights.py`."""
        for key, parts in shares[0].kept.items():
            home = parts[0].device
            self.kept[key] = tuple(
                torch.cat([share.kept[key][kind].to(home) for share in shares]) for kind in range(len(parts))
            )

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return call.answer(self, *call.rows())

    def destination(self, layer: int) -> None:
        """Nothing is stored: what layers ask with is recorded."""

    def attend_rows(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        spec = self.layout.layers[layer]
        for i, (text, pos) in enumerate(self.now):
            own = (k, v) if spec.owner == layer and k is not None and v is not None else ()
            self.kept[layer, text, pos] = tuple(x[i].clone() for x in (q, *own))
        out = q.new_zeros((*q.shape[:2], spec.v.dim))
        for i, (text, pos) in enumerate(self.now):
            first = 0 if spec.window is None else max(0, pos - spec.window + 1)
            seen = [self.kept[spec.owner, text, p] for p in range(first, pos + 1) if (spec.owner, text, p) in self.kept]
            keys, values = (torch.stack([row[part] for row in seen], dim=1)[None].float() for part in (1, 2))
            alone = q[i, None, :, None].clone().float()  # [1, Hq, 1, D] beside keys [1, Hkv, L, D]
            bias = bias_of(torch.ones(1, 1, len(seen), dtype=torch.bool, device=q.device))
            attended = dense_attention(alone, keys, values, bias, **options)
            out[i] = attended[0, 0].to(q.dtype)
        return out


def depends_on_others(
    layout: KVLayout,
    texts: torch.Tensor,
    run: Run,
    logits: Callable[[torch.Tensor], torch.Tensor],
    most_rows: int,
) -> str | None:
    """texts [2, T] of tokens; at most `most_rows` a forward -> what of a row depends on others; None: nothing does."""

    def record(*forwards: list[Row]) -> dict[str, dict[Row, torch.Tensor]]:
        """All that is recorded of the rows of these forwards, by name and row."""
        context = RowRecord(layout)
        found: dict[str, dict[Row, torch.Tensor]] = {}
        for rows in forwards:
            tokens = texts.new_tensor([int(texts[text % 2, (pos + text // 2) % texts.shape[1]]) for text, pos in rows])
            context.now = rows
            states = run(tokens[None], texts.new_tensor([pos for _, pos in rows])[None], context)
            for name, of_rows in (("the final states", states[0]), ("the logits", logits(states)[0])):
                found.setdefault(name, {}).update(zip(rows, of_rows, strict=True))
        asked: dict[str, dict[Row, torch.Tensor]] = {}
        for (layer, *row), parts in sorted(context.kept.items(), key=lambda item: item[0][0]):
            for name, part in zip(("queries", "keys", "values"), parts, strict=False):
                asked.setdefault(f"the {name} of layer {layer}", {})[row[0], row[1]] = part
        return asked | found

    rows = [(text, pos) for text in (0, 1) for pos in range(texts.shape[1])]
    first = [(text, pos) for pos in (0, 2, 1) for text in (1, 0)]
    alone = (0, 3)
    others = [row for row in reversed(rows) if row not in first and row != alone]
    junk = [(2 + i, 0) for i in range(most_rows - len(others))]  # a text of one token each
    whole, pieces = record(rows), record(first, [alone], [*others, *junk])
    return next((what for what in whole if any(not torch.equal(whole[what][r], pieces[what][r]) for r in rows)), None)


def forward_in_tiles(
    run: Run, tokens: torch.Tensor, context: ForwardContext, aux_layers: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """tokens [B, N] -> states [B, N, H], and those that enter `aux_layers` side by side [B, N, A * H], or None."""
    (batch, width), positions = tokens.shape, context.plan.positions.flatten()
    done: list[torch.Tensor] = []
    rows = torch.arange(batch * width, device=tokens.device)
    order = []
    with _by_vectors(tokens.device):
        for tile in row_tiles(batch, width):
            part = tile_context(context, tile)
            out = run(tile.rows(tokens.flatten(), width)[None], tile.rows(positions, width)[None], part)
            states = [out, *(state for layer in aux_layers if (state := part.states[layer]) is not None)]
            assert len(states) == 1 + len(aux_layers), f"{len(states) - 1} states of layers {aux_layers}"
            order.append(rows.view(batch, width)[tile].flatten())
            done.append(torch.cat([state.view(ROWS, -1) for state in states], dim=-1)[: len(order[-1])])
    packed = torch.cat(done)
    together = torch.empty_like(packed).index_copy_(0, torch.cat(order), packed).view(batch, width, -1)
    hidden, aux = together.split([out.shape[-1], together.shape[-1] - out.shape[-1]], dim=-1)
    return hidden.contiguous(), aux.contiguous() if aux_layers else None


def rows_in_tiles(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """x [..., H] -> `compute` of its rows [..., V]."""
    rows = x.reshape(-1, x.shape[-1])
    with _by_vectors(x.device):
        tiles = [compute(pad_rows(tile)) for tile in rows.split(ROWS)]
    return torch.cat(tiles)[: len(rows)].view(*x.shape[:-1], -1)


def run_in_tiles(run: Run) -> Run:
    """`run` for at most ROWS rows [1, T] in one tile, of contexts that take ROWS: for proofs."""

    def padded(tokens: torch.Tensor, positions: torch.Tensor, context: object) -> torch.Tensor:
        with _by_vectors(tokens.device):
            return run(pad_rows(tokens[0])[None], pad_rows(positions[0])[None], context)[:, : tokens.shape[1]]

    return padded


def _by_vectors(device: torch.device) -> AbstractContextManager[object]:
    return ByVectors() if device.type == "cpu" else nullcontext()
