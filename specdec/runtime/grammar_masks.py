"""Masks and forced tokens of grammars, computed on the host before a step and between a round's programs."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from specdec.errors import faults_go_to
from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.launches import HostCopy
from specdec.runtime.request import Request, RequestState, restricted
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.result import RoundShape
from specdec.sampling.grammars.grammar import GrammarState, compute_masks, tree_masks
from specdec.sampling.token_bitmaps import RowMasks, write_masks


def prepare_masks(requests: Sequence[Request]) -> list[Request]:
    """Compute the next masks and forced tokens of the requests with a grammar. Returns these requests.

    If a grammar raises, only its own request ends.
    """
    guided = restricted(requests)
    states = [request.settled.grammar_state for request in guided]
    compute_masks(states)
    for request, state in zip(guided, states, strict=True):
        with faults_go_to(partial(request.fail, "grammar")):
            assert state is not None
            state.mask  # noqa: B018 - made once, and kept there
            if request.state is RequestState.DECODE:
                request.forced  # noqa: B018
    return guided


def load_forced(state: DeviceState, requests: Sequence[Request], counts: IntArray) -> None:
    """Write the first `counts` [B] forced tokens of each request into its row, for the next round."""
    for request, count in zip(requests, counts.tolist(), strict=True):
        state.forced[request.row, : 1 + count] = np.array([count, *request.forced[:count]], dtype=np.int64)


class GrammarSteps:
    """Host work within a round in which some rows have a grammar.

    device    | draft | verify          | accept
    host              trees, their masks ^
    """

    def __init__(self, state: DeviceState, shape: RoundShape, states: Sequence[GrammarState | None]) -> None:
        self._masks, self._batch = state.masks, shape.batch
        self._states = states
        roots = root_masks(states)
        if roots is not None:
            write_masks(self._masks.view(self._batch, 1), roots)  # a drafter may use the masks after the roots

    def between(self, number: int, out: torch.Tensor) -> None:
        """The host work after program `number`: 0, draft, which returned the trees, or 1, verify."""
        if number == 0:
            self._trees = HostCopy(out)
            return
        tokens, parents = self._trees.wait().tolist()
        held = [(i, state) for i, state in enumerate(self._states) if state is not None]
        found = tree_masks([(state, tokens[i], parents[i]) for i, state in held], self._masks.num_words)
        allowed = self._masks.view(self._batch, found.shape[1])  # a drafter may propose fewer nodes than requested
        write_masks(allowed, RowMasks(np.array([i for i, _ in held], dtype=np.int64), found))


def root_masks(states: Sequence[GrammarState | None]) -> RowMasks | None:
    """Masks [M, 1, words] of the next tokens of the M requests with a grammar; None: no request has one."""
    held = [(i, state) for i, state in enumerate(states) if state is not None]
    if not held:
        return None
    compute_masks([state for _, state in held])
    rows = np.array([i for i, _ in held], dtype=np.int64)
    return RowMasks(rows, np.stack([state.mask for _, state in held])[:, None])
