"""Prompt chunks that the forward of a round reads along, where one forward over all rows is quicker than two."""

import numpy as np
import torch

from specdec.attention.plan import KVPlan
from specdec.gpu.mirrored_array import IntArray, upload
from specdec.models.joined_forward import Part, States, forward_joined
from specdec.models.target import FinalStates
from specdec.runtime.rounds.round import Chunk, Round

MAX_CARRYING = 15
"""Rounds in a row that carry prompts. The next one carries none: how long rounds take is known of those alone."""

MIN_CARRIED = 4
"""Prompt tokens that a round carries at least: unlike a forward of its own, time falls with them, but for the keys of
the prefix, which are gathered once for however many."""


class CarriedPrompts:
    """The next `chunk_len` [R] tokens of rows [R], none of which is seated in the round. chunk: what the target has
    read of them; None before the round's forward."""

    def __init__(self, rows: IntArray, chunk_len: IntArray) -> None:
        self.chunk: Chunk | None = None
        self._runs = np.stack([rows, chunk_len])

    def forward(self, round: Round, tokens: torch.Tensor, plan: KVPlan) -> States:
        """The target runs over tokens [B, N] under the round's plan, and over the chunks -> what it returns of the
        former."""
        runs = upload(self._runs, round.device)
        pack, fed, packed = round.pack(runs[0], runs[1], int(self._runs[1].sum()))
        parts = [Part(tokens, plan), Part(fed[None], packed)]
        verified, (hidden, aux_states) = forward_joined(round.target, parts, round.view, round.aux_layers)
        aux_states = None if aux_states is None else aux_states[0]
        self.chunk = Chunk(pack, fed, hidden[0], aux_states, FinalStates.EVERY)
        return verified
