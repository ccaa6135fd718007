r"""Expected tokens of a draft, learned from the drafts that were accepted.

    chance[c, i]     that depth i + 1 of a draft of class c is accepted where depth i was, over all requests. Chains are
                     one class, since a long one begins as a short one does; each tree is its own. The drafts of a
                     lookup have classes of their own
    odds             of a row and a source (model, lookup): how much better its drafts do than the engine's, as a factor
                     on p / (1 - p)
    tokens           1 + p_1 + p_1 p_2 + ...      p_i: the chance with the row's odds

A depth counts only where it was reached. Counts fade, so that old ones become uncertain again. State lies by row of the
request table; a row begins anew with each request.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.result import DraftShape

FloatArray = npt.NDArray[np.float64]

MEMORY = 512
"""Drafts of a depth that the engine remembers at most, and rounds after which counts have faded to a third."""

ROW_WEIGHT = 4.0
"""Drafts for which the engine's chances count in a row's odds."""

ROW_MEMORY = 64
"""Drafts of a source that a row remembers at most."""

HOPE = 1.0
"""Standard errors, about, by which a hopeful chance lies above the expected one."""


class Acceptance:
    """Chances of one engine and its rows. shapes: its drafts, the first is none."""

    def __init__(self, shapes: Sequence[DraftShape], num_rows: int) -> None:
        kinds = [shape if shape.topk > 1 else DraftShape(0, 1, 1, shape.by_lookup) for shape in shapes]
        found = list(dict.fromkeys(kinds))  # the model's chains first, since no draft counts as one
        self._class_of = np.array([found.index(kind) for kind in kinds])
        self._source_of = np.array([int(kind.by_lookup) for kind in found])  # [C]: 0 the model, 1 the lookup
        same = self._source_of[:, None] == self._source_of
        self._others = same.astype(np.float64) - np.eye(len(found))  # [C, C]
        self._depth_of = np.array([shape.depth for shape in shapes])
        self._levels = np.arange(max(self._depth_of))
        self._right = np.zeros((len(found), len(self._levels)))  # [C, D]: accepted,
        self._tried = np.zeros_like(self._right)  # of those whose parent was
        # [source, 4, R]: accepted and rejected drafts, and how many of each the engine's chances foretold
        self._row = np.zeros((2, 4, num_rows))

    def begin_rows(self, rows: IntArray) -> None:
        """These rows [B] have new requests."""
        self._row[:, :, rows] = 0

    @property
    def chance(self) -> FloatArray:
        """[C, D]: two drafts more than were seen count, as the other classes of the source have it, or one half."""
        other = (1 + self._others @ self._right) / (2 + self._others @ self._tried)
        chance: FloatArray = (self._right + 2 * other) / (self._tried + 2)
        return chance

    def learn(self, number: int, rows: IntArray, accepted: IntArray, most: IntArray) -> None:
        """Rows [B] accepted so many drafts [B] of the draft of this number, and could accept `most` [B]."""
        kind, depth = self._class_of[number], self._depth_of[number]
        limit = np.minimum(most, depth)
        num_right = np.minimum(accepted, limit)  # [B]
        num_tried = np.minimum(accepted + 1, limit)  # one more was rejected, if there was one
        foretold = np.array([0.0, *accumulate(self.chance[kind, :depth].tolist())])[num_tried]
        source = self._source_of[kind]
        counts = self._row[source][:, rows]  # [4, B]
        counts += (num_right, num_tried - num_right, foretold, num_tried - foretold)
        self._row[source][:, rows] = counts * np.where(counts[0] + counts[1] > ROW_MEMORY, 0.5, 1.0)
        level = self._levels[:depth, None]
        self._right[kind, :depth] += np.count_nonzero(level < num_right, axis=1)
        self._tried[kind, :depth] += np.count_nonzero(level < num_tried, axis=1)

    def fade(self) -> None:
        """A round has gone by."""
        kept = np.minimum(1 - 1 / MEMORY, MEMORY / np.maximum(self._tried, 1))
        self._right *= kept
        self._tried *= kept

    def tokens(self, rows: IntArray, most: IntArray) -> FloatArray:
        """[2, K]: what each draft is expected to bring, and may be hoped to, the bonus included, where rows [B] accept
        at most `most` [B]. The mean over rows is the geometric one: hard requests stay longest, and a draft that is
        good for easy ones alone holds them up."""
        right, wrong, foretold, foretold_wrong = (self._row[:, :, rows] + ROW_WEIGHT).swapaxes(0, 1)  # [source, B]
        odds = right * foretold_wrong / (wrong * foretold)
        doubt = 1 / np.sqrt((1 + right + wrong - 2 * ROW_WEIGHT) * len(rows))  # not all are lucky
        chance = self.chance
        high = np.minimum(chance + HOPE * np.sqrt(chance * (1 - chance) / (self._tried + 2)), 1 - 1e-4)
        both = np.array([chance, high])
        both_odds = np.array([odds, odds * np.exp(HOPE * doubt)])[:, self._source_of].swapaxes(1, 2)  # [2, B, C]
        of_row = both_odds[..., None] * (both / (1 - both))[:, None]  # [2, B, C, D]
        of_row /= 1 + of_row
        reach = np.cumprod(of_row, axis=3) * (self._levels < most[:, None])[:, None]
        brought = np.cumsum(np.insert(reach, 0, 1.0, axis=3), axis=3)[:, :, self._class_of, self._depth_of]  # [2, B, K]
        mean: FloatArray = np.exp(np.log(brought).mean(axis=1))
        return mean
