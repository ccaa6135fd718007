"""What requests have in common is computed once: the prefix cache, as the scheduler uses it.

    admission     a request begins with what is cached of its prompt, or waits while a running one is making more of it
    every chunk   of a prompt is kept once it is committed, so that whoever waits for it can go on
    the end       and a preemption keep all that is committed

Only tokens that the host is certain of name K/V. These are of the weights that made them: a step looks at those before
it uses the cache, and once they are others, the cache is emptied, and rows that began before are not kept. It knows no
pool and no tensor.
"""

from collections.abc import Callable, Sequence

import numpy as np

from specdec.kvcache.cache import KVCache
from specdec.kvcache.mirror import IntArray
from specdec.kvcache.prefix_cache import PrefixCache
from specdec.request import Request, RequestState

WORTH_WAITING = 16
"""Tokens. For fewer nobody begins to wait: a step that computes them again costs about what it costs without them."""

NO_MARK = -1
"""Of a key that is shorter. Keys that have so much in common have the same number there, so others are not compared."""


class Prefixes:
    """cache: with the stores of all models; None: nothing is shared. weights_version: another value whenever K/V would
    come out otherwise."""

    def __init__(self, cache: KVCache | None, weights_version: Callable[[], object]) -> None:
        self._cache: PrefixCache | None = None
        self._weights_version = weights_version
        self._looked = False  # at the weights, in this step: within one they do not change
        self._era = 0  # counts how often what was made before became worthless
        if cache is not None:
            self._cache = PrefixCache(cache.table, pairs=len(cache.stores) > 1)  # a drafter's may follow from the next
            self._made_by = weights_version()
            self._began: IntArray = np.zeros(cache.table.max_requests, dtype=np.int64)  # era by row
            self._marks: IntArray = np.full(cache.table.max_requests, NO_MARK, dtype=np.int64)  # of keys, by row

    def comes(self, request: Request, ahead: Sequence[Request]) -> bool:
        """Is one of those running ahead of it making a part of this request's prompt, that it could soon begin with?

        They are served before it in any case, so it waits for nobody who waits.
        """
        if self._cache is None:
            return False
        self._look()
        key = self._key(request)[: request.prefill_target - 1]
        if len(key) < WORTH_WAITING:
            return False
        alike = (self._marks == key[WORTH_WAITING - 1]).tolist()
        if True not in alike:
            return False
        cached: int | None = None
        for other in ahead:
            if other.state is not RequestState.PREFILL or not alike[other.row]:
                continue
            common = self._cache.common_len(key, self._key(other)[: other.prefill_target])
            if self._cache.table.committed_len.host[other.row] >= common:
                continue
            if cached is None:
                cached = len(self._cache.match(key)) * self._cache.page_size
            if common > cached and (other.number == request.awaited or common >= cached + WORTH_WAITING):
                request.awaited = other.number  # up to the last token of it
                return True
        return False

    def begin(self, request: Request) -> None:
        """The request has been given a row: fill it with what is cached, all but a token that is left to compute."""
        if self._cache is None:
            return
        self._look()
        key = self._key(request)[: request.prefill_target]
        self._began[request.row] = self._era
        self._marks[request.row] = key[WORTH_WAITING - 1] if len(key) >= WORTH_WAITING else NO_MARK
        adopted = self._cache.adopt(request.row, key[: request.prefill_target - 1])
        if request.num_output == 0 and request.stats.preemptions == 0:
            request.stats.cached_tokens = adopted

    def keep(self, requests: Sequence[Request]) -> None:
        """What is committed of running requests is there for others."""
        if self._cache is None:
            return
        self._look()
        kept = [request for request in requests if self._began[request.row] == self._era]
        self._cache.insert([request.row for request in kept], [self._key(request) for request in kept])

    def clear(self) -> None:
        """What has been made so far is not to be shared any more."""
        if self._cache is not None:
            self._cache.clear()
            self._era += 1

    def next_step(self) -> None:
        """The weights may be others from here on."""
        self._looked = False

    def _look(self) -> None:
        """Are the weights those that made what is cached? Their versions are many: once a step that uses the cache."""
        if not self._looked and self._made_by != (now := self._weights_version()):
            self._made_by = now
            self.clear()
        self._looked = True

    def _key(self, request: Request) -> IntArray:
        """Of all its tokens, made longer when there are more."""
        assert self._cache is not None
        num_slots = request.settled.num_tokens - self._cache.pairs
        known = 0 if request.key is None else len(request.key)
        if request.key is None or known != num_slots:
            more = self._cache.key(request.tokens[known:])
            request.key = more if request.key is None else np.concatenate([request.key, more])
        return request.key
