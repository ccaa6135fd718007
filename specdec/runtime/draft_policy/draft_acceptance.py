"""Expected tokens per round of each draft, learned from accepted and rejected drafts.

    chance    probability that depth i + 1 of a draft is accepted if depth i was
              The engine has one per source (model, lookup) and class; chains are one class, each tree is its own.
              A request has one per source. The engine's is its prior, worth ROW_WEIGHT drafts
    tokens    1 + p_1 + p_1 p_2 + ...      p_i: the chance of the request at depth i

A round counts for the depths that it reached. Counts decay, so old chances become uncertain again.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.result import DraftShape

FloatArray = npt.NDArray[np.float64]

DECAY_ROUNDS = 512
"""Rounds after which the engine's counts have decayed to about 1/e."""

ROW_WEIGHT = 4.0
"""The engine's chances count as this many drafts in those of a row."""

ROW_MEMORY = 64
"""Most drafts that a row remembers for a source and depth."""


class DraftAcceptance:
    """Chances of one engine and its rows. shapes: the engine's drafts; the first is no draft."""

    def __init__(self, shapes: Sequence[DraftShape], num_rows: int) -> None:
        kinds = [shape if shape.topk > 1 else DraftShape(0, 1, 1, shape.by_lookup) for shape in shapes]
        found = list(dict.fromkeys(kinds))  # the model's chains first, since "no draft" belongs to them
        self._class_of = np.array([found.index(kind) for kind in kinds])
        self._source_of = np.array([int(kind.by_lookup) for kind in found])  # [C]: 0 the model, 1 the lookup
        same = self._source_of[:, None] == self._source_of
        self._others = same.astype(np.float64) - np.eye(len(found))  # [C, C]
        self._depth_of = np.array([shape.depth for shape in shapes])
        self._levels = np.arange(max(self._depth_of))
        self._counts = np.zeros((2, len(found), len(self._levels)))  # [2, C, D]: accepted, and tried
        self._row_counts = np.zeros((2, 2, num_rows, len(self._levels)))  # [2, source, R, D]

    def begin_rows(self, rows: IntArray) -> None:
        """Reset the chances of rows [B], which have new requests."""
        self._row_counts[:, :, rows] = 0

    @property
    def chance(self) -> FloatArray:
        """The engine's chances [C, D]. As a prior, two drafts are added to the counts of a class, accepted as often as
        the drafts of the source's other classes; the prior of these is one right and one wrong draft."""
        (right, tried), (other_right, other_tried) = self._counts, self._others @ self._counts
        chance: FloatArray = (right + 2 * (1 + other_right) / (2 + other_tried)) / (tried + 2)
        return chance

    def learn(self, draft_index: int, rows: IntArray, accepted: IntArray, max_drafts: IntArray) -> None:
        """Count a round with draft `draft_index`: rows [B] accepted `accepted` [B] drafts and could accept `max_drafts`
        [B]."""
        kind, depth = self._class_of[draft_index], self._depth_of[draft_index]
        reached = np.minimum([accepted, accepted + 1], np.minimum(max_drafts, depth))  # the next one was rejected
        counts = self._levels < reached[..., None]  # [2, B, D]
        own = self._row_counts[:, self._source_of[kind], rows] + counts
        self._row_counts[:, self._source_of[kind], rows] = own * np.where(own[1] > ROW_MEMORY, 0.5, 1.0)
        self._counts *= 1 - 1 / DECAY_ROUNDS
        self._counts[:, kind] += counts.sum(axis=1)

    def tokens(self, rows: IntArray, max_drafts: IntArray) -> FloatArray:
        """Expected and hopeful tokens [2, K] of each draft, bonus token included, for rows [B] that accept at most
        `max_drafts` [B]. Hopeful tokens use chances one standard error higher (the engine's and the row's). The mean
        over rows is geometric: hard requests stay longest, and a draft that helps only easy requests delays them."""
        right, tried = self._row_counts[:, self._source_of][:, :, rows]  # [C, B, D]
        tried = tried + ROW_WEIGHT
        chance = (right + ROW_WEIGHT * self.chance[:, None]) / tried
        errors = 1 / np.sqrt(self._counts[1] + 2)[:, None] + 1 / np.sqrt(tried * len(rows))  # rows are not all lucky
        high = np.minimum(chance + np.sqrt(chance * (1 - chance)) * errors, 1.0)
        reach = np.cumprod([chance, high], axis=3) * (self._levels < max_drafts[:, None])
        brought = np.cumsum(np.insert(reach, 0, 1.0, axis=3), axis=3)  # [2, C, B, 1 + D]
        mean: FloatArray = np.exp(np.log(brought).mean(axis=2))[:, self._class_of, self._depth_of]
        return mean
