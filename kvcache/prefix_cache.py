"""The prefix cache: pages outlive their request, and a later request with the same first tokens can adopt them.

It is a radix tree. An edge is a run of whole pages; its key is the tokens that their K/V depend on. Lengths count
slots.

    root --[ 31 pages: the system prompt ]--+--[ 4 pages: one question ]
                                            '--[ 9 pages: another ]

The tree claims each of its pages in the primary pool, and the page's peers in windowed groups while there is room:
peers are released first. A match must end where a row can continue: in every windowed group, the last `retain` tokens
of the match (or all, if it has fewer) are mapped. When a pool runs short, the tree releases pages that no row holds,
the least recently used leaf first. It knows no request. Invariant: rows and tree have separate claims, so a release
takes nothing from a row. `Scheduler.commit_chunks` inserts a chunk before it evicts the row's window, so the tree has
claims on the chunk's peers before the row gives up its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.layout import PRIMARY, ByGroup, GroupId
from specdec.kvcache.recurrent_state import FOLD, StateCache
from specdec.kvcache.table import RequestTable

NO_PAGES: IntArray = np.zeros(0, dtype=np.int64)
BATCH = 64
"""A pool that runs short releases 1/64 of its pages at once, to search the tree once and not for each page."""


@dataclass(slots=True, eq=False, repr=False)
class _Node:
    """An edge of the tree and the subtree after it: key [n * page_size], pages [n]. num_peers [groups]: how many of the
    pages have a kept peer in each pool."""

    key: IntArray
    pages: IntArray
    parent: "_Node | None"
    num_peers: IntArray
    children: dict[bytes, "_Node"] = field(default_factory=dict)  # keyed by their first page's tokens
    name: bytes = b""  # its key in its parent's `children`


class PrefixCache:
    """The cache of the allocator of `table`.

    needs_next_token: some K/V of a slot (a drafter's own) also depend on the next token. A run of n tokens then
    determines the K/V of its first n - 1 slots only. states: copies of recurrent layers' states; None: the model has no
    recurrent layers. `salt` arguments: texts with different salts share no page, as if their first tokens differed.
    """

    def __init__(
        self, table: RequestTable, *, needs_next_token: bool = False, states: StateCache | None = None
    ) -> None:
        self.table = table
        self.allocator = table.allocator
        self.page_size = table.allocator.page_size
        self.needs_next_token = needs_next_token
        self.states = states
        self._is_cached = np.array([kept.cached for kept in self.allocator.groups])  # [groups]
        self.allocator.cache = self
        self.reset()

    def key(self, tokens: Sequence[int]) -> IntArray:
        """One number per slot. It encodes the token, or pair of tokens, that the slot's K/V depend on besides earlier
        slots."""
        ids = np.array(tokens, dtype=np.int64)
        return ids[:-1] << 32 | ids[1:] if self.needs_next_token else ids

    def common_len(self, key: IntArray, other: IntArray) -> int:
        """Length of the common prefix of both keys in slots, rounded down to whole pages."""
        return self._common_pages(key, other) * self.page_size

    def first_page(self, key: IntArray) -> bytes:
        return key[: self.page_size].tobytes()

    def match_prefix(self, key: IntArray, salt: bytes = b"") -> IntArray:
        """The longest run of cached pages with which a row of this key can begin."""
        return self._usable(self._pages_of(self._walk(key, salt)))

    def adopt(self, row: int, key: IntArray, salt: bytes = b"") -> int:
        """Begin an empty row with the matching pages. Returns their number of slots."""
        pages = self.match_prefix(key, salt)
        if len(pages):
            self.table.adopt_pages(row, pages)
            if self.states is not None:
                self.states.restore(row, int(pages[-1]))
        return len(pages) * self.page_size

    def insert(self, rows: Sequence[int], keys: Sequence[IntArray], salts: Sequence[bytes] | None = None) -> None:
        """Add the whole pages of these rows' committed slots, up to the end of each key [n] of settled tokens."""
        self.allocator.require_unfrozen("insert")
        for row, key, salt in zip(rows, keys, [b""] * len(rows) if salts is None else salts, strict=True):
            self._insert(row, key, salt)
        self._claim()

    def _insert(self, row: int, key: IntArray, salt: bytes) -> None:
        num_pages = min(len(key), int(self.table.committed_len.host[row])) // self.page_size
        pages = self.table.pages(row, num_pages)
        evicted = self.table.evicted_len[:, row] // self.page_size  # first pages without a peer, [groups]
        path, end, done = self._walk(key[: num_pages * self.page_size], salt), self._root, 0
        for end, count in path:
            self._revive(end, pages[done : done + count], evicted - done)
            done += count
        nodes = [node for node, _ in path]
        if done < num_pages:
            if path and count < len(end.pages):
                nodes[-1] = end = self._split(end, count)
            rest = key[done * self.page_size : num_pages * self.page_size]
            nodes.append(self._append(end, rest, pages[done:], evicted - done, salt if done == 0 else b""))
        self._touch(nodes)

    def cache_state(self, row: int, key: IntArray, salt: bytes, *, every: int) -> None:
        """Copy the row's state at the last multiple of FOLD among its committed tokens. It copies only if the tree has
        all pages of this key up to that position, and the previous copy along the key is at least `every` tokens
        earlier."""
        assert self.states is not None
        length = int(self.table.committed_len.host[row]) // FOLD * FOLD
        pages = self._pages_of(self._walk(key[:length], salt))
        if len(pages) * self.page_size != length:
            return
        kept = np.flatnonzero(self.states.has(pages))
        if length - (int(kept[-1]) + 1 if len(kept) else 0) * self.page_size >= every:
            self.states.save(row, length, int(pages[-1]))

    def clear(self) -> None:
        """Release all pages. Needed when the weights that computed these K/V have changed."""
        self.allocator.require_unfrozen("clear")
        given_up = [self._cut(node, 0) for node in list(self._by_age)]
        self._uncache(np.concatenate([NO_PAGES, *given_up[::-1]]))

    def reset(self) -> None:
        """Forget everything, after the pools were reset."""
        if self.states is not None:
            self.states.reset()
        self._unclaimed: list[tuple[IntArray, IntArray]] = []  # pages to claim, and how many are evicted, [groups]
        self._root = self._node(NO_PAGES, NO_PAGES, None)
        self._by_age: dict[_Node, None] = {}  # least recently used first; a node is before its parent

    def evict(self, pages: ByGroup[int]) -> None:
        """Free `pages` more pages of each pool; if the cache alone claims fewer, free those."""
        pools = self.allocator.pools
        min_free = ByGroup(tuple(pool.free_pages + more for pool, more in zip(pools, pages, strict=True)))
        if pages[PRIMARY]:
            self._evict_primary(min_free[PRIMARY])
        for group in self.allocator.windowed:
            if pools[group].free_pages < min_free[group]:
                self._evict_peers(group, min_free[group])

    def check(self) -> None:
        """Assert that the tree is well-formed, and that its claims agree with the pools."""
        found: list[_Node] = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            for name, child in node.children.items():
                assert child.parent is node and child.name == name, "a node is not where its name says"
                salted = node is self._root and name.endswith(self.first_page(child.key))
                assert salted or self.first_page(child.key) == name, "a node is not where its key says"
                assert len(child.key) == len(child.pages) * self.page_size > 0, "a node without whole pages"
                found.append(child)
                stack.append(child)
        age = {node: i for i, node in enumerate(self._by_age)}
        assert set(found) == set(age) and len(found) == len(age), "the nodes by age are not those of the tree"
        pages = np.concatenate([self._root.pages, *(node.pages for node in found)])
        assert len(np.unique(pages)) == len(pages), "a page is in the tree twice"
        for node in found:
            assert node.parent is self._root or age[node] < age[node.parent], "a parent is older than its child"  # type: ignore[index]
            counted = self._count_peers(node.pages)
            assert (node.num_peers == counted).all(), f"{node.num_peers=} of {counted}"
        assert self.allocator.primary.is_cached(pages).all(), "a page of the tree is not kept"
        if self.states is not None:
            self.states.check()
            assert set(self.states.pages) <= set(pages.tolist()), "a state ends with a page outside the tree"
        for group, pool in self.allocator.pools.items():
            kept = sum(int(node.num_peers[group]) for node in found)
            message = f"{pool.name}: the tree keeps {kept} pages, the pool says {pool.cached_pages}"
            assert kept == pool.cached_pages, message

    # the tree

    def _walk(self, key: IntArray, salt: bytes) -> list[tuple[_Node, int]]:
        """The nodes along a key, and how many pages of each node match the key."""
        path: list[tuple[_Node, int]] = []
        children = self._root.children
        while len(key) >= self.page_size and (node := children.get(salt + self.first_page(key))) is not None:
            count = self._common_pages(node.key, key)
            path.append((node, count))
            if count < len(node.pages):
                break
            key, children, salt = key[len(node.key) :], node.children, b""
        return path

    def _pages_of(self, path: list[tuple[_Node, int]]) -> IntArray:
        return np.concatenate([self._root.pages, *(node.pages[:count] for node, count in path)])

    def _usable(self, pages: IntArray) -> IntArray:
        """Returns the longest run of a text's first pages that a row can continue: the last window of the run is fully
        mapped in every windowed group, and a copy of the recurrent state exists at its end, if the model has one.

        For pages mapped . . x x x . x and a window of 2 pages: the first 5.
        """
        number = np.arange(len(pages))
        fits = np.ones(len(pages), dtype=np.bool_)
        for group in self.allocator.cached_windows:
            last_dead = np.maximum.accumulate(np.where(self.allocator.is_mapped(group, pages), -1, number))
            retain = int(self.table.retain[group])
            fits &= last_dead < np.maximum((number + 1) * self.page_size - retain, 0) // self.page_size
        if self.states is not None:
            fits &= self.states.has(pages)
        ends = np.flatnonzero(fits)
        return pages[: ends[-1] + 1] if len(ends) else pages[:0]

    def _node(self, key: IntArray, pages: IntArray, parent: _Node | None, name: bytes = b"") -> _Node:
        return _Node(key, pages, parent, np.zeros(len(self.allocator.pools), dtype=np.int64), name=name)

    def _append(self, parent: _Node, key: IntArray, pages: IntArray, num_evicted: IntArray, salt: bytes) -> _Node:
        """Add `pages` after a node, to be claimed later: lengthen a leaf or add a new one. salt: used only below the
        root."""
        num_evicted = num_evicted.clip(min=0)
        self._unclaimed.append((pages, num_evicted))
        if parent is self._root or parent.children:
            node = self._node(key.copy(), pages.copy(), parent, salt + self.first_page(key))
            parent.children[node.name] = node
        else:
            node = parent
            node.key, node.pages = np.concatenate([node.key, key]), np.concatenate([node.pages, pages])
        node.num_peers += (len(pages) - num_evicted).clip(min=0) * self._is_cached
        return node

    def _claim(self) -> None:
        """Claim all appended pages in one call: a call per page would cost more than the tree itself."""
        if self._unclaimed:
            self.allocator.cache_pages(PRIMARY, np.concatenate([pages for pages, _ in self._unclaimed]))
            for group in self.allocator.cached_windows:
                mapped = [pages[num_evicted[group] :] for pages, num_evicted in self._unclaimed]
                self.allocator.cache_pages(group, np.concatenate(mapped))
            self._unclaimed = []

    def _split(self, node: _Node, count: int) -> _Node:
        """Split off the first `count` pages as a node of their own, the parent of the rest."""
        parent = node.parent
        assert parent is not None
        self._claim()
        cut = count * self.page_size
        upper = self._node(node.key[:cut].copy(), node.pages[:count].copy(), parent, node.name)
        parent.children[upper.name] = upper
        node.key, node.pages, node.parent = node.key[cut:].copy(), node.pages[count:].copy(), upper
        node.name = self.first_page(node.key)
        upper.children[node.name] = node
        for part in (upper, node):
            part.num_peers = self._count_peers(part.pages)
        return upper

    def _revive(self, node: _Node, pages: IntArray, num_evicted: IntArray) -> None:
        """Restore evicted peers of a node's first pages from a row. `pages`: the row's pages with the same K/V, of
        which the first `num_evicted` [groups] have no peer.

        If a page's peer still exists, the tree claims it again. Otherwise the row's page replaces the page if it has a
        peer, unless the replacement would lose a peer in another group.
        """
        if all(node.num_peers[group] == len(node.pages) for group in self.allocator.cached_windows):
            return
        self._claim()
        kept = node.pages[: len(pages)]
        gains, loses = np.zeros((2, len(pages)), dtype=np.bool_)
        for group in self.allocator.cached_windows:
            dead = ~self.allocator.is_cached(group, kept)
            mapped, own = self.allocator.is_mapped(group, kept), np.arange(len(pages)) >= num_evicted[group]
            self.allocator.cache_pages(group, kept[dead & mapped])
            gains |= dead & ~mapped & own
            loses |= mapped & ~own
        exchanged = gains & ~loses
        self._uncache(kept[exchanged])
        self.allocator.cache_pages(PRIMARY, pages[exchanged])
        for group in self.allocator.cached_windows:
            own = np.arange(len(pages)) >= num_evicted[group]
            self.allocator.cache_pages(group, pages[exchanged & own])
        kept[exchanged] = pages[exchanged]
        node.num_peers = self._count_peers(node.pages)

    def _touch(self, nodes: Sequence[_Node]) -> None:
        """Mark these nodes (in order from the root) as the most recently used; some may be new."""
        for node in reversed(nodes):
            self._by_age.pop(node, None)
            self._by_age[node] = None

    # eviction

    def _leaves(self) -> Iterator[_Node]:
        """Leaves, least recently used first. A node becomes a leaf when its children are released."""
        return (node for node in list(self._by_age) if not node.children)

    def _trim(self, leaf: _Node, most: int) -> IntArray:
        """Cut pages off the end of a leaf: `most`, then as many more as a match needs to end there; never a page that a
        row holds."""
        held = np.flatnonzero(self.allocator.primary.is_held(leaf.pages))
        min_left = int(held[-1]) + 1 if len(held) else 0
        left = max(min_left, len(leaf.pages) - most)
        if left > min_left:
            left = max(min_left, len(self._usable(leaf.pages[:left])))
        return self._cut(leaf, left)

    def _cut(self, node: _Node, left: int) -> IntArray:
        """Remove all but the first `left` pages of a leaf from the tree. Returns them, for `uncache_pages`."""
        assert not node.children and node.parent is not None
        pages = node.pages[left:]
        if left == 0:
            del node.parent.children[node.name], self._by_age[node]
        elif len(pages):
            node.key, node.pages = node.key[: left * self.page_size].copy(), node.pages[:left].copy()
            node.num_peers = self._count_peers(node.pages)
        return pages

    def _uncache(self, pages: IntArray) -> None:
        """Release the claims on `pages` and their peers, and the states that end with them."""
        self.allocator.uncache_pages(pages)
        if self.states is not None:
            self.states.drop(pages)

    def _evict_primary(self, min_free: int) -> None:
        """Free primary pages until `min_free` are free. Pages of the oldest leaves are freed first, pages that rows
        hold last."""
        pool = self.allocator.primary
        short, given_up = max(min_free - pool.free_pages, pool.capacity // BATCH), [NO_PAGES]
        for node in self._leaves():
            if short <= 0:
                break
            given_up.append(self._trim(node, short))
            short -= len(given_up[-1])
        self._uncache(np.concatenate(given_up[::-1]))  # reversed: `alloc` takes the last ones first
        for node in self._leaves():  # then the other leaves, before pages that rows hold
            if pool.free_pages >= min_free:
                break
            self._uncache(self._cut(node, 0))

    def _evict_peers(self, group: GroupId, min_free: int) -> None:
        """Free peers in a group until `min_free` are free. The peers that a match at the end of a node needs are freed
        last."""
        pool, retain = self.allocator.pools[group], int(self.table.retain[group])
        batch = max(min_free, pool.free_pages + pool.capacity // BATCH)
        for tail, wanted in ((-(-retain // self.page_size), batch), (0, min_free)):
            short, given_up = wanted - pool.free_pages, [NO_PAGES]
            for node in list(self._by_age):
                if short <= 0:
                    break
                if node.num_peers[group] > tail:
                    pages = node.pages[: len(node.pages) - tail]
                    given_up.append(pages[self.allocator.is_idle(group, pages)][:short])
                    node.num_peers[group] -= len(given_up[-1])
                    short -= len(given_up[-1])
            self.allocator.uncache_peers(group, np.concatenate(given_up[::-1]))

    def _count_peers(self, pages: IntArray) -> IntArray:
        """Number of peers of these pages that the cache keeps in each pool, [groups]."""
        return np.array(
            [np.count_nonzero(self.allocator.is_cached(group, pages)) for group, _ in self.allocator.pools.items()]
        )

    def _common_pages(self, key: IntArray, other: IntArray) -> int:
        length = min(len(key), len(other))
        differ = key[:length] != other[:length]
        return (int(differ.argmax()) if np.count_nonzero(differ) else length) // self.page_size
