"""Loads a request's state into its row, and keeps its output for later drafts when it ends.

All writes are on the host; the next upload sends them.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from specdec.kvcache.table import row_cells
from specdec.runtime.prefixes import salt_of
from specdec.runtime.request import Request, table_rows
from specdec.runtime.rounds.device_state import DeviceState


def load_requests(state: DeviceState, requests: Sequence[Request]) -> None:
    """Write the tokens and parameters of these requests to their new rows."""
    rows = table_rows(requests)
    length = np.array([request.settled.num_tokens for request in requests], dtype=np.int64)
    tokens = chain.from_iterable(request.tokens for request in requests)
    state.tokens[row_cells(rows, np.zeros_like(rows), length)] = np.fromiter(tokens, dtype=np.int64)
    state.sampling.load(rows, [(request.params, request.seed) for request in requests])
    state.max_drafts[rows] = np.array([request.max_drafts for request in requests], dtype=np.int64)
    state.prompt_len[rows] = np.array([len(request.prompt) for request in requests], dtype=np.int64)
    if state.unread is not None:
        state.unread.clear_rows(rows)
    if state.finished is not None:
        for request in requests:
            state.finished.seat(request.row, salt_of(request))
    if state.seen_bits is not None:
        held = [request for request in requests if request.params.repetition_penalty != 1]
        state.seen_bits.load(table_rows(held), [request.tokens for request in held])


def keep_outputs(state: DeviceState, finished: Sequence[Request]) -> None:
    """Keep the outputs of finished requests as a source of drafts for other requests."""
    if state.finished is None:
        return
    for request in finished:
        if request.finish_reason in ("stop", "length"):
            state.finished.add(request.tokens, len(request.prompt), salt_of(request))
