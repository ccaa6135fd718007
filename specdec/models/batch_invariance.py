"""Checks that the bits of a row do not depend on the other rows of a forward. Every deterministic model must pass.

Among kernels, `layers/linear.py` cuts sums by the weight only, and `attention/kernels/tree_attention.py` cuts keys by
position. Layers without such kernels run in tiles of a fixed number of rows (`attention/path_attention.py`).

The 12 rows of two texts run at once; then again in several forwards: some rows, one row alone, and the rest in reverse
order among rows of other texts. Queries, keys, values, states and logits must be bitwise equal. Attention treats each
row alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from specdec.attention.bridge import ForwardContext
from specdec.attention.path_attention import ROWS, pad_rows, row_tiles, tile_context
from specdec.kvcache.layout import KVLayout
from specdec.layers.batch_invariant_torch import VectorwiseMode
from specdec.models.probe import ProbeContext, Run

MANY_ROWS = 80
"""Rows per forward on kernels: more than the smallest tiles of their products hold."""

Row = tuple[int, int]
"""(text, position)"""


def depends_on_others(
    layout: KVLayout,
    texts: torch.Tensor,
    run: Run,
    logits: Callable[[torch.Tensor], torch.Tensor],
    in_tiles: bool,
) -> str | None:
    """The first part of a row that depends on other rows, as the end of a sentence; None: no part does. texts: [2, T]
    tokens."""

    def record(*forwards: list[Row]) -> dict[str, dict[Row, torch.Tensor]]:
        """Queries, keys, values, states and logits of the rows of these forwards, by name and row."""
        found: dict[str, dict[Row, torch.Tensor]] = {}
        past: ProbeContext | None = None
        for rows in forwards:
            rows = _with_junk(rows, ROWS if in_tiles else 0)
            tokens = texts.new_tensor([int(texts[text % 2, (pos + text // 2) % texts.shape[1]]) for text, pos in rows])
            text, positions = texts.new_tensor(rows).unbind(1)
            past = ProbeContext(layout, text, positions, past, by_row=True)
            with _by_vectors(texts.device) if in_tiles else nullcontext():
                states = run(tokens[None], positions[None], past)
            assert not past.faults, past.faults
            each = {
                f"the {name} of layer {layer}": part
                for layer, parts in sorted(past.rows.items())
                for name, part in zip(("queries", "keys", "values"), parts, strict=True)
            }
            for name, of_rows in {**each, "the final states": states[0], "the logits": logits(states)[0]}.items():
                found.setdefault(name, {}).update(zip(rows, of_rows, strict=True))
        return found

    rows = [(text, pos) for text in (0, 1) for pos in range(texts.shape[1])]
    first = [(text, pos) for pos in (0, 2, 1) for text in (1, 0)]
    alone = (0, 3)
    others = [row for row in reversed(rows) if row not in first and row != alone]
    whole, pieces = record(rows), record(first, [alone], _with_junk(others, ROWS if in_tiles else MANY_ROWS))
    return next((what for what in whole if any(not torch.equal(whole[what][r], pieces[what][r]) for r in rows)), None)


def _with_junk(rows: list[Row], least: int) -> list[Row]:
    """Extend to at least this many rows by texts of one token."""
    return [*rows, *((2 + i, 0) for i in range(least - len(rows)))]


def forward_in_tiles(
    run: Run, tokens: torch.Tensor, context: ForwardContext, aux_layers: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """tokens [B, N] -> states [B, N, H], and the concatenated states that enter `aux_layers` [B, N, A * H], or None."""
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
    """Apply `compute` to the rows of x [..., H] in tiles -> [..., V]."""
    rows = x.reshape(-1, x.shape[-1])
    with _by_vectors(x.device):
        tiles = [compute(pad_rows(tile)) for tile in rows.split(ROWS)]
    return torch.cat(tiles)[: len(rows)].view(*x.shape[:-1], -1)


def _by_vectors(device: torch.device) -> AbstractContextManager[object]:
    return VectorwiseMode() if device.type == "cpu" else nullcontext()
