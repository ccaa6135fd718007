r"""How many tokens a draft is expected to bring, learned from what was accepted.

    chance[c, i]     of a draft of class c: that depth i + 1 is accepted where depth i was, over all requests. Chains
                     are one class, since a long one begins as a short one does; each tree is its own. What a lookup
                     drafts in a model's place has classes of its own
    odds             of a row: how much better its drafts do than the engine's, as a factor on p / (1 - p); one of the
                     model and one of the lookup
    tokens           1 + p_1 + p_1 p_2 + ...      p_i the chance with the row's odds

A depth is counted only where it was reached: a chain that broke off says nothing of what lay behind. All counts fade,
so that what has not been seen for long is uncertain again; `hopeful` takes the chances as high as the counts allow.
Everything lies by row of the request table; a row begins anew with each request that it is given.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import lgamma, sqrt

import numpy as np
import numpy.typing as npt

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.result import DraftShape

FloatArray = npt.NDArray[np.float64]

PRIOR, PRIOR_WEIGHT = np.array([0.7, 0.3]), 3.0
"""Chance of a chain before anything was seen, of a model and of a lookup beside it, and how many drafts it counts for.
"""

BRANCHES = 1.5
"""Before anything was seen of a tree it fails where so many chains would."""

KEEP, MEMORY = 1 - 1 / 512, 1000
"""Share of the engine's counts that a round leaves, and how many drafts of a depth are remembered at most."""

ROW_WEIGHTS = 1.0, 4.0, 16.0
"""How many drafts the engine's chances may count for in a row's odds: few where requests differ much, as is assumed
first, many where they are alike."""

KEEP_SCORES, MARGIN = 0.98, 3.0
"""What a finished request leaves of the log likelihoods of these weights, and by how much one must beat the first."""

ROW_MEMORY = 128, 16
"""Drafts that a row remembers at most of a model, and of a lookup beside it: text is copied in runs."""

BESIDE_WEIGHT = 16.0
"""That of a model beside a lookup. What does not run is not seen again for long: with 1 a few unlucky drafts at its
beginning gave a row to the lookup, which cost 4 to 6 % where the model was better."""

HOPE, AT_LEAST = 1.5, 0.3
"""Standard errors, about, by which a hopeful chance is above the one that was seen; and what it is at least for a row
of which nothing is known, whatever others do."""


class DraftChances:
    """Chances of one engine and its rows. shapes: all drafts that it has, the first is none."""

    def __init__(self, shapes: Sequence[DraftShape], num_rows: int) -> None:
        kinds = [shape if shape.topk > 1 else _chain(shape) for shape in shapes]
        found = list(dict.fromkeys(kinds))  # the model's chains first, since no draft counts as one
        self._class_of = np.array([found.index(kind) for kind in kinds])
        self._chain_of = np.array([found.index(_chain(kind)) for kind in found])  # [C]: the chains of the same drafter
        self._source_of = np.array([int(kind.by_lookup) for kind in found])  # [C]: 0 the model, 1 the lookup
        self._has_lookup = bool(self._source_of.any())
        self._scores = np.zeros(len(ROW_WEIGHTS))  # log likelihoods of finished requests
        self._weight = np.array([BESIDE_WEIGHT if self._has_lookup else ROW_WEIGHTS[0], ROW_WEIGHTS[0]])  # [source]
        self._depth_of = [shape.depth for shape in shapes]
        classes, most = len(found), max(self._depth_of)
        self._levels = np.arange(most)
        self._last_level = np.maximum(self._depth_of, 1) - 1
        self._nothing = np.array(self._depth_of) == 0
        self._right = np.zeros((classes, most))  # [C, D]: accepted,
        self._tried = np.zeros((classes, most))  # of those whose parent was
        self._chance: FloatArray | None = None  # None: counts have changed
        # [source, 4, R]: accepted and rejected drafts, and how many the engine's chances foretold
        self._row = np.zeros((2, 4, num_rows))

    def begin(self, rows: IntArray) -> None:
        """These rows [B] have new requests; what the ones before accepted tells how much requests differ."""
        if not self._has_lookup:
            for row in rows.tolist():
                if (counts := self._row[0, :, row].tolist())[2]:
                    self._scores = KEEP_SCORES * self._scores + [_likelihood(weight, *counts) for weight in ROW_WEIGHTS]
            best = int(self._scores.argmax())
            self._weight[0] = ROW_WEIGHTS[best if self._scores[best] > self._scores[0] + MARGIN else 0]
        self._row[:, :, rows] = 0

    @property
    def chance(self) -> FloatArray:
        """[C, D]"""
        if self._chance is not None:
            return self._chance
        prior = PRIOR[self._source_of][:, None]
        chain = ((self._right + PRIOR_WEIGHT * prior) / (self._tried + PRIOR_WEIGHT))[self._chain_of]
        is_chain = self._chain_of == np.arange(len(self._chain_of))
        prior = np.where(is_chain[:, None], prior, 1 - (1 - chain) ** BRANCHES)
        self._chance = (self._right + PRIOR_WEIGHT * prior) / (self._tried + PRIOR_WEIGHT)
        return self._chance

    @property
    def highest(self) -> float:
        """The chance of a model's first draft, as high as it may still be."""
        chance, tried = float(self.chance[0, 0]), float(self._tried[0, 0])
        return chance + HOPE * sqrt(chance * (1 - chance) / (tried + PRIOR_WEIGHT))

    def learn(self, shape: int, rows: IntArray, accepted: IntArray, most: IntArray) -> None:
        """A round with the draft of that number: rows [B] accepted so many [B], and could accept at most `most` [B]."""
        kind, depth = self._class_of[shape], self._depth_of[shape]
        limit = np.minimum(most, depth)
        num_right = np.minimum(accepted, limit)  # [B]
        num_tried = np.minimum(accepted + 1, limit)  # one more was rejected, if there was one
        foretold = np.array([0.0, *accumulate(self.chance[kind, :depth].tolist())])[num_tried]
        source = self._source_of[kind]
        counts = self._row[source][:, rows]  # [4, B]
        counts += (num_right, num_tried - num_right, foretold, num_tried - foretold)
        counts *= np.where(counts[0] + counts[1] > ROW_MEMORY[source], 0.5, 1.0)
        self._row[source][:, rows] = counts
        level = self._levels[:depth, None]
        self._right[kind, :depth] += np.count_nonzero(level < num_right, axis=1)
        self._tried[kind, :depth] += np.count_nonzero(level < num_tried, axis=1)
        self._chance = None

    def fade(self) -> None:
        """A round has gone by."""
        kept = np.minimum(KEEP, MEMORY / np.maximum(self._tried, 1))
        self._right *= kept
        self._tried *= kept
        self._chance = None

    def tokens(self, rows: IntArray, most: IntArray) -> FloatArray:
        """[2, K, B]: what each draft is expected to bring each row, the bonus included, where a row accepts at most
        `most` [B]; and what it may still be hoped to bring."""
        weight = self._weight[:, None]
        right, wrong, foretold, foretold_wrong = (self._row[:, :, rows] + weight[..., None]).swapaxes(0, 1)
        odds = right * foretold_wrong / (wrong * foretold)  # [source, B]
        doubt = 1 / np.sqrt((1 + right + wrong - 2 * weight) * len(rows))  # not all are lucky
        chance = self.chance
        high = chance + HOPE * np.sqrt(chance * (1 - chance) / (self._tried + PRIOR_WEIGHT))
        both = np.array([chance, high]).clip(1e-4, 1 - 1e-4)
        both_odds = np.array([odds, odds * np.exp(HOPE * doubt)])[:, self._source_of].swapaxes(1, 2)  # [2, B, C]
        of_row = both_odds[..., None] * (both / (1 - both))[:, None]  # [2, B, C, D]
        of_row /= 1 + of_row
        np.maximum(of_row[1], AT_LEAST * doubt[self._source_of].T[:, :, None], out=of_row[1])
        reach = np.cumprod(of_row, axis=3)
        reach *= (self._levels < most[:, None])[:, None]
        brought = 1 + np.cumsum(reach, axis=3)  # of a draft of each depth
        tokens = brought[:, :, self._class_of, self._last_level].swapaxes(1, 2)
        tokens[:, self._nothing] = 1.0
        return tokens


def _likelihood(weight: float, right: float, wrong: float, foretold: float, foretold_wrong: float) -> float:
    """Logarithm of how likely a row's drafts were if rows spread about the engine's chance as a Beta distribution does
    that counts for twice `weight` drafts."""
    chance = foretold / (foretold + foretold_wrong)
    a, b = 2 * weight * chance, 2 * weight * (1 - chance)
    return _log_beta(a + right, b + wrong) - _log_beta(a, b)


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


def _chain(shape: DraftShape) -> DraftShape:
    """What stands for all chains of the drafter of this draft."""
    return DraftShape(0, 1, 1, shape.by_lookup)
