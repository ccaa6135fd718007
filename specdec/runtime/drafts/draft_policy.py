"""Chooses the draft of each round (or none): the one with the highest hopeful rate in tokens per second.

    rate[draft] = tokens[draft] / seconds[draft]

    draft_ladder       the drafts that an engine chooses among
    DraftAcceptance    tokens of a round with each draft, by request
    RoundTimes         seconds of a round with each draft, for one batch size
    DraftAccount       what each source (model or lookup) has saved, and may therefore risk
    DraftPolicy        one draft for all requests of a round; `Steps` asks for it, `Launches` reports the settled round

The rate of a draft that has rarely run is uncertain. So the *hopeful* rate decides, the upper end of the plausible
range. A wrong choice corrects itself, since each run of a draft makes its rate more certain. After the first trial of a
source, its account must cover the cost. The target draws the same tokens with any draft.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specdec.config import SpecConfig
from specdec.gpu.captures import next_power_of_two
from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.drafts.draft_reports import DraftStats
from specdec.runtime.rounds.result import NO_DRAFT, DraftShape

FloatArray = npt.NDArray[np.float64]

CHAINS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Levels of the chains. If the full draft is a tree, only the first two are used."""

TREES = (8, 16, 32, 64, 128, 256)
"""Nodes of the trees, root included."""

DECAY_ROUNDS = 512
"""Rounds after which counts of the draft policy have decayed to about 1/e."""

MAX_SAMPLES = 8
"""Number of newest rounds per draft whose times are kept."""

FIRST_GUESS = 1.5
"""Assumed time of a draft that was never timed, in plain rounds."""

MIN_DRAFT_TIME_RATIO = 0.95
"""If a round with drafts takes less than this many plain rounds, the time of plain rounds is wrong."""

RETRY_ROUNDS = 32
"""Rounds after which a draft is timed anew, once, if it became slow in fewer rounds: that may have been a burst."""

SLOW = 1.5
"""A draft that takes this many times as long as before became slow."""

ROW_WEIGHT = 4.0
"""Weight, in drafts, of the engine's chances in the estimate of a row."""

ROW_MEMORY = 64
"""Maximum number of drafts that a row remembers for a source and depth."""

LOSS_SHARE = 0.008
"""Share of the decoding time that drafts may lose. Together with one plain round per DECAY_ROUNDS rounds it is 1 %."""

MAX_SAVED = 16.0
"""Upper bound on a balance, in plain rounds: the most that a good drafter can lose if it turns bad."""


def draft_ladder(spec: SpecConfig, *, captured: bool, lookup: bool = False) -> Sequence[DraftShape]:
    """The drafts from which each round's draft is chosen: none, the model's up to the engine's full draft, a lookup's.

        captured, chain of 6     none   chains of 1, 2, 3, 4, 6       few: each is captured for every batch size
        captured, tree of 60     none   chains of 1, 2, trees of 8, 16, 32, 60 nodes
        not captured             none   the full draft

    A lookup next to a model adds its full draft and, if rounds are captured, a chain of half as many levels.
    """
    whole = DraftShape.from_spec(spec)
    half = max(1, whole.depth // 2)
    chains, trees = (CHAINS, ()) if whole.topk == 1 else (CHAINS[:2], TREES)
    rungs = [DraftShape(depth, 1, depth + 1) for depth in chains if depth < whole.depth]
    rungs += [_tree(spec, nodes) for nodes in trees if nodes < whole.num_nodes]
    looked_up = dict.fromkeys([DraftShape(half, 1, half + 1), whole])
    if not captured:
        rungs, looked_up = [], {whole: None}
    return [NO_DRAFT, *rungs, whole, *(draft._replace(by_lookup=True) for draft in looked_up if lookup)]


def _tree(spec: SpecConfig, num_nodes: int) -> DraftShape:
    """A tree of `num_nodes` nodes. Its depth rises by one level for twice the nodes."""
    tree = DraftShape.from_spec(spec, num_nodes.bit_length())
    return tree._replace(num_nodes=min(num_nodes, tree.num_nodes))


class DraftAcceptance:
    """Expected tokens per round of each draft, learned from accepted and rejected drafts.

        chance    probability that depth i + 1 of a draft is accepted if depth i was
                  The engine has one per source and class; chains are one class, each tree is its own.
                  A request has one per source; the engine's stands in until it has drafted, with the
                  weight of ROW_WEIGHT drafts
        tokens    1 + p_1 + p_1 p_2 + ...      p_i: the chance of the request at depth i

    A round counts for the depths that it reached. Counts decay, so old chances become uncertain again. shapes: the
    engine's drafts; the first is no draft.
    """

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
        """The engine's chances [C, D]. Each class starts with two pseudo-drafts, accepted at the rate of the source's
        other classes. That rate starts with one accepted and one rejected pseudo-draft."""
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
        `max_drafts` [B]. Hopeful tokens use chances one standard error higher (the engine's and the row's), but no
        level is hoped to be better than the one before: rarely reached levels would be tried forever. The mean over
        rows is geometric: hard requests stay longest, and a draft that helps only easy requests delays them."""
        right, tried = self._row_counts[:, self._source_of][:, :, rows]  # [C, B, D]
        tried = tried + ROW_WEIGHT
        chance = (right + ROW_WEIGHT * self.chance[:, None]) / tried
        # errors of the engine's chance, and of the mean over rows
        errors = 1 / np.sqrt(self._counts[1] + 2)[:, None] + 1 / np.sqrt(tried * len(rows))
        high = np.minimum(chance + np.sqrt(chance * (1 - chance)) * errors, 1.0)
        high = np.maximum(chance, np.minimum.accumulate(high, axis=2))
        reach = np.cumprod([chance, high], axis=3) * (self._levels < max_drafts[:, None])
        tokens = np.cumsum(np.insert(reach, 0, 1.0, axis=3), axis=3)  # [2, C, B, 1 + D]
        mean: FloatArray = np.exp(np.log(tokens).mean(axis=2))[:, self._class_of, self._depth_of]
        return mean


class RoundTimes:
    """Seconds of a round with each draft, for one batch size.

    The lower quartile of the newest rounds counts, since other work on a machine only adds time. The time measured when
    the engine was made (or a guess) counts as one sample: one shorter round lowers the quartile, three longer ones
    raise it. If the draft with the most samples takes longer than measured at the start, the measured times of all
    drafts rise by the same factor. A draft (or no draft) that has not run in the newest DECAY_ROUNDS rounds loses its
    samples, which only replace a guess, and is hoped to take half its time, later a quarter and so on. So it is tried
    again, and once after RETRY_ROUNDS rounds if it just became slow. If the lower quartile of a draft is below a plain
    round, plain rounds were timed next to other work, and all samples are dropped.

    timed: seconds [K] with each draft (the first is no draft), measured at the start; 0: unknown. seconds: believed and
    hopeful times, [2, K].
    """

    def __init__(self, timed: Sequence[float]) -> None:
        self.timed = np.array(timed)
        self._own: list[deque[float]] = [deque(maxlen=MAX_SAMPLES) for _ in timed]
        self._last = [0] * len(timed)  # number of the last round with each draft
        self._slow_rounds = [RETRY_ROUNDS] * len(timed)  # rounds with each draft since it last took what was timed
        self._rounds = 0
        self.seconds = self._believed()

    def learn(self, draft_index: int, seconds: float) -> None:
        """Add a round with draft `draft_index` that took this many seconds."""
        self._rounds += 1
        low = lower_quartile(seconds, self._own[draft_index])
        is_doubtful = draft_index > 0 and low < MIN_DRAFT_TIME_RATIO * self.seconds[0, 0]
        if is_doubtful or not self.timed[0]:
            self.timed[0] = low  # a plain round takes at most this
        for index, own in enumerate(self._own):
            unused, timed = self._rounds - self._last[index], float(self.timed[index])
            if own and not timed and (unused > DECAY_ROUNDS or len(own) == MAX_SAMPLES):
                self.timed[index] = lower_quartile(np.inf, own)  # better than a guess
            just_became_slow = 0 < self._slow_rounds[index] < RETRY_ROUNDS < unused
            if retry := just_became_slow and lower_quartile(timed, own) > SLOW * timed:
                self._slow_rounds[index] = RETRY_ROUNDS
            if is_doubtful or retry or unused > DECAY_ROUNDS:
                own.clear()
        self._own[draft_index].append(seconds)
        self._last[draft_index] = self._rounds
        timed, own = self.timed[draft_index], self._own[draft_index]
        is_slow = max(seconds, lower_quartile(timed, own)) > SLOW * timed > 0
        self._slow_rounds[draft_index] = self._slow_rounds[draft_index] + 1 if is_slow else 0
        self.seconds = self._believed()

    def _believed(self) -> FloatArray:
        own, plain = self._own, lower_quartile(self.timed[0], self._own[0])
        timed = np.where(self.timed > 0, self.timed, FIRST_GUESS * plain)
        seen = max(range(1, len(own)), key=lambda draft_index: len(own[draft_index]))  # the draft with the most samples
        timed[1:] *= max(1.0, lower_quartile(timed[seen], own[seen]) / max(timed[seen], 1e-9))
        believed = np.array([lower_quartile(*each) for each in zip(timed.tolist(), own, strict=True)])
        ages = [(self._rounds - last) // DECAY_ROUNDS for last in self._last]
        halved = [0 if each else max(1, age) for each, age in zip(own, ages, strict=True)]
        hoped = believed * 0.5 ** np.array(halved)
        return np.array([believed.clip(min=believed[0]), hoped.clip(min=hoped[0])])


def lower_quartile(timed: float, own: Sequence[float]) -> float:
    ordered = sorted([timed, *own])
    return ordered[len(ordered) // 4]


class DraftAccount:
    """Bounds the time lost on rejected drafts to a share of the decoding time of the newest rounds.

        allowance   one plain round, and LOSS_SHARE of the seconds of all rounds; each source has an equal part
        balance     allowance + seconds of plain rounds for the same tokens - seconds that its rounds took

    The newest DECAY_ROUNDS rounds count, at the times that are believed *now*. So a burst of noise is not charged for
    long, and a draft that was timed too fast is charged in full when its true time is known. A draft is allowed only if
    the balance of its source covers its full cost and that of the drafts in flight, or is nearly full again: a burst
    may have made the draft look dear. source [K]: source number of each draft; the first is no draft.
    """

    def __init__(self, source: Sequence[int]) -> None:
        self._is_of = np.eye(1 + max(source))[source]  # [K, S]
        self._counts = defaultdict[RoundTimes, FloatArray](lambda: np.zeros((2, len(source))))  # rounds, tokens

    def balance(self, now: RoundTimes) -> FloatArray:
        """Balance of each source [S] in seconds. now: times for the present batch size."""
        balance, longest = np.zeros(len(self._is_of.T)), float(now.seconds[0, 0])
        for times, (rounds, tokens) in self._counts.items():
            spent, plain = rounds * times.seconds[0], float(times.seconds[0, 0])
            balance += (tokens * plain - spent) @ self._is_of + LOSS_SHARE * spent.sum() / len(balance)
            longest = max(longest, plain)
        return balance + longest / len(balance)

    def settle(self, times: RoundTimes, draft_index: int, tokens: float) -> None:
        """Enter a round with draft `draft_index` that gained `tokens` per row on average."""
        self._counts[times][:, draft_index] += 1, tokens
        most = MAX_SAVED * float(times.seconds[0, 0]) or np.inf
        kept = np.minimum(1 - 1 / DECAY_ROUNDS, most / np.maximum(self.balance(times), 1e-9))
        for counts in self._counts.values():
            counts *= self._is_of @ kept


class DraftPolicy:
    """Chooses and learns for one engine. shapes: its drafts; the first is no draft. times: by batch size."""

    def __init__(self, shapes: Sequence[DraftShape], num_rows: int) -> None:
        self.shapes = shapes
        self.times: dict[int, RoundTimes] = {}
        self.acceptance = DraftAcceptance(shapes, num_rows)
        self._source = [int(shape.by_lookup) for shape in shapes]
        self._untried = sorted(set(self._source))
        self.account = DraftAccount(self._source)
        self._rounds, self._tried = [0] * len(shapes), [0] * len(shapes)
        self._stats = DraftStats(shapes)

    def choose(
        self,
        rows: IntArray,
        max_drafts: IntArray,
        batch: int,
        min_draft: DraftShape,
        unsettled: Sequence[DraftShape] = (),
    ) -> DraftShape:
        """Choose for a round of rows [B] that can accept at most `max_drafts` [B] drafts each. batch: seats, padding
        included. min_draft: the smallest allowed draft, that a row has fixed. unsettled: drafts of rounds in flight."""
        times = self.times_of(batch)
        seconds, is_known = times.seconds, bool(times.seconds[0, 0])
        tokens = self.acceptance.tokens(rows, max_drafts)  # [2, K]
        rate, hopeful_rate = (tokens / (seconds if is_known else 1.0)).tolist()
        if min_draft.num_nodes > 1:
            allowed = [index for index, shape in enumerate(self.shapes) if shape.covers(min_draft)]
        elif not is_known:
            allowed = [0]
        elif self._untried:  # try the smallest draft of each source once, whatever it costs
            allowed = [self._source.index(self._untried.pop(0), 1)]
        else:
            most = LOSS_SHARE * DECAY_ROUNDS * seconds[0, 0] / (1 + max(self._source))  # nearly a full balance
            cost, left = np.minimum(seconds[0] - seconds[0, 0], most), self.account.balance(times)
            for index in map(self._index_of, unsettled):
                left[self._source[index]] -= cost[index]
            allowed = [index for index, source in enumerate(self._source) if cost[index] <= max(0.0, left[source])]
        best, chosen = max(allowed, key=rate.__getitem__), max(allowed, key=hopeful_rate.__getitem__)
        if self.shapes[chosen] in unsettled:  # one trial at a time is enough
            chosen = best
        self._rounds[chosen] += 1
        self._tried[chosen] += chosen != best
        expected = (tokens[0].tolist(), (1e3 * seconds[0]).tolist()) if is_known else ((), ())
        self._stats = self._stats._replace(last=(len(rows), *expected), best=best)
        return self.shapes[chosen]

    def learn(
        self, shape: DraftShape, batch: int, seconds: float, drafted: Sequence[IntArray], mean_tokens: float
    ) -> None:
        """Learn from a settled round. seconds: includes reading the lag before it. drafted: see
        `DraftAcceptance.learn`. mean_tokens: tokens gained per request; 0: a request had fixed the draft, so nothing is
        charged."""
        index, times = self._index_of(shape), self.times_of(batch)
        if shape == self.shapes[index] or seconds > times.seconds[1, index]:  # a shortened draft takes at most as long
            times.learn(index, seconds)
        self.acceptance.learn(index, *drafted)
        if index:
            judged, begun = self._stats.judged + len(drafted[0]), self._stats.begun + int(np.count_nonzero(drafted[1]))
            self._stats = self._stats._replace(judged=judged, begun=begun)
        charged = index if mean_tokens else 0
        self.account.settle(times, charged, mean_tokens if charged else 1.0)

    def times_of(self, batch: int) -> RoundTimes:
        """Times of rounds with this many seats."""
        size = batch if batch in self.times else next_power_of_two(batch)
        if size not in self.times:
            self.times[size] = RoundTimes([0.0] * len(self.shapes))
        return self.times[size]

    def _index_of(self, shape: DraftShape) -> int:
        """Number of the smallest of `shapes` that covers this one, which may be shortened for its requests."""
        return next(index for index, each in enumerate(self.shapes) if each.covers(shape))

    def stats(self) -> DraftStats:
        """The present use of drafts. Any thread may call this."""
        milliseconds = {size: (1e3 * times.seconds[0]).tolist() for size, times in sorted(self.times.items())}
        rounds, tried, chance = list(self._rounds), list(self._tried), self.acceptance.chance[0].tolist()
        return self._stats._replace(rounds=rounds, tried=tried, milliseconds=milliseconds, chance=chance)
