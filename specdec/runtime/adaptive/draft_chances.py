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
"""Of the engine's counts, what a round leaves, and how many drafts of a depth are remembered at most."""

ROW_WEIGHT, ROW_MEMORY = 1.0, (128, 16)
"""Drafts that the engine's chances count for in a row's odds, few since requests differ much; and most drafts that a
row remembers of a model, and of a lookup beside it: text is copied in runs."""

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
        of_model = BESIDE_WEIGHT if self._source_of.any() else ROW_WEIGHT
        self._weight = np.array([of_model, ROW_WEIGHT])  # [source]
        self._depth_of = [shape.depth for shape in shapes]
        classes, most = len(found), max(self._depth_of)
        self._levels = np.arange(most)
        self._last_level = np.maximum(self._depth_of, 1) - 1
        self._nothing = np.array(self._depth_of) == 0
        self._right = np.zeros((classes, most))  # [C, D]: accepted,
        self._tried = np.zeros((classes, most))  # of those whose parent was
        # [source, 4, R]: accepted and rejected drafts, and how many the engine's chances foretold
        self._row = np.zeros((2, 4, num_rows))

    def begin(self, rows: IntArray) -> None:
        """These rows [B] have new requests."""
        self._row[:, :, rows] = 0

    @property
    def chance(self) -> FloatArray:
        """[C, D]"""
        prior = PRIOR[self._source_of][:, None]
        chain = ((self._right + PRIOR_WEIGHT * prior) / (self._tried + PRIOR_WEIGHT))[self._chain_of]
        is_chain = self._chain_of == np.arange(len(self._chain_of))
        prior = np.where(is_chain[:, None], prior, 1 - (1 - chain) ** BRANCHES)
        chance: FloatArray = (self._right + PRIOR_WEIGHT * prior) / (self._tried + PRIOR_WEIGHT)
        return chance

    def learn(self, shape: int, rows: IntArray, accepted: IntArray, most: IntArray) -> None:
        """A round with the draft of that number: rows [B] accepted so many [B], and could accept at most `most` [B]."""
        kind, depth = self._class_of[shape], self._depth_of[shape]
        level = self._levels[:depth]
        right = level < accepted[:, None]  # [B, D]
        tried = (level <= accepted[:, None]) & (level < most[:, None])
        chance = self.chance[kind, :depth]
        right &= tried
        foretold = (tried * chance).sum(axis=1)
        source = self._source_of[kind]
        of_row = self._row[source]
        of_row[:, rows] += (right.sum(axis=1), (tried & ~right).sum(axis=1), foretold, tried.sum(axis=1) - foretold)
        of_row[:, rows] *= np.where(of_row[:2, rows].sum(axis=0) > ROW_MEMORY[source], 0.5, 1.0)
        self._right[kind, :depth] += right.sum(axis=0)
        self._tried[kind, :depth] += tried.sum(axis=0)

    def fade(self) -> None:
        """A round has gone by."""
        kept = np.minimum(KEEP, MEMORY / np.maximum(self._tried, 1))
        self._right *= kept
        self._tried *= kept

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


def _chain(shape: DraftShape) -> DraftShape:
    """What stands for all chains of the drafter of this draft."""
    return DraftShape(0, 1, 1, shape.by_lookup)
