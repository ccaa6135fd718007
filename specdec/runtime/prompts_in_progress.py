"""Finds running requests that are computing K/V of a prefix that another prompt shares.

It is a radix tree over keys of the prefix cache. A node is a run of whole pages and lists the requests whose prompts
pass through it. A lookup costs the length of one prompt, however many requests are running; comparing all pairs would
make admission quadratic. It knows neither slots nor the scheduler. Invariant: a request is in every node along its key
and in no other, and every node has a request.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.prefix_cache import PrefixCache
from specdec.runtime.request import Request

Rank = tuple[int, int]
"""Rank of a request: lower ones are served first."""

_by_rank = itemgetter(0)


class PromptReader(NamedTuple):
    """A running request whose prompt is being computed. key [n] (cut to whole pages in the tree) and salt identify the
    prompt."""

    rank: Rank
    request: Request
    key: IntArray
    salt: bytes


@dataclass(slots=True, eq=False, repr=False)
class _Node:
    """A run of whole pages in the tree.

    key: [n * page_size]. readers: requests whose prompts pass through it, by rank.
    """

    key: IntArray
    readers: list[PromptReader]
    children: "dict[bytes, _Node]" = field(default_factory=dict)


class PromptsInProgress:
    """The prompts in progress of one engine. cache: compares keys.

    version: changes when a prompt is added or discarded. An answer is valid while the version stays the same.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.version = 0
        self.clear()

    def clear(self) -> None:
        self.version += 1
        self._readers: dict[int, PromptReader] = {}  # by number of the request
        self._root: dict[bytes, _Node] = {}

    def get(self, number: int) -> PromptReader | None:
        """The request with this number, if its prompt is in progress."""
        return self._readers.get(number)

    @property
    def numbers(self) -> set[int]:
        return set(self._readers)

    def add(self, reader: PromptReader) -> None:
        """Add a request that begins to compute its prompt."""
        self.discard(reader.request)
        self.version += 1
        reader = reader._replace(key=reader.key[: len(reader.key) // self._cache.page_size * self._cache.page_size])
        self._readers[reader.request.number] = reader
        key, name, children = reader.key, reader.salt + self._cache.first_page(reader.key), self._root
        while len(key) >= self._cache.page_size:
            node = children.get(name)
            if node is None:
                node = children[name] = _Node(key, [])
            common = self._cache.common_len(node.key, key)
            if common < len(node.key):
                children[name] = node = self._split(node, common)
            insort(node.readers, reader, key=_by_rank)
            key, children = key[len(node.key) :], node.children
            name = self._cache.first_page(key)

    def discard(self, request: Request) -> None:
        """Remove a request whose prompt is complete or that lost its row. An unknown request is no error."""
        reader = self._readers.pop(request.number, None)
        if reader is None:
            return
        self.version += 1
        key, name, children = reader.key, reader.salt + self._cache.first_page(reader.key), self._root
        while len(key) >= self._cache.page_size:
            node = children[name]
            place = bisect_left(node.readers, reader.rank, key=_by_rank)
            while node.readers[place] is not reader:
                place += 1
            del node.readers[place]
            if not node.readers:  # then no node below it has one either
                del children[name]
                return
            key, children = key[len(node.key) :], node.children
            name = self._cache.first_page(key)

    def sharing(self, key: IntArray, salt: bytes) -> Iterator[tuple[int, list[PromptReader]]]:
        """Prefixes that this key shares with prompts in progress, longest first: (slots in whole pages, requests)."""
        path: list[tuple[int, list[PromptReader]]] = []
        name, children, common = salt + self._cache.first_page(key), self._root, 0
        while (node := children.get(name)) is not None and len(key) - common >= self._cache.page_size:
            shared = self._cache.common_len(node.key, key[common:])
            common += shared
            path.append((common, node.readers))
            if shared < len(node.key):
                break
            name, children = self._cache.first_page(key[common:]), node.children
        return reversed(path)

    def check(self) -> None:
        found: dict[int, list[IntArray]] = {number: [] for number in self._readers}
        stack = list(self._root.items())
        while stack:
            name, node = stack.pop()
            assert node.readers, "a node that no request needs"
            assert name.endswith(self._cache.first_page(node.key)), "a node is not where its key says"
            assert node.readers == sorted(node.readers, key=_by_rank), "requests are not in the order of their ranks"
            for reader in node.readers:
                found[reader.request.number].append(node.key)
            stack += node.children.items()
        for number, parts in found.items():
            parted = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
            assert parted.tolist() == self._readers[number].key.tolist(), f"request {number} is not along its key"

    def _split(self, node: _Node, length: int) -> _Node:
        """Split off the first `length` slots as a new node, the parent of the rest."""
        upper = _Node(node.key[:length], list(node.readers))
        node.key = node.key[length:]
        upper.children[self._cache.first_page(node.key)] = node
        return upper
