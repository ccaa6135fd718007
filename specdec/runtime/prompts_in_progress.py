"""Finds running requests that are computing K/V of a prefix that another prompt shares.

Prompts are sorted by their keys, so prompts that share a prefix stand next to each other: a lookup compares a prompt
with its neighbours only, however many requests are running. Comparing all pairs would make admission quadratic. It
knows neither slots nor the scheduler.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.prefix_cache import PrefixCache
from specdec.runtime.request import Request

Rank = tuple[int, int]
"""Rank of a request: lower ones are served first."""


class PromptReader(NamedTuple):
    """A running request whose prompt is being computed. key [n] and salt identify the prompt."""

    rank: Rank
    request: Request
    key: IntArray
    salt: bytes

    @property
    def entry(self) -> tuple[bytes, bytes, int]:
        return self.salt, self.key.tobytes(), self.request.id


class PromptsInProgress:
    """The prompts in progress of one engine. cache: compares keys."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.clear()

    def clear(self) -> None:
        self._readers: dict[int, PromptReader] = {}  # by number of the request
        self._entries: list[tuple[bytes, bytes, int]] = []  # sorted

    def get(self, number: int) -> PromptReader | None:
        """The request with this number, if its prompt is in progress."""
        return self._readers.get(number)

    def add(self, reader: PromptReader) -> None:
        """Add a request that begins to compute its prompt."""
        self.discard(reader.request)
        self._readers[reader.request.id] = reader
        insort(self._entries, reader.entry)

    def discard(self, request: Request) -> None:
        """Remove a request whose prompt is complete or that lost its row. An unknown request is no error."""
        reader = self._readers.pop(request.id, None)
        if reader is not None:
            del self._entries[bisect_left(self._entries, reader.entry)]

    def sharing(self, key: IntArray, salt: bytes, min_len: int) -> Iterator[tuple[int, PromptReader]]:
        """Requests whose prompts share at least the first `min_len` slots with this key: (slots in whole pages,
        request)."""
        place = bisect_left(self._entries, (salt, key.tobytes(), -1))
        for neighbours in (reversed(self._entries[:place]), self._entries[place:]):  # the nearest share the most
            for other_salt, _, number in neighbours:
                reader = self._readers[number]
                common = self._cache.common_len(key, reader.key) if other_salt == salt else 0
                if common < min_len:
                    break
                yield common, reader

    def check(self, running: set[int]) -> None:
        """Assert that its requests are running, and that their entries are sorted."""
        assert self._readers.keys() <= running, "a request without a row counts as computing its prompt"
        assert self._entries == sorted(reader.entry for reader in self._readers.values()), "entries are not sorted"
