"""Opens a round: one launch reads its inputs from the seated rows, before the round changes them.

    row = seats[b]        S = committed_len[row]        root[b] = tokens[row, S], the bonus token of the previous round
    max_path[b]     = 1 + max_drafts[row]      longest path that the request may accept
    level_pos[l, b] = S + l                    position of the tokens on level l of a draft, 0 <= l <= D
    chain_pos[b, n] = S + n                    positions of the nodes of a chain, 0 <= n < D
    drawn_pos[b, n] = S + n + 1                positions of the tokens drawn after them
    params                                     the row's sampling parameters, one vector per parameter (`ParamVectors`)

Each lane reads one row. Padding seats read the padding row, which has nothing committed.
"""

from typing import NamedTuple

import torch

from specdec.attention.trees.tree import DraftTree
from specdec.gpu.triton_shim import tl, triton
from specdec.sampling.sampling_table import INT_COLUMNS, ParamVectors, split_cells

LANES = 32


class Opening(NamedTuple):
    """Numbers of B seated rows, int64: level_pos [D + 1, B], chain_pos and drawn_pos [B, D], root and max_path [B]."""

    level_pos: torch.Tensor
    chain_pos: torch.Tensor
    drawn_pos: torch.Tensor
    root: torch.Tensor
    max_path: torch.Tensor
    params: ParamVectors

    @property
    def committed_len(self) -> torch.Tensor:
        """S of each row before this round's commit, [B]."""
        return self.level_pos[0]

    @property
    def history_len(self) -> torch.Tensor:
        """Number of tokens of each row, root included: S + 1, [B]."""
        return self.level_pos[1]

    def fits(self, tree: DraftTree) -> bool:
        """Do chain_pos and drawn_pos belong to this tree?"""
        return tree.is_chain and self.chain_pos.shape == tree.tokens.shape


def reference_opening(
    seats: torch.Tensor,
    committed_len: torch.Tensor,
    tokens: torch.Tensor,
    max_drafts: torch.Tensor,
    cells: torch.Tensor,
    depth: int,
) -> Opening:
    start = committed_len[seats]
    level_pos = start + torch.arange(depth + 1, device=seats.device)[:, None]
    by_request = level_pos.t().contiguous()  # [B, D + 1]
    return Opening(
        level_pos,
        by_request[:, :-1].contiguous(),
        by_request[:, 1:].contiguous(),
        tokens[seats, start],
        1 + max_drafts[seats],
        split_cells(cells[seats]),
    )


@triton.jit(do_not_specialize=["batch", "row_width", "depth"])
def _opening_kernel(
    p_seats: tl.tensor,  # [B]
    p_committed_len: tl.tensor,  # [R]
    p_tokens: tl.tensor,  # [R, W]
    p_max_drafts: tl.tensor,  # [R]
    p_cells: tl.tensor,  # [R, CELLS]
    p_level_pos: tl.tensor,  # [D + 1, B]
    p_chain_pos: tl.tensor,  # [B, D]
    p_drawn_pos: tl.tensor,  # [B, D]
    p_root: tl.tensor,  # [B]
    p_max_path: tl.tensor,  # [B]
    p_whole: tl.tensor,  # [NUM_INT, B]
    p_real: tl.tensor,  # [CELLS - NUM_INT, B]
    batch: tl.tensor,
    row_width: tl.tensor,
    depth: tl.tensor,
    NUM_INT: tl.constexpr,
    CELLS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    o_b = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    m_b = o_b < batch
    row = tl.load(p_seats + o_b, mask=m_b, other=0).to(tl.int64)
    start = tl.load(p_committed_len + row, mask=m_b, other=0).to(tl.int64)
    tl.store(p_root + o_b, tl.load(p_tokens + row * row_width + start, mask=m_b, other=0), mask=m_b)
    tl.store(p_max_path + o_b, 1 + tl.load(p_max_drafts + row, mask=m_b, other=0), mask=m_b)
    for i in tl.static_range(NUM_INT):
        tl.store(p_whole + i * batch + o_b, tl.load(p_cells + row * CELLS + i, mask=m_b, other=0), mask=m_b)
    for i in tl.static_range(CELLS - NUM_INT):
        bits = tl.load(p_cells + row * CELLS + NUM_INT + i, mask=m_b, other=0)
        tl.store(p_real + i * batch + o_b, bits.to(tl.float64, bitcast=True).to(tl.float32), mask=m_b)
    for level in range(depth):
        tl.store(p_level_pos + level * batch + o_b, start + level, mask=m_b)
        tl.store(p_chain_pos + o_b * depth + level, start + level, mask=m_b)
        tl.store(p_drawn_pos + o_b * depth + level, start + level + 1, mask=m_b)
    tl.store(p_level_pos + depth * batch + o_b, start + depth, mask=m_b)


def opening(
    seats: torch.Tensor,
    committed_len: torch.Tensor,
    tokens: torch.Tensor,
    max_drafts: torch.Tensor,
    cells: torch.Tensor,
    depth: int,
) -> Opening:
    """Read the opening of seats [B] from tables of R rows: committed_len and max_drafts [R], tokens [R, W], cells [R,
    columns] of a `SamplingTable`. depth: D >= 1, nodes of a chain with its root. All tensors are int64."""
    (batch,), (num_rows, row_width) = seats.shape, tokens.shape
    assert committed_len.shape == max_drafts.shape == cells.shape[:1] == (num_rows,), f"{tokens.shape=} {cells.shape=}"
    given = (seats, committed_len, tokens, max_drafts, cells)
    assert all(x.is_contiguous() and x.dtype == torch.int64 for x in given), [x.stride() for x in given]
    num_cells = cells.shape[1]
    opened = Opening(
        seats.new_empty((depth + 1, batch)),
        seats.new_empty((batch, depth)),
        seats.new_empty((batch, depth)),
        seats.new_empty((batch,)),
        seats.new_empty((batch,)),
        ParamVectors(
            seats.new_empty((len(INT_COLUMNS), batch)),
            seats.new_empty((num_cells - len(INT_COLUMNS), batch), dtype=torch.float32),
        ),
    )
    _opening_kernel[(triton.cdiv(batch, LANES),)](
        *(*given, *opened[:-1], *opened.params, batch, row_width, depth),
        NUM_INT=len(INT_COLUMNS),
        CELLS=num_cells,
        LANES=LANES,
        num_warps=1,
    )
    return opened
