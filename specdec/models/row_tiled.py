"""A model run in tiles of a fixed number of rows (`attention/row_tiles.py`): its states, and its logits.

`run` is a forward over packed rows: (tokens [1, ROWS], positions [1, ROWS], context) -> [1, ROWS, H].
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from specdec.attention.bridge import ForwardContext
from specdec.attention.row_tiles import ROWS, pad_rows, row_tiles, tile_context
from specdec.layers.batch_invariant_torch import ByVectors
from specdec.models.probe import Run


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
