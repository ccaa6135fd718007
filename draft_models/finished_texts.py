r"""A store of finished requests' outputs that is searched by context. It holds T tokens and drops the oldest texts
first.

    cells     the cat sat | a dog ran |     a ring of T tokens. NOTHING (|) ends each text and fills free cells
    place     a cell with a token of an output; its context is the tokens before it in its text, newest first
    order     all places, sorted by context (a suffix array of reversed text). The places that share most tokens
              with a given context are next to its insertion point

The host inserts a text by binary search and drops old texts. It sends the device the changed cells, and the points at
which places joined the order: a few numbers per token added or dropped. The device moves the rest of the order itself.
To look up rows, the device compares with many places at once: a few launches for any number of rows and any T.

Texts and rows have a salt, and a row finds only texts with its own salt: each token is stored together with its salt's
number.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from specdec.gpu.mirrored_array import IntArray, MirroredArray, upload

MATCH = 16
"""Upper bound on the length of a match in tokens; longer matches count as this long."""

NEAREST = 64
"""Number of places next to a row's context in the order that are considered."""

NOTHING = -1
"""Content of the cell after a stored text's last token, and of free cells."""

BEFORE = -2
"""Token that stands for positions before the beginning of a text."""

SALT_SHIFT = 32
"""Bits of a token id; the higher bits hold the number of its salt."""

FAN = 512
"""Parts into which each step of the device's search divides the order: 260,000 tokens take two steps, 100 million
three."""


class StoredMatches(NamedTuple):
    """Places in finished texts that continue a row's text. cells: [T]. place: [B, P]. matched: [B, P] number of equal
    context tokens, at most MATCH; 0: no match."""

    cells: torch.Tensor
    place: torch.Tensor
    matched: torch.Tensor

    def tokens_at(self, level: int) -> torch.Tensor:
        """The token `level` cells after each place, [B, P]; undefined if its text has ended there."""
        found = self.cells[(self.place + level) % len(self.cells)]
        return torch.where(found == NOTHING, NOTHING, found & (1 << SALT_SHIFT) - 1)


class FinishedTexts:
    """The store of one engine. size: T. num_rows: rows of the request table."""

    def __init__(self, size: int, num_rows: int, device: torch.device) -> None:
        self.size = size
        self.salt_of_row = MirroredArray((num_rows,), device)  # number of each row's salt
        self._salts = [b""] * num_rows
        self._count = itertools.count()
        self._texts: deque[tuple[int, bytes]] = deque()  # (cells, salt) of each, oldest first
        self._ring = max(size, MATCH)  # cells; a context never wraps around fully
        self._cells: IntArray = np.full(self._ring, NOTHING, dtype=np.int64)
        self._stale = np.zeros(self._ring, dtype=bool)  # cells changed since the last `flush`: their places left
        self._fresh = np.zeros(self._ring, dtype=bool)  # places that joined the order since the last `flush`
        self._device = torch.zeros(2 * self._ring + 1, dtype=torch.int64, device=device)  # cells, order, its length
        self.clear()

    def clear(self) -> None:
        self._texts.clear()
        self._numbers = {b"": next(self._count)}  # number of each salt
        self._salts = [b""] * len(self._salts)
        self.salt_of_row[:] = self._numbers[b""]
        self._first = self.num_tokens = 0  # first cell of the oldest text; cells in use, at most `size`
        self._cells[:] = NOTHING
        self._order: IntArray = np.zeros(0, dtype=np.int64)  # replaced as a whole
        self._sent = self._order  # as the device has it
        self._stale[:] = self._fresh[:] = False
        self._device[: self._ring].fill_(NOTHING)
        self._device[self._ring :].zero_()
        self._changed = False

    def set_salt(self, row: int, salt: bytes) -> None:
        self._salts[row] = salt
        self.salt_of_row[row] = self._number(salt)

    def add(self, tokens: Sequence[int], begin: int, salt: bytes) -> None:
        """Store the output `tokens[begin:]` of a finished request, with MATCH tokens before it as context."""
        if begin >= len(tokens):
            return
        first = max(0, begin - MATCH, len(tokens) - self.size + 1)
        text = np.array([*tokens[first:], NOTHING], dtype=np.int64)
        text[:-1] += self._number(salt) << SALT_SHIFT
        num_output = min(len(tokens) - begin, len(text) - 1)
        self._make_room(len(text))
        cells = (self._first + self.num_tokens + np.arange(len(text))) % self._ring
        self._cells[cells], self._stale[cells] = text, True
        self._texts.append((len(text), salt))
        self.num_tokens += len(text)
        self._insert(cells[len(text) - 1 - num_output : -1])
        self._changed = True

    def flush(self) -> None:
        """Send the changes made by `add`, without waiting for the device.

        An entry that stays in the order moves by the number of places that joined before it, less those that left.
        """
        if not self._changed:
            return
        stale, points = np.flatnonzero(self._stale), np.flatnonzero(self._fresh[self._order])
        gone = np.flatnonzero(self._stale[self._sent])
        before = gone - np.arange(len(gone))  # staying places before each place that left
        closed = before + np.searchsorted(points - np.arange(len(points)), before, side="right")
        breaks, by = np.concatenate([points, closed]), np.repeat([-1, 1], [len(points), len(closed)])
        parts = [stale, self._cells[stale], points, self._order[points], breaks, by, np.array([len(self._order)])]
        sent = upload(np.concatenate(parts), self._device.device).split([len(part) for part in parts])
        cells, order, count = self._device.split([self._ring, self._ring, 1])
        cells.index_copy_(0, sent[0], sent[1])
        numbers = torch.arange(self._ring, device=order.device)
        moved = numbers + torch.zeros_like(order).index_add_(0, sent[4], sent[5]).cumsum(0)  # old index of each
        order.copy_(order[moved.clamp(0, self._ring - 1)].index_copy_(0, sent[2], sent[3]))
        count.copy_(sent[6])
        self._sent = self._order
        self._stale[:] = self._fresh[:] = self._changed = False

    def matches(self, newest: torch.Tensor, rows: torch.Tensor) -> StoredMatches:
        """The `NEAREST` places (or all, if fewer) whose contexts are next in the order to `newest` [B, MATCH]: the
        newest tokens of rows [B], last one first, padded with BEFORE."""
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
        """Number of a salt. It is never reused, even after a salt is forgotten."""
        if salt not in self._numbers:
            held = {b"", *self._salts, *(other for _, other in self._texts)}
            self._numbers = {other: number for other, number in self._numbers.items() if other in held}
            self._numbers[salt] = next(self._count)
        return self._numbers[salt]

    def _make_room(self, length: int) -> None:
        """Drop the oldest texts until `length` cells are free."""
        dropped = 0
        while self.num_tokens - dropped + length > self.size:
            dropped += self._texts.popleft()[0]
        if dropped:
            cells = (self._first + np.arange(dropped)) % self._ring
            gone = np.zeros(self._ring, dtype=bool)
            gone[cells] = True
            self._cells[cells], self._stale[cells], self._fresh[cells] = NOTHING, True, False
            self._order = self._order[~gone[self._order]]
            self._first, self.num_tokens = (self._first + dropped) % self._ring, self.num_tokens - dropped

    def _insert(self, places: IntArray) -> None:
        """Insert these places [N] into the order, each after equal contexts."""
        cells, found = torch.from_numpy(self._cells), torch.from_numpy(places)
        own = contexts(cells, found)  # [N, MATCH]
        as_text = (own - BEFORE).numpy().astype(">i8").view(f"S{8 * MATCH}")[:, 0]  # sorts 10x faster than columns
        by_context = as_text.argsort(kind="stable")
        count = torch.from_numpy(np.array([len(self._order)]))
        order = torch.from_numpy(np.append(self._order, 0))  # one more, so an empty order can be read
        points = insertion_points(cells, order, count, own[by_context], 2)
        self._order = np.insert(self._order, points.numpy(), places[by_context])
        self._fresh[places] = True


def contexts(cells: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Tokens [..., MATCH] before places [...] of the ring [T], nearest first; NOTHING before the text begins."""
    steps = torch.arange(1, MATCH + 1, device=places.device)
    tokens = torch.take(cells, places[..., None] - steps)  # index -1 wraps to the last cell
    inside = (tokens != NOTHING).to(torch.int64).cumprod(-1) > 0
    return torch.where(inside, tokens, NOTHING)


def insertion_points(
    cells: torch.Tensor, order: torch.Tensor, count: torch.Tensor, wanted: torch.Tensor, fan: int
) -> torch.Tensor:
    """Number [Q] of the order's first `count` [1] places whose context is at most `wanted` [Q, MATCH].

    fan: parts into which each step divides the order.
    """
    point = wanted.new_zeros(len(wanted))
    parts = torch.arange(1, fan, device=wanted.device)
    for span in _spans(len(order), fan):
        last = point[:, None] + span * parts - 1  # [Q, fan - 1] of each part but the last
        found = contexts(cells, order[last.clamp(max=len(order) - 1)])
        asked = wanted[:, None].expand_as(found)
        equal = (found == asked).to(torch.int64).cumprod(-1).sum(-1, keepdim=True)
        first = equal.clamp(max=MATCH - 1)  # first difference; the last index if none
        smaller = (found.gather(-1, first) <= asked.gather(-1, first))[..., 0]
        point = point + span * (smaller & (last < count)).sum(-1)
    return point


def _spans(size: int, fan: int) -> Iterator[int]:
    """Powers of `fan` that suffice to count to `size`, largest first."""
    span = 1
    while span * fan <= size:
        span *= fan
    while span:
        yield span
        span //= fan
