"""Lets a drafter that keeps K/V skip rounds without its drafts, and read their tokens later, many at once.

    lag                          committed tokens of a row that the drafter has not read yet
    a round without its drafts   keeps the target's state at each committed token: states[row, position % MAX_LAG]
    reading the lag              the drafter observes these tokens of all rows in one forward, like a prompt chunk

The lag of all rows of a round is read at once, before a round

    * in which the drafter drafts,
    * after which the lag of a row could exceed MAX_LAG, or
    * in which a row reaches the drafter's last position, once.
"""

import numpy as np
import torch

from specdec.draft_models.base import Drafter, Observation
from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.page_pool import BoolArray
from specdec.kvcache.table import RequestTable, Rows
from specdec.models.target import TargetModel
from specdec.runtime.rounds.result import RoundShape

MAX_LAG = 16
"""Upper bound on the lag of a row, in tokens: the number of states kept per row."""


def lag_allowed(drafter: Drafter | None, adaptive: bool) -> bool:
    """May the drafter of an engine lag? adaptive: rounds may have no drafts."""
    if drafter is None or not drafter.may_lag:
        return False
    return adaptive or drafter.max_positions is not None  # it reads nothing after that position


def added_lag(shape: RoundShape) -> int:
    """Most tokens that a round of this shape adds to the lag of a row; 0: the drafter reads them within the round."""
    drafts_by_model = shape.width > 1 and not shape.draft.by_lookup  # drafting reads all committed tokens first
    return 0 if drafts_by_model or shape.depth > MAX_LAG else shape.depth


class DrafterLag:
    """The lag of each row. num_aux_layers: layers whose states the drafter reads; 0: it reads the final ones.

    count: upper bound on the lag of each row, on the host. ended: rows longer than the drafter's last
    position; it has read them up to that position.
    """

    def __init__(self, num_rows: int, target: TargetModel, num_aux_layers: int) -> None:
        device, width = target.device, target.hidden_size * max(1, num_aux_layers)
        self._reads_aux = num_aux_layers > 0
        self.states = torch.zeros((num_rows, MAX_LAG, width), dtype=target.dtype, device=device)
        self.read = torch.zeros(num_rows, dtype=torch.int64, device=device)  # number of first tokens that were read
        self.count: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.ended: BoolArray = np.zeros(num_rows, dtype=np.bool_)

    def clear_rows(self, rows: IntArray) -> None:
        """Reset these rows, which have new requests."""
        self.count[rows] = 0
        self.ended[rows] = False

    def before_round(self, shape: RoundShape, rows: IntArray, ending: IntArray) -> int:
        """Count a round of this shape over these rows before its launch. Returns the most tokens per row that the
        drafter must read first; 0: none. ending: rows whose drafts end with this round (`end_drafts`)."""
        more, most = added_lag(shape), int(self.count[rows].max(initial=0))
        must_read = most > 0 and (more == 0 or most + more > MAX_LAG or self.count[ending].any())
        if must_read:
            self.count[rows] = 0
        self.ended[ending] = True
        self.count[rows[~self.ended[rows]]] += more
        return most if must_read else 0

    def keep_states(
        self, rows: Rows, start: torch.Tensor, hidden: torch.Tensor, aux_states: torch.Tensor | None, path: torch.Tensor
    ) -> None:
        """Keep the states [B, N, H] of a round that the drafter does not read now: nodes of `path` [B, D], committed
        from `start` [B] on. States of rejected nodes are stored too; later rounds overwrite them before they are read.
        """
        states = hidden if aux_states is None else aux_states
        if (depth := path.shape[1]) == 1:
            self.states[rows.index, start % MAX_LAG] = states[:, 0]
            return
        position = start[:, None] + torch.arange(depth, device=path.device)  # [B, D]
        on_path = states.gather(1, path[:, :, None].expand(-1, -1, states.shape[-1]))
        self.states[rows.index[:, None], position % MAX_LAG] = on_path

    def observation(
        self, table: RequestTable, tokens: torch.Tensor, seats: torch.Tensor, max_committed_len: int, max_tokens: int
    ) -> Observation:
        """The lag of each seated row [B], `max_tokens` at most. tokens: by row and position."""
        committed, start = table.committed_len.tensor[seats], self.read[seats]
        length = (committed - start).clamp(min=0)
        is_lagging = length > 0
        rows = torch.where(is_lagging, seats, table.padding_row)  # other rows keep their state
        start = torch.where(is_lagging, start, 0)
        steps = torch.arange(max_tokens, device=seats.device)
        position = start[:, None] + steps  # [B, max_tokens]
        states = self.states[seats[:, None], position % MAX_LAG]
        lagging = tokens[seats[:, None], position.clamp(max=tokens.shape[1] - 1)]
        return Observation(
            rows=Rows(rows, max_committed_len),
            start=start,
            tokens=lagging,
            hidden=states,
            aux_states=states if self._reads_aux else None,
            path=steps.expand_as(lagging),
            length=length,
            next_token=tokens[seats, committed],
        )
