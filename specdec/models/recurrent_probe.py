"""Recurrent layers over one whole text, outside an engine. Its rows are in order, and its state is folded from block to
block, each of which is computed alone: a GPU's library chooses products by the number of blocks.
"""

import torch
from torch.nn.functional import pad

from specdec.attention.recurrence.blocks import NewPlaces, RecordBlock, convolved, folded, run_blocks
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.recurrent_state import FOLD


def convolved_text(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`RecurrentContext.convolve` for the rows of one whole text."""
    taps = weight.shape[1]
    path = pad(inputs, (0, 0, taps - 1, 0)).unfold(0, taps, 1).transpose(1, 2)  # [T, K, C]
    return convolved(path, weight, bias)


def recurred_text(rows: Recurrence) -> torch.Tensor:
    """`RecurrentContext.recur` for the rows of one whole text."""
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
