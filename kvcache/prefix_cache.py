"""Pages that outlive their request, so that a later request with the same first tokens can adopt them.

A radix tree: an edge is a run of whole pages, and its key the tokens that their K/V depend on. Lengths count slots.

    root --[ 31 pages: the system prompt ]--+--[ 4 pages: one question ]
                                            '--[ 9 pages: another ]

The tree claims every page in the full pool, its SWA peer only while there is room: SWA peers are released first. A
match ends where a row can go on: its last `retain` tokens, or all of fewer, are mapped. When a pool runs short, pages
that no row holds are released, the least recently used leaf first. It knows no request. Invariant: rows and tree have
claims of their own, so a release takes nothing from a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.table import RequestTable

NO_PAGES: IntArray = np.zeros(0, dtype=np.int64)
BATCH = 64
"""When a pool runs short a 64th of it is given up at once, so that this is not done again for every page."""


@dataclass(slots=True, eq=False, repr=False)
class _Node:
    """An edge of the tree and the subtree after it: key [n * page_size], pages [n]; num_swa: SWA peers kept of them."""

    key: IntArray
    pages: IntArray
    parent: "_Node | None"
    children: dict[bytes, "_Node"] = field(default_factory=dict)  # by the key of their first page
    num_swa: int = 0
    name: bytes = b""  # by which its parent has it


class PrefixCache:
    """The cache of the allocator of `table`.

    pairs: some K/V of a slot depend on the token after it as well (a drafter's own). A run of n tokens then names the
    K/V of its first n - 1 slots only.
    `salt` arguments: texts of different salts share no page, as if their first tokens were different.
    """

    def __init__(self, table: RequestTable, *, pairs: bool = False) -> None:
        self.table = table
        self.allocator = table.allocator
        self.page_size = table.allocator.page_size
        self.pairs = pairs
        self.allocator.cache = self
        self.reset()

    def key(self, tokens: Sequence[int]) -> IntArray:
        """One number a slot, for the tokens that its K/V depend on besides the earlier slots."""
        ids = np.array(tokens, dtype=np.int64)
        return ids[:-1] << 32 | ids[1:] if self.pairs else ids

    def common_len(self, key: IntArray, other: IntArray) -> int:
        """Slots of whole pages that are the same in both."""
        return self._common_pages(key, other) * self.page_size

    def first_page(self, key: IntArray) -> bytes:
        return key[: self.page_size].tobytes()

    def match(self, key: IntArray, salt: bytes = b"") -> IntArray:
        """The pages that a row could begin with, as many as there are."""
        return self._usable(self._pages_of(self._walk(key, salt)))

    def adopt(self, row: int, key: IntArray, salt: bytes = b"") -> int:
        """Begin an empty row with the pages that match; how many slots they are, now committed."""
        path = self._walk(key, salt)
        pages = self._usable(self._pages_of(path))
        if len(pages):
            self.table.adopt_pages(row, pages)
            self._touch([node for node, _ in path])
        return len(pages) * self.page_size

    def insert(self, rows: Sequence[int], keys: Sequence[IntArray], salts: Sequence[bytes] | None = None) -> None:
        """Keep the whole pages of these rows' committed slots, as far as their keys go: [n] each, all of it certain."""
        self.allocator.require_unfrozen("insert")
        for row, key, salt in zip(rows, keys, [b""] * len(rows) if salts is None else salts, strict=True):
            self._insert(row, key, salt)
        self._claim()

    def _insert(self, row: int, key: IntArray, salt: bytes) -> None:
        num_pages = min(len(key), int(self.table.committed_len.host[row])) // self.page_size
        pages = self.table.pages(row, num_pages)
        evicted = int(self.table.evicted_len[row]) // self.page_size
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

    def clear(self) -> None:
        """Release all pages, such as after a change of the weights that made these K/V."""
        self.allocator.require_unfrozen("clear")
        given_up = [self._cut(node, 0) for node in list(self._by_age)]
        self.allocator.forget(np.concatenate([NO_PAGES, *given_up[::-1]]))

    def reset(self) -> None:
        """Forget everything, as the pools have done."""
        self._unclaimed: list[tuple[IntArray, IntArray]] = []  # pages of the tree: evicted ones, and the others
        self._root = _Node(NO_PAGES, NO_PAGES, None)
        self._by_age: dict[_Node, None] = {}  # least recently used first; a node is before its parent

    def release(self, full_pages: int, swa_pages: int) -> None:
        """Free this many more pages of each pool, or all that only the cache claims."""
        full, swa = self.allocator.full, self.allocator.swa
        least_swa = 0 if swa is None else swa.free_pages + swa_pages
        if full_pages:
            least = full.free_pages + full_pages
            short = max(full_pages, full.capacity // BATCH)
            given_up = [NO_PAGES]
            for node in self._leaves():
                if short <= 0:
                    break
                given_up.append(self._trim(node, short))
                short -= len(given_up[-1])
            self.allocator.forget(np.concatenate(given_up[::-1]))  # alloc takes the pages cut off last first
            for node in self._leaves():  # the other leaves, before pages that rows hold
                if full.free_pages >= least:
                    break
                self.allocator.forget(self._cut(node, 0))
        if swa is not None and swa.free_pages < least_swa:
            self._release_swa(least_swa)

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
            assert node.num_swa == self._count_swa(node), f"{node.num_swa=} of {self._count_swa(node)}"
        full, swa = self.allocator.full, self.allocator.swa
        assert full.is_kept(pages).all() and len(pages) == full.kept_pages, "the pool says that other pages are kept"
        if swa is not None:
            assert sum(node.num_swa for node in found) == swa.kept_pages, "the SWA pool says that other pages are kept"

    # the tree

    def _walk(self, key: IntArray, salt: bytes) -> list[tuple[_Node, int]]:
        """The nodes along a key, and how many pages of each are the same."""
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
        """Returns the longest run of these first pages of a text whose last window is mapped as a whole.

        Of pages mapped . . x x x . x, with a window of 2 pages: the first 5.
        """
        if self.table.retain is None:
            return pages
        number = np.arange(len(pages))
        last_dead = np.maximum.accumulate(np.where(self.allocator.is_mapped(pages), -1, number))
        first_seen = np.maximum((number + 1) * self.page_size - self.table.retain, 0) // self.page_size
        ends = np.flatnonzero(last_dead < first_seen)
        return pages[: ends[-1] + 1] if len(ends) else pages[:0]

    def _append(self, parent: _Node, key: IntArray, pages: IntArray, num_evicted: int, salt: bytes) -> _Node:
        """Keep `pages` after a node, to be claimed: a longer leaf, or a new one. salt: only below the root."""
        num_evicted = max(num_evicted, 0)
        self._unclaimed.append((pages[:num_evicted], pages[num_evicted:]))
        if parent is self._root or parent.children:
            node = _Node(key.copy(), pages.copy(), parent, name=salt + self.first_page(key))
            parent.children[node.name] = node
        else:
            node = parent
            node.key, node.pages = np.concatenate([node.key, key]), np.concatenate([node.pages, pages])
        if self.allocator.swa is not None:
            node.num_swa += len(self._unclaimed[-1][1])
        return node

    def _claim(self) -> None:
        """Claim all appended pages in one call: a call for each would cost more than the tree."""
        if self._unclaimed:
            evicted, mapped = zip(*self._unclaimed, strict=True)
            self._unclaimed = []
            self.allocator.keep(np.concatenate(evicted + mapped), sum(map(len, evicted)))

    def _split(self, node: _Node, count: int) -> _Node:
        """Split off the first `count` pages as a node of their own, the parent of the rest."""
        parent = node.parent
        assert parent is not None
        self._claim()
        cut = count * self.page_size
        upper = _Node(node.key[:cut].copy(), node.pages[:count].copy(), parent, name=node.name)
        parent.children[upper.name] = upper
        node.key, node.pages, node.parent = node.key[cut:].copy(), node.pages[count:].copy(), upper
        node.name = self.first_page(node.key)
        upper.children[node.name] = node
        for part in (upper, node):
            part.num_swa = self._count_swa(part)
        return upper

    def _revive(self, node: _Node, pages: IntArray, num_evicted: int) -> None:
        """Claim the SWA peers of a node's first pages again where a row has them: `pages`, with the same K/V.

        A page whose peer is gone is exchanged for the row's own: each has its claims, so nothing is mapped anew.
        """
        if self.allocator.swa is None or node.num_swa == len(node.pages):
            return
        self._claim()
        kept = node.pages[: len(pages)]
        dead = ~self.allocator.is_kept_in_swa(kept)
        if not dead.any():
            return
        mapped = self.allocator.is_mapped(kept)
        self.allocator.keep_swa(kept[dead & mapped])
        exchanged = dead & ~mapped & (np.arange(len(pages)) >= num_evicted)
        self.allocator.forget(kept[exchanged])
        self.allocator.keep(pages[exchanged], 0)
        kept[exchanged] = pages[exchanged]
        node.num_swa = self._count_swa(node)

    def _touch(self, nodes: Sequence[_Node]) -> None:
        """These nodes, from the root on, are the ones used last; some may be new."""
        for node in reversed(nodes):
            self._by_age.pop(node, None)
            self._by_age[node] = None

    # giving up

    def _leaves(self) -> Iterator[_Node]:
        """Leaves, least recently used first; a node becomes one once its children were released."""
        return (node for node in list(self._by_age) if not node.children)

    def _trim(self, leaf: _Node, most: int) -> IntArray:
        """Cut off the last pages of a leaf that no row holds, at most `most`, back to where a match could end."""
        held = np.flatnonzero(self.allocator.full.is_held(leaf.pages))
        least = int(held[-1]) + 1 if len(held) else 0
        left = max(least, len(leaf.pages) - most)
        if left > least:
            left = max(least, len(self._usable(leaf.pages[:left])))
        return self._cut(leaf, left)

    def _cut(self, node: _Node, left: int) -> IntArray:
        """All but the first `left` pages of a leaf, out of the tree and to be forgotten."""
        assert not node.children and node.parent is not None
        pages = node.pages[left:]
        if left == 0:
            del node.parent.children[node.name], self._by_age[node]
        elif len(pages):
            node.key, node.pages = node.key[: left * self.page_size].copy(), node.pages[:left].copy()
            node.num_swa = self._count_swa(node)
        return pages

    def _release_swa(self, least: int) -> None:
        """Free SWA peers until `least` are free, first the peers that no match at the end of a node needs."""
        swa, retain = self.allocator.swa, self.table.retain
        assert swa is not None and retain is not None
        batch = max(least, swa.free_pages + swa.capacity // BATCH)
        for tail, wanted in ((-(-retain // self.page_size), batch), (0, least)):
            short, given_up = wanted - swa.free_pages, [NO_PAGES]
            for node in list(self._by_age):
                if short <= 0:
                    break
                if node.num_swa > tail:
                    pages = node.pages[: len(node.pages) - tail]
                    given_up.append(pages[self.allocator.is_idle_in_swa(pages)][:short])
                    node.num_swa -= len(given_up[-1])
                    short -= len(given_up[-1])
            self.allocator.forget_swa(np.concatenate(given_up[::-1]))

    def _count_swa(self, node: _Node) -> int:
        return int(np.count_nonzero(self.allocator.is_kept_in_swa(node.pages)))

    def _common_pages(self, key: IntArray, other: IntArray) -> int:
        length = min(len(key), len(other))
        differ = key[:length] != other[:length]
        return (int(differ.argmax()) if np.count_nonzero(differ) else length) // self.page_size
