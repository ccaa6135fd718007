"""Policy of the prefix cache: each common prefix is computed once. The scheduler calls it.

    admission     a request adopts the cached pages of its prompt, or waits while a running one computes more of it
    every chunk   is cached when it is committed, so that a request waiting for it can continue
    the end       and a preemption cache all committed K/V

The `cache_salt` is part of the key: requests with different salts share no page and do not wait for each other, as if
their first tokens differed.

A key has only tokens that the host knows. Cached K/V belong to the weights that made them: each step compares the
weights' versions before it uses the cache. If they differ, the cache is emptied, and K/V of rows filled before are not
cached. This file knows no pool and no tensor.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.cache import KVCache
from specdec.kvcache.prefix_cache import NO_PAGES, PrefixCache
from specdec.runtime.request import Request, RequestState

WORTH_WAITING = 16
"""A request waits only for a prefix of at least this many tokens: recomputing fewer adds hardly anything to a step."""

STATE_EVERY = 1024
"""Minimum distance in tokens between copies of recurrent states while a prompt is read. The end of the prompt gets a
copy too."""

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
    """Running requests that are computing K/V of their prompts, to find those that share a prefix with another prompt.

    Prompts are sorted by their keys, so prompts that share a prefix stand next to each other: a lookup compares a
    prompt with its neighbours only, however many requests are running. Comparing all pairs would make admission
    quadratic. cache: compares keys.
    """

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


class PrefixPolicy:
    """Prefix-cache policy of one engine.

    cache: the K/V cache, with the stores of all models; None turns prefix caching off. weights_version: its result
    changes when weights change, which makes cached K/V invalid. lag: for each row, upper bound on its newest tokens
    that lack the drafter's K/V; these are not cached. None: every token has them.
    """

    def __init__(
        self, cache: KVCache | None, weights_version: Callable[[], object], lag: IntArray | None = None
    ) -> None:
        self._cache: PrefixCache | None = None
        self._weights_version = weights_version
        self._lag = lag
        self._era = 0  # incremented when the K/V computed so far become invalid
        if cache is not None:
            shared = len(cache.models) > 1  # with a drafter, whose K/V may depend on the next token
            self._cache = PrefixCache(cache.table, needs_next_token=shared, states=cache.state_cache())
            self._table = cache.table
            self._made_by = weights_version()
            self._row_era: IntArray = np.zeros(cache.table.max_requests, dtype=np.int64)  # era in which each row began
            self._in_progress = PromptsInProgress(self._cache)

    def should_wait_for_prefix(self, request: Request, rank: Rank) -> bool:
        """Is a running request of lower rank computing a prefix that this request could then adopt?

        Only running requests of lower rank count, so no two requests wait for each other. A request that waits for
        another one keeps waiting for it until that prefix is complete.
        """
        if (cache := self._usable_cache()) is None:
            return False
        reader = self._in_progress.get(request.awaited_request)
        if reader is not None and reader.rank < rank and self._is_computing(reader.request, request.awaited_prefix_len):
            return True
        key, salt = self._key(request)[: request.prefill_target - 1], salt_of(request)
        if len(key) < WORTH_WAITING:
            return False
        cached = min(len(cache.match_prefix(key, salt)) * cache.page_size, request.max_cached)
        scored = request.max_cached < request.prefill_target - 1  # needs scores that only its own samples compute
        found: list[tuple[int, PromptReader]] = []
        for common, reader in self._in_progress.sharing(key, salt, cached + WORTH_WAITING):
            fits = reader.rank < rank and not (scored and reader.request.scores is not request.scores)
            if fits and self._is_computing(reader.request, common):
                found.append((common, reader))
        if found:
            longest, first = min(found, key=lambda each: (-each[0], each[1].rank))
            request.awaited_request, request.awaited_prefix_len = first.request.id, longest
        return len(found) > 0

    def cached_pages(self, request: Request) -> IntArray:
        """The cached pages that a waiting request would adopt if it got a row now. Changes nothing."""
        cache = self._usable_cache()
        return NO_PAGES if cache is None else cache.match_prefix(self._adoptable(request), salt_of(request))

    def adopt_prefix(self, request: Request, rank: Rank) -> None:
        """Fill the row of an admitted request with the cached pages of its prompt."""
        if (cache := self._usable_cache()) is None:
            return
        key, salt = self._key(request)[: request.prefill_target], salt_of(request)
        self._row_era[request.row] = self._era
        adopted = cache.adopt(request.row, self._adoptable(request), salt)
        if request.num_output == 0 and request.stats.preemptions == 0:
            request.stats.cached_tokens = adopted
        if len(key) >= WORTH_WAITING:
            self._in_progress.add(PromptReader(rank, request, key, salt))

    def keep_committed(self, requests: Sequence[Request]) -> None:
        """Insert the committed K/V of running requests into the cache, for other requests."""
        if (cache := self._usable_cache()) is None:
            return
        kept = [request for request in requests if self._row_era[request.row] == self._era]
        cache.insert([request.row for request in kept], [*map(self._whole_key, kept)], [*map(salt_of, kept)])
        for request in requests:
            if not self._is_computing(request, request.prefill_target):
                self._in_progress.discard(request)
        if cache.states is not None:
            for request in kept:
                every = STATE_EVERY if self._is_computing(request, request.prefill_target) else 1
                cache.cache_state(request.row, self._whole_key(request), salt_of(request), every=every)

    def release_rows(self, requests: Sequence[Request]) -> None:
        """Cache the committed K/V of requests that are about to lose their rows. Requests that waited for them stop
        waiting."""
        self.keep_committed(requests)
        if self._cache is not None:
            for request in requests:
                self._in_progress.discard(request)

    def restart(self) -> None:
        """Restart without rows. The pools were reset, so all cached pages are gone."""
        if self._cache is not None:
            self._in_progress.clear()

    def clear(self) -> None:
        """Stop sharing all K/V made so far, both in the cache and in rows."""
        if self._cache is not None:
            self._cache.clear()
            self._era += 1
            self._in_progress.clear()  # their K/V will not be cached

    def _usable_cache(self) -> PrefixCache | None:
        """The cache, cleared if the weights have changed; None: there is none. Within a step `weights_version` returns
        one object, which is quick to compare."""
        if self._cache is not None and (now := self._weights_version()) is not self._made_by:
            made_by, self._made_by = self._made_by, now
            if made_by != now:
                self.clear()
        return self._cache

    def check(self, running: Sequence[Request]) -> None:
        """Assert that prompts in progress are those of running requests."""
        if self._cache is not None:
            self._in_progress.check({request.id for request in running})

    def _is_computing(self, request: Request, length: int) -> bool:
        """Does a running request still have to commit some of the first `length` tokens of its prompt?"""
        reading = request.state is RequestState.PREFILL
        return reading and int(self._table.committed_len.host[request.row]) < length

    def _adoptable(self, request: Request) -> IntArray:
        """Key of the tokens whose K/V the request may adopt: see `Request.max_cached`."""
        return self._key(request)[: request.max_cached]

    def _whole_key(self, request: Request) -> IntArray:
        """Key of the request's tokens whose K/V target and drafter have both made."""
        if self._lag is None or not (lag := int(self._lag[request.row])):
            return self._key(request)
        return self._key(request)[: max(int(self._table.committed_len.host[request.row]) - lag, 0)]

    def _key(self, request: Request) -> IntArray:
        """Key of all the request's tokens; extended as tokens are added."""
        assert self._cache is not None
        num_slots = request.settled.num_tokens - self._cache.needs_next_token
        known = 0 if request.key is None else len(request.key)
        if request.key is None or known != num_slots:
            more = self._cache.key(request.tokens[known:])
            request.key = more if request.key is None else np.concatenate([request.key, more])
        return request.key


def salt_of(request: Request) -> bytes:
    """The request's `cache_salt` as bytes, which is part of its cache key; empty if it has none."""
    return b"" if request.params.cache_salt is None else request.params.cache_salt.encode("utf-8", "surrogatepass")
