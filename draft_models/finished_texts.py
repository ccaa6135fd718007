r"""A store of finished requests' outputs, searched by context. It holds T tokens; the oldest texts are dropped first.

    cells     the cat sat | a dog ran |     a ring of T tokens. NOTHING (|) ends each text and fills free cells
    place     a cell that holds a token of an output; its context: the tokens before it in its text, newest first
    order     all places, sorted by context (a suffix array of reversed text). The places that share most tokens with a
              given context are next to where it would be inserted

The host inserts a text by binary search and drops old ones. It sends the device the changed cells and where places
joined the order, a few numbers for each token added or dropped; the device moves the rest of the order itself. To look
up rows the device compares with many places at a time: a few launches for any number of rows and any T.

Texts and rows have a salt, and meet only if it is the same: a token is stored with the number of its salt.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from specdec.gpu.mirrored_array import IntArray, MirroredArray, upload

MATCH = 16
"""Upper bound on the length of a match, in tokens: longer ones count as this long."""

NEAREST = 64
"""Places next to a row's context in the order that are considered."""

NOTHING = -1
"""Cell after the last token of a stored text, and any free cell."""

BEFORE = -2
"""Token that stands before the beginning of a text."""

SALT_SHIFT = 32
"""Bits of a token; those above hold the number of its salt."""

FAN = 512
"""Parts into which each step of the device's search divides the order: two steps for 260,000 tokens, three for 100
million."""


class StoredMatches(NamedTuple):
    """Places of finished texts that continue a row's text. cells: [T]. place: [B, P]. matched: [B, P] tokens of context
    that are equal, at most MATCH; 0: no match."""

    cells: torch.Tensor
    place: torch.Tensor
    matched: torch.Tensor

    def tokens_at(self, level: int) -> torch.Tensor:
        """The token `level` cells after each place, [B, P]; NOTHING or any other token if its text has ended."""
        found = self.cells[(self.place + level) % len(self.cells)]
        return torch.where(found == NOTHING, NOTHING, found & (1 << SALT_SHIFT) - 1)


class FinishedTexts:
    """The store of one engine. size: T. num_rows: of the request table."""

    def __init__(self, size: int, num_rows: int, device: torch.device) -> None:
        self.size = size
        self.salt_of_row = MirroredArray((num_rows,), device)  # its number
        self._salts: list[bytes] = [b""] * num_rows
        self._numbers: dict[bytes, int] = {}
        self._count = itertools.count()
        self._texts: deque[tuple[int, bytes]] = deque()  # cells of each, and its salt, oldest first
        self._first = self._used = 0  # where the oldest begins, and cells of all
        self._ring = max(size, MATCH)  # cells: a context never goes all the way round
        self._cells: IntArray = np.full(self._ring, NOTHING, dtype=np.int64)
        self._order: IntArray = np.zeros(0, dtype=np.int64)  # replaced as a whole
        self._sent = self._order  # as the device has it
        self._stale = np.zeros(self._ring, dtype=bool)  # cells that have changed since: their places left the order
        self._fresh = np.zeros(self._ring, dtype=bool)  # places that have joined it since
        self._device = torch.zeros(2 * self._ring + 1, dtype=torch.int64, device=device)  # cells, order, how many
        self._changed = False
        self.clear()

    def clear(self) -> None:
        self._texts.clear()
        self._numbers = {b"": next(self._count)}
        self._salts = [b""] * len(self._salts)
        self.salt_of_row[:] = self._numbers[b""]
        self._first = self._used = 0
        self._cells[:] = NOTHING
        self._sent = self._order = self._order[:0]
        self._stale[:] = self._fresh[:] = False
        self._device[: self._ring].fill_(NOTHING)
        self._device[self._ring :].zero_()
        self._changed = False

    @property
    def num_tokens(self) -> int:
        """Cells in use, at most `size`."""
        return self._used

    def seat(self, row: int, salt: bytes) -> None:
        self._salts[row] = salt
        self.salt_of_row[row] = self._number(salt)

    def add(self, tokens: Sequence[int], begin: int, salt: bytes) -> None:
        """A request has finished, whose output is `tokens[begin:]`. Before it MATCH tokens are kept as its context."""
        if begin >= len(tokens):
            return
        first = max(0, begin - MATCH, len(tokens) - self.size + 1)
        text = np.array([*tokens[first:], NOTHING], dtype=np.int64)
        text[:-1] += self._number(salt) << SALT_SHIFT
        num_output = min(len(tokens) - begin, len(text) - 1)
        self._make_room(len(text))
        cells = (self._first + self._used + np.arange(len(text))) % self._ring
        self._cells[cells], self._stale[cells] = text, True
        self._texts.append((len(text), salt))
        self._used += len(text)
        self._insert(cells[len(text) - 1 - num_output : -1])
        self._changed = True

    def flush(self) -> None:
        """Send what `add` has changed, without waiting for the device.

        What stays in the order moves by a number that changes by one where a place has joined, and where one has left.
        """
        if not self._changed:
            return
        stale, points = np.flatnonzero(self._stale), np.flatnonzero(self._fresh[self._order])
        gone = np.flatnonzero(self._stale[self._sent])
        before = gone - np.arange(len(gone))  # how many of those that stay were before each of those that left
        closed = before + np.searchsorted(points - np.arange(len(points)), before, side="right")
        breaks, by = np.concatenate([points, closed]), np.repeat([-1, 1], [len(points), len(closed)])
        parts = [stale, self._cells[stale], points, self._order[points], breaks, by, np.array([len(self._order)])]
        sent = upload(np.concatenate(parts), self._device.device).split([len(part) for part in parts])
        cells, order, count = self._device.split([self._ring, self._ring, 1])
        cells.index_copy_(0, sent[0], sent[1])
        numbers = torch.arange(self._ring, device=order.device)
        moved = numbers + torch.zeros_like(order).index_add_(0, sent[4], sent[5]).cumsum(0)  # from where each comes
        order.copy_(order[moved.clamp(0, self._ring - 1)].index_copy_(0, sent[2], sent[3]))
        count.copy_(sent[6])
        self._sent = self._order
        self._stale[:] = self._fresh[:] = self._changed = False

    def matches(self, newest: torch.Tensor, rows: torch.Tensor) -> StoredMatches:
        """Places whose context has most tokens in common with `newest` [B, MATCH], the newest tokens of rows [B], the
        last one first, BEFORE where there are none. Those next to it in the order, `NEAREST` or all if there are fewer.
        """
        cells, order, count = self._device.split([self._ring, self._ring, 1])
        salt = self.salt_of_row.tensor[rows, None] << SALT_SHIFT
        context = torch.where(newest == BEFORE, BEFORE, newest + salt)
        middle = insertion_points(cells, order, count, context, FAN)
        width = min(NEAREST, self._ring)
        first = torch.minimum(middle - width // 2, count - width).clamp(min=0)
        near = first[:, None] + torch.arange(width - 1, -1, -1, device=first.device)  # [B, P], of equal ones the latest
        place = order[near]
        equal = contexts(cells, place) == context[:, None]  # [B, P, MATCH]
        matched = equal.to(torch.int64).cumprod(-1).sum(-1)
        return StoredMatches(cells, place, torch.where(near < count, matched, 0))

    def _number(self, salt: bytes) -> int:
        """Number of a salt, which no other salt has or had, not even one that is forgotten."""
        if salt not in self._numbers:
            held = {b"", *self._salts, *(other for _, other in self._texts)}
            self._numbers = {other: number for other, number in self._numbers.items() if other in held}
            self._numbers[salt] = next(self._count)
        return self._numbers[salt]

    def _make_room(self, length: int) -> None:
        """Drop the oldest texts until `length` cells are free."""
        dropped = 0
        while self._used - dropped + length > self.size:
            dropped += self._texts.popleft()[0]
        if dropped:
            cells = (self._first + np.arange(dropped)) % self._ring
            gone = np.zeros(self._ring, dtype=bool)
            gone[cells] = True
            self._cells[cells], self._stale[cells], self._fresh[cells] = NOTHING, True, False
            self._order = self._order[~gone[self._order]]
            self._first, self._used = (self._first + dropped) % self._ring, self._used - dropped

    def _insert(self, places: IntArray) -> None:
        """These places [N] join the order, each after those with the same context."""
        cells, found = torch.from_numpy(self._cells), torch.from_numpy(places)
        own = contexts(cells, found)  # [N, MATCH]
        as_text = (own - BEFORE).numpy().astype(">i8").view(f"S{8 * MATCH}")[:, 0]  # sorts ten times as fast as columns
        by_context = as_text.argsort(kind="stable")
        count = torch.tensor([len(self._order)])
        order = torch.from_numpy(np.append(self._order, 0))  # of none too one can be read
        points = insertion_points(cells, order, count, own[by_context], 2)
        self._order = np.insert(self._order, points.numpy(), places[by_context])
        self._fresh[places] = True


def contexts(cells: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[..., MATCH] tokens before places [...] of the ring [T], the nearest first; NOTHING before their text begins."""
    steps = torch.arange(1, MATCH + 1, device=places.device)
    tokens = torch.take(cells, places[..., None] - steps)  # before the first cell is the last one
    inside = (tokens != NOTHING).to(torch.int64).cumprod(-1) > 0
    return torch.where(inside, tokens, NOTHING)


def insertion_points(
    cells: torch.Tensor, order: torch.Tensor, count: torch.Tensor, wanted: torch.Tensor, fan: int
) -> torch.Tensor:
    """[Q]: how many of the first `count` [1] places of the order have a context that is at most `wanted` [Q, MATCH].

    fan: parts that each step tells apart.
    """
    point = wanted.new_zeros(len(wanted))
    parts = torch.arange(1, fan, device=wanted.device)
    for span in _spans(len(order), fan):
        last = point[:, None] + span * parts - 1  # [Q, fan - 1] of each part but the last
        found = contexts(cells, order[last.clamp(max=len(order) - 1)])
        asked = wanted[:, None].expand_as(found)
        equal = (found == asked).to(torch.int64).cumprod(-1).sum(-1, keepdim=True)
        first = equal.clamp(max=MATCH - 1)  # where they differ; the last one if they do not
        smaller = (found.gather(-1, first) <= asked.gather(-1, first))[..., 0]
        point = point + span * (smaller & (last < count)).sum(-1)
    return point


def _spans(size: int, fan: int) -> Iterator[int]:
    """Powers of `fan`, the largest first, that count to `size`."""
    span = 1
    while span * fan <= size:
        span *= fan
    while span:
        yield span
        span //= fan
