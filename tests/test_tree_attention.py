"""Tree attention: kernels in Triton's interpreter where there is no GPU, the plain path, and their oracle.

Closeness is against `dense_oracle.py`; bits are compared between the same row computed in different company.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from specdec.attention.deterministic_attention import deterministic_attention
from specdec.attention.kernels.own_keys import ALIGN, own_keys, reference_own_keys
from specdec.attention.kernels.tree_attention import (
    KeySplit,
    RowTiles,
    choose_key_split,
    choose_rows,
    count_splits,
    fit_rows,
    tree_attention,
)
from specdec.kvcache.fp8_pool import Fp8Pool

from dense_oracle import attend
from marks import deep, deep_cases, each_value, quick, slow, usual_cases

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
BLOCK_K = 16
SMALL: dict[str, Any] = {"cut": KeySplit(BLOCK_K, 2 * BLOCK_K), "tiles": RowTiles(16, 4, 1)}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty")


def bushy(num_nodes: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [-1] + [rng.randrange(max(0, n - 6), n) for n in range(1, num_nodes)]


def depths(parents: Sequence[int]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


@dataclass(frozen=True)
class Text:
    """What a model would have computed for some tokens: q [T, Hq, D], k and v [T, Hkv, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(
        cls,
        length: int,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        v_dim: int | None = None,
    ) -> "Text":
        g = torch.Generator().manual_seed(seed)
        hq, hkv = heads
        sizes = (hq, head_dim), (hkv, head_dim), (hkv, v_dim or head_dim)
        return cls(*(torch.randn(length, *size, generator=g).to(dtype) for size in sizes))

    def __getitem__(self, rows: Any) -> "Text":
        return Text(self.q[rows], self.k[rows], self.v[rows])

    def __add__(self, other: "Text") -> "Text":
        return Text(*(torch.cat(pair) for pair in zip(self.parts, other.parts, strict=True)))

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    def __len__(self) -> int:
        return len(self.q)


@dataclass(frozen=True)
class Request:
    """A prefix and the block after it: a tree of nodes, or a chain where `parents` is None.

    frozen: only the block's queries count, all at position len(prefix).   valid: rows of the block that exist.
    """

    prefix: Text
    block: Text
    parents: list[int] | None = None
    frozen: bool = False
    valid: int | None = None

    @property
    def depth(self) -> list[int]:
        if self.frozen:
            return [0] * len(self.block)
        return depths(self.parents) if self.parents is not None else list(range(len(self.block)))


def lay_out(
    requests: Sequence[Request],
    *,
    page_size: int = 1,
    window: int | None = None,
    evict: bool = False,
    spare_pages: int = 0,
    first_key: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `tree_attention`, and of `own_keys` in the place of `own`: pages shuffled, NaN in every slot that
    nobody wrote."""
    rng = random.Random(seed)
    first = requests[0]
    num_rows, frozen = len(first.block), first.frozen
    totals = [len(r.prefix) + (0 if frozen else num_rows) for r in requests]
    starts = [0] * len(requests)
    if evict:
        assert window is not None
        starts = [max(0, len(r.prefix) - window) // page_size * page_size for r in requests]
    held = [range(s // page_size, -(-n // page_size)) for s, n in zip(starts, totals, strict=True)]
    num_pages = sum(map(len, held)) + 3
    free = list(range(1, num_pages))
    rng.shuffle(free)
    pool_k, pool_v = (
        torch.full((num_pages * page_size, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in first.prefix.parts[1:]
    )
    widths = [-(-(len(r.prefix) - s) // page_size) for r, s in zip(requests, starts, strict=True)]
    pages = torch.zeros(len(requests), max(widths) + spare_pages, dtype=torch.int64)
    write = torch.zeros(len(requests), num_rows, dtype=torch.int64)
    for b, r in enumerate(requests):
        page_of = {page: free.pop() for page in held[b]}
        for page in range(widths[b]):
            pages[b, page] = page_of[page + starts[b] // page_size]
        for p in range(starts[b], totals[b]):
            slot = page_of[p // page_size] * page_size + p % page_size
            node = p - len(r.prefix)
            if node >= 0:
                write[b, node] = slot
            if node < (num_rows if r.valid is None else r.valid):
                source, row = (r.prefix, p) if node < 0 else (r.block, node)
                pool_k[slot], pool_v[slot] = source.k[row], source.v[row]
    lengths = torch.tensor([len(r.prefix) for r in requests])
    parents = None if first.parents is None else torch.tensor([r.parents for r in requests])
    valid = [num_rows if r.valid is None else r.valid for r in requests]
    return {
        "query": torch.stack([r.block.q for r in requests]).transpose(1, 2),
        "pool_k": pool_k,
        "pool_v": pool_v,
        "pages": pages,
        "start": torch.tensor(starts) if evict else None,
        "committed_len": lengths,
        "positions": lengths[:, None] + torch.tensor([r.depth for r in requests]),
        "write": None if frozen else write,
        "parents": parents,
        "page_size": page_size,
        "scaling": first.block.q.shape[2] ** -0.5 * 1.5,
        "block_len": torch.tensor(valid) if any(r.valid is not None for r in requests) else None,
        "window": window,
        "first_key": first_key,
        "softcap": softcap,
        "sinks": sinks,
    }


def dense(requests: Sequence[Request], args: dict[str, Any]) -> torch.Tensor:
    """Every row by the definition, over the keys of its path."""
    options = {name: args[name] for name in ("scaling", "softcap", "sinks")}
    block = requests[0].block
    out = torch.zeros(len(requests), *block.q.shape[:2], block.v.shape[2], dtype=torch.float64)
    for b, r in enumerate(requests):
        for i in range(len(r.block) if r.valid is None else r.valid):
            path = []
            node = -1 if r.frozen else i
            while node >= 0:
                path.insert(0, node)
                node = node - 1 if r.parents is None else r.parents[node]
            position = len(r.prefix) + r.depth[i]
            oldest = 0 if args["window"] is None else max(0, position - args["window"] + 1)
            oldest = max(oldest, min(args["first_key"], position))
            seen = (r.prefix + r.block[path])[oldest:]
            out[b, i] = attend(r.block.q[i], seen.k, seen.v, **options)
    return out


def run(args: dict[str, Any], **options: Any) -> torch.Tensor:
    """Attention by the kernels."""
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    write, parents = moved.pop("write"), moved.pop("parents")
    table = (moved["pages"], moved["start"], moved["committed_len"])
    own = own_keys(*table, write, parents, page_size=args["page_size"])
    return tree_attention(own=own, **moved, **{**SMALL, **options}).cpu()


def run_plain(args: dict[str, Any]) -> torch.Tensor:
    """In plain torch, on the CPU."""
    args = dict(args)
    write, parents = args.pop("write"), args.pop("parents")
    table = (args["pages"], args["start"], args["committed_len"])
    own = reference_own_keys(*table, write, parents, page_size=args["page_size"])
    return deterministic_attention(own=own, **args)


def folded(args: dict[str, Any]) -> torch.Tensor:
    """Attention by the kernels, in half tiles, one program folding all splits of its rows."""
    return run(args, tiles=RowTiles(16, 4, 1, 8, True))


Run = Callable[[dict[str, Any]], torch.Tensor]
PATHS = pytest.mark.parametrize("attend_by", [run, run_plain], ids=["kernels", "plain"])


def check(requests: Sequence[Request], by: tuple[Run, ...] = (run, folded, run_plain), **options: Any) -> None:
    """Kernels and plain path against the definition."""
    args = lay_out(requests, **options)
    expected = dense(requests, args)
    tolerance = TOLERANCE[args["query"].dtype]
    for attend_by in by:
        out = attend_by(args)
        assert out.is_contiguous()
        assert out.dtype == args["query"].dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def request(
    length: int,
    num_rows: int,
    parents: list[int] | None = None,
    *,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    v_dim: int | None = None,
    **fields: Any,
) -> Request:
    text = Text.random(length + num_rows, heads, head_dim, dtype, seed, v_dim)
    return Request(text[:length], text[length:], parents, **fields)


@deep_cases("None-24-16", "9-12-8", "9-24-5", "None-12-8")
@pytest.mark.parametrize(("head_dim", "v_dim"), [(12, 8), (24, 16), (24, 5)])
@pytest.mark.parametrize("window", [None, 9])
def test_v_may_be_narrower_than_k(head_dim: int, v_dim: int, window: int | None) -> None:
    sizes = {"heads": (4, 2), "head_dim": head_dim, "v_dim": v_dim}
    requests = [request(n, 5, [-1, 0, 0, 1, 3], seed=n, **sizes) for n in (40, 3, 0)]
    check(requests, window=window, page_size=4, softcap=2.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))


@pytest.mark.parametrize("window", [None, 9])
def test_keys_and_values_of_8_bits_are_attended_to_as_they_are_read_back(window: int | None) -> None:
    requests = [request(n, 5, [-1, 0, 0, 1, 3], seed=n, heads=(4, 2), head_dim=24, v_dim=12) for n in (40, 3)]
    args = lay_out(requests, window=window, page_size=4)
    fp8 = {name: Fp8Pool.from_rows(args[name].to(DEVICE)) for name in ("pool_k", "pool_v")}
    expected = run(args | {name: pool.read() for name, pool in fp8.items()})
    torch.testing.assert_close(run(args | fp8), expected, atol=1e-5, rtol=1e-5)


@deep_cases("17-(64, 1)", "17-(17, 16)")
@pytest.mark.parametrize("lengths", [(0, 65), (64, 1), (BLOCK_K - 1, 63), (BLOCK_K + 1, BLOCK_K)], ids=str)
@pytest.mark.parametrize("num_rows", [1, slow(17)])
def test_trees_behind_prefixes_of_odd_length(lengths: tuple[int, int], num_rows: int) -> None:
    requests = [request(n, num_rows, bushy(num_rows, seed), seed=seed) for seed, n in enumerate(lengths)]
    check(requests, (folded if num_rows == 1 else run, run_plain))


@deep_cases("(2, 2)-16", "(4, 1)-4", "(6, 2)-1")
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [((2, 2), 4), ((4, 1), 1), slow((6, 2), 16), slow((2, 2), 16), slow((4, 1), 4), slow((6, 2), 1)],
    ids=str,
)
def test_page_sizes_and_groups(page_size: int, heads: tuple[int, int]) -> None:
    requests = [request(n, 3, [-1, 0, 0], heads=heads, seed=n) for n in (37, 16, 0)]
    check(requests, (run, run_plain), page_size=page_size, spare_pages=2)


@deep_cases("2-4-True", "1-1-False")
@pytest.mark.parametrize(
    ("window", "page_size", "evict"),
    each_value(
        quick(
            ((*sizes, evict) for sizes in [(1, 1), (2, 4), (4, 1), (18, 16)] for evict in (False, True)),
            lambda window, page_size, evict: window == 2 and evict,
        )
    ),
)
def test_windows_go_by_depth_and_may_be_smaller_than_the_tree(window: int, page_size: int, evict: bool) -> None:
    parents = [-1, 0, 0, 2, 1, 4, 5, 3]  # depths 0 1 1 2 2 3 4 3
    requests = [request(n, 8, parents, seed=n) for n in (40, 3, 0)]
    check(requests, window=window, page_size=page_size, evict=evict)


@deep_cases("tree-None", "chain-20")
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("parents", [[-1, 0, 0, 2, 1, 4, 5, 3], None], ids=["tree", "chain"])
def test_keys_before_the_first_do_not_exist_but_for_a_querys_own(parents: list[int] | None, window: int | None) -> None:
    """Among committed tiles, in the tile of the block, and in the block."""
    requests = [request(n, 8, parents, seed=n) for n in (40, 19, 16, 0)]
    check(requests, window=window, page_size=4, first_key=18)
    check([request(n, 8, parents, seed=n) for n in (3, 0)], window=window, first_key=2)


@deep_cases("tree-{'softcap': 1.5}", "chain-{'softcap': 2.0, 'window': 9}", "chain-{}")
@pytest.mark.parametrize("extras", [slow({"softcap": 1.5}), {"softcap": 2.0, "window": 9}, slow({})], ids=str)
@pytest.mark.parametrize("parents", [[-1, 0, 1, 1, 0], slow(None)], ids=["tree", "chain"])
def test_softcap_and_sinks(parents: list[int] | None, extras: dict[str, Any]) -> None:
    requests = [request(n, 5, parents, heads=(4, 2), seed=n) for n in (50, 0, 1)]
    check(requests, sinks=torch.linspace(-1, 2, 4), **extras)


@deep_cases("1-None", "17-5")
@pytest.mark.parametrize("window", [slow(None), 5])
@pytest.mark.parametrize("num_rows", [1, slow(17)])
def test_frozen_queries_read_the_committed_prefix_only(num_rows: int, window: int | None) -> None:
    requests = [request(n, num_rows, heads=(4, 2), seed=n, frozen=True) for n in (33, 1, 0)]
    check(requests, window=window, spare_pages=3, sinks=torch.zeros(4))


@PATHS
def test_a_query_whose_window_holds_nothing_is_zero(attend_by: Run) -> None:
    args = lay_out([request(n, 2, frozen=True, seed=n) for n in (40, 2)], window=3, sinks=torch.ones(2))
    args["positions"] += torch.tensor([[0], [9]])  # row 1 looks from far after its two keys
    out = attend_by(args)
    torch.testing.assert_close(out[1], torch.zeros(2, 2, 16))
    assert bool((out[0] != 0).any())


@usual_cases("17-20")
@pytest.mark.parametrize(("num_rows", "window"), [(17, 20), slow(17, None), slow(35, 20)])
def test_prefill_chunks_with_padded_rows(num_rows: int, window: int | None) -> None:
    """What padded rows hold is nobody's business: their slots keep NaN."""
    valid = [num_rows, num_rows // 2, 0]
    requests = [
        request(n, num_rows, heads=(3, 1), seed=n, valid=rows) for n, rows in zip((0, 21, 9), valid, strict=True)
    ]
    check(requests, window=window)


def test_windows_of_a_chunk_that_begin_in_different_splits() -> None:
    """40 rows, windows of 20, splits of 16 keys: tiles of rows begin up to two splits after their request."""
    requests = [request(40, 40)]
    args = lay_out(requests, window=20)
    out = run(args, cut=KeySplit(16, 16))
    torch.testing.assert_close(out.double(), dense(requests, args), atol=2e-5, rtol=2e-5)


@deep_cases("80", "112")
@pytest.mark.parametrize("head_dim", [40, slow(80), slow(112), 512])
def test_head_sizes(head_dim: int) -> None:
    check([request(18, 2, [-1, 0], head_dim=head_dim)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    requests = [request(n, 3, [-1, 0, 0], heads=(4, 2), dtype=dtype, seed=n) for n in (35, 4)]
    # the interpreter multiplies bfloat16 matrices as integers; the kernels have no float64
    by_kernels = dtype == torch.float16 or (CUDA and dtype == torch.bfloat16)
    check(requests, (run, folded, run_plain) if by_kernels else (run_plain,), window=30)


@pytest.mark.slow
def test_splits_grow_with_the_position() -> None:
    """16 of 16 keys, 16 of 32, then of 64: 850 keys reach the third kind."""
    args = lay_out([request(850, 1), request(300, 1, seed=1)])
    expected = dense([request(850, 1), request(300, 1, seed=1)], args)
    for options in ({}, {"tiles": RowTiles(16, 4, 1, fold=True)}):
        out = run(args, cut=KeySplit(16, 16), **options)
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("grows", [False, True])
def test_every_position_is_in_the_split_that_begins_before_it(grows: bool) -> None:
    cut = KeySplit(16, 16)

    def split_of(position: int) -> int:
        unit = position // 16
        return unit if not grows or unit < 16 else 16 + (unit - 16) // 2 if unit < 48 else 32 + (unit - 48) // 4

    assert [split_of(p) for p in (255, 256, 287, 288, 767, 768, 831, 832)] == (
        [15, 16, 16, 17, 31, 32, 32, 33] if grows else [15, 16, 17, 18, 47, 48, 51, 52]
    )
    for num_keys in (1, 16, 17, 256, 257, 768, 769, 1200):
        most = split_of(num_keys - 1) + 1
        if grows:
            assert count_splits(num_keys, None, 1, cut, grows=True) == most
        else:  # a table may begin within a split
            assert most <= count_splits(num_keys, None, 1, cut, grows=False) <= most + 1
    assert count_splits(1000, 32, 1, cut, grows=False) == 3  # 32 keys touch three splits of 16
    assert count_splits(1000, 32, 4, cut, grows=False) == 4  # 35 keys from the root's oldest to the deepest node
    assert count_splits(20, 32, 4, cut, grows=False) == 3


def test_own_keys_of_a_small_tree() -> None:
    """S = 66, so position 64 is column 0: two committed keys, then the path of each node."""
    pages = torch.arange(100, 166, device=DEVICE)[None]
    write = torch.tensor([[7, 8, 9, 10, 11]], device=DEVICE)
    parents = torch.tensor([[-1, 0, 0, 2, 3]], device=DEVICE)
    length = torch.tensor([66], device=DEVICE)
    for make in (own_keys, reference_own_keys):
        own = make(pages, None, length, write, parents, page_size=1, max_depth=3)
        assert own.path_len == 4
        assert own.slots.shape == (1, 5, ALIGN + 4)
        assert own.slots[0, :, :6].tolist() == [
            [164, 165, 7, 0, 0, 0],
            [164, 165, 7, 8, 0, 0],
            [164, 165, 7, 9, 0, 0],
            [164, 165, 7, 9, 10, 0],
            [164, 165, 7, 9, 10, 11],
        ]
        assert own.run_end is not None
        assert own.run_end.tolist() == [[1, 1, 4, 4, 4]]
        chain = make(pages, None, length, write, page_size=1)
        assert chain.run_end is None
        assert chain.slots[0, 0, :8].tolist() == [164, 165, 7, 8, 9, 10, 11, 0]


@pytest.mark.parametrize("page_size", [slow(1), 4])
def test_own_keys_against_the_reference(page_size: int) -> None:
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 63, 64, 100], device=DEVICE)
    start = torch.tensor([0, 60, 0, 72], device=DEVICE)
    pages = torch.randint(1, 99, (4, 100 // page_size), generator=g).to(DEVICE)
    write = torch.randint(1, 999, (4, 33), generator=g).to(DEVICE)
    parents = torch.tensor([bushy(33, seed) for seed in range(4)], device=DEVICE)
    for tree in (None, parents):
        for nodes in (None, write) if tree is None else (write,):
            options = {"page_size": page_size, "max_depth": 32 if tree is None else None}
            made = own_keys(pages, start, lengths, nodes, tree, **options)
            expected = reference_own_keys(pages, start, lengths, nodes, tree, **options)
            torch.testing.assert_close(made.slots, expected.slots)
            assert (made.run_end is None) == (expected.run_end is None)
            if made.run_end is not None:
                torch.testing.assert_close(made.run_end, expected.run_end)


HEADS = (2, 1)


def planted(num_nodes: int, begin: int, text: Text, seed: int) -> tuple[Request, list[int]]:
    """A random tree after text[:begin] whose deepest path is the text, and its nodes; the others are junk."""
    parents = bushy(num_nodes, seed)
    depth = depths(parents)
    node, path = max(range(num_nodes), key=lambda n: depth[n]), []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    path = path[: len(text) - begin]
    block = Text.random(num_nodes, HEADS, text.q.shape[2], text.q.dtype, seed + 1)
    for part, true in zip(block.parts, text[begin : begin + len(path)].parts, strict=True):
        part[path] = true
    return Request(text[:begin], block, parents), path


BITS = pytest.mark.parametrize(
    ("attend_by", "dtype"),
    [slow(run, torch.float32), slow(folded, torch.float32), (run_plain, torch.float32), (run_plain, torch.bfloat16)]
    + ([(run, torch.bfloat16), (run, torch.float16), (folded, torch.bfloat16)] if CUDA else []),
    ids=lambda x: getattr(x, "__name__", str(x)),
)


@deep_cases("21-run-torch.float32")
@BITS
@pytest.mark.parametrize("window", [deep(None), 21])
def test_a_row_has_the_bits_of_plain_decoding_in_any_company(
    attend_by: Run, dtype: torch.dtype, window: int | None
) -> None:
    tile = BLOCK_K if attend_by is not run_plain else ALIGN
    length = 2 * tile + 11
    text = Text.random(length, HEADS, 16, dtype)
    sinks = torch.tensor([0.5, -0.5], dtype=dtype)

    def rows(requests: list[Request], **options: Any) -> torch.Tensor:
        return attend_by(lay_out(requests, window=window, sinks=sinks, **options))

    expected = rows([Request(text[:p], text[p : p + 1]) for p in range(length)], spare_pages=9)[:, 0]
    for p in (0, 1, tile - 1, tile, length - 1):
        assert torch.equal(rows([Request(text[:p], text[p : p + 1])])[0, 0], expected[p]), f"alone at {p}"
    for begin, size in ((0, length), (3, tile), (tile, tile + 1), (tile - 2, 5)):
        out = rows([Request(text[:begin], text[begin : begin + size])], page_size=4)[0]
        assert torch.equal(out, expected[begin : begin + size]), f"a chunk of {size} at {begin}"
    padded = Request(text[:9], text[9:39], valid=12)
    assert torch.equal(rows([padded])[0, :12], expected[9:21]), "a padded chunk"
    for begin in (0, tile - 3, tile):
        chain = Request(text[:begin], text[begin : begin + 7], list(range(-1, 6)))
        assert torch.equal(rows([chain])[0], expected[begin : begin + 7]), f"a chain at {begin}"
    for begin in (1, tile - 3):
        tree, path = planted(16, begin, text, begin)
        out = rows([tree], evict=window is not None, page_size=4)[0]
        assert torch.equal(out[path], expected[begin : begin + len(path)]), f"a tree at {begin}"
    trees = [planted(16, begin, text, begin) for begin in (3, tile, 2 * tile - 1)]
    for out, (tree, path) in zip(rows([tree for tree, _ in trees]), trees, strict=True):
        begin = len(tree.prefix)
        assert torch.equal(out[path], expected[begin : begin + len(path)]), f"a tree at {begin} in a batch"


@pytest.mark.parametrize("window", [slow(None), 40])
def test_splits_folded_where_they_are_made_or_afterwards_give_the_same_bits(window: int | None) -> None:
    args = lay_out([request(n, 5, [-1, 0, 0, 1, 3], seed=n) for n in (100, 31)], window=window)
    assert torch.equal(folded(args), run(args))


@pytest.mark.parametrize("window", [slow(None), 9])
def test_a_path_through_two_tiles_has_the_bits_of_plain_decoding(window: int | None) -> None:
    """The quick one: a tree beside another, whose longest path begins in the tile before the last."""
    text = Text.random(BLOCK_K + 8, HEADS, 16)
    begin = BLOCK_K - 3
    tree, path = planted(9, begin, text, begin)
    other = planted(9, 3, text, 1)[0]
    assert begin + len(path) > BLOCK_K + 1
    out = run(lay_out([other, tree], window=window, page_size=4))[1, path]
    alone = [Request(text[:p], text[p : p + 1]) for p in range(begin, begin + len(path))]
    assert torch.equal(out, run(lay_out(alone, window=window))[:, 0])


@deep_cases("kernels")
@pytest.mark.parametrize("attend_by", [slow(run), run_plain], ids=["kernels", "plain"])
def test_trees_of_200_nodes(attend_by: Run) -> None:
    """Far more nodes than an integer has bits; the path of the text is 40 deep and crosses tiles."""
    text = Text.random(60, HEADS, 16)
    tree, path = planted(200, 20, text, 3)
    assert len(path) == 40
    args = lay_out([tree])
    out = attend_by(args)
    torch.testing.assert_close(out.double(), dense([tree], args), atol=2e-5, rtol=2e-5)
    expected = attend_by(lay_out([Request(text[:p], text[p : p + 1]) for p in range(20, 60, 6)]))[:, 0]
    assert torch.equal(out[0, path[::6]], expected)


@PATHS
def test_nodes_that_do_not_exist_may_hold_anything(attend_by: Run) -> None:
    """Behind `block_len` a tree's slots hold NaN; what is in front has the bits of the smaller tree."""
    parents = [-1, 0, 0, 1, 2, 2]
    padded = request(20, 6, parents, valid=4)
    smaller = replace(padded, block=padded.block[:4], parents=parents[:4], valid=None)
    out = attend_by(lay_out([padded, replace(padded, valid=0)]))
    assert torch.equal(out[0, :4], attend_by(lay_out([smaller]))[0])
    assert torch.equal(out[0, 4:], torch.zeros(2, 2, 16))
    assert torch.equal(out[1], torch.zeros(6, 2, 16))


def test_strides_and_index_dtypes() -> None:
    args = lay_out([request(n, 3, [-1, 0, 0], heads=(4, 2), seed=n) for n in (30, 9)], page_size=4)
    expected = run(args)
    args["pages"], args["positions"] = args["pages"].int().t().contiguous().t(), args["positions"].int()
    args["committed_len"], args["write"] = args["committed_len"].int(), args["write"].int()
    args["pool_k"] = args["pool_k"].transpose(0, 1).contiguous().transpose(0, 1)  # heads first
    args["pool_v"] = torch.stack([args["pool_v"], args["pool_v"]], -1)[..., 1]  # every other element
    args["query"] = args["query"].transpose(0, 3).contiguous().transpose(0, 3)
    assert torch.equal(run(args), expected)


def test_many_heads_have_longer_splits() -> None:
    """And nothing else that a launch knows changes the cut."""
    assert [choose_key_split(256, 2, heads) for heads in (1, 2, 8, 16)] == [KeySplit(32, 128)] * 2 + [
        KeySplit(32, 256)
    ] * 2
    assert {choose_key_split(128, 2, heads) for heads in (1, 8)} == {KeySplit(64, 256)}


def test_two_warps_decode_keys_of_8_bits() -> None:
    """They need a fifth fewer instructions than four, where programs are many; a lone request waits for latency."""
    for fp8, heads, warps in ((True, 64, 2), (False, 64, 4), (True, 8, 4)):
        assert choose_rows(4, heads, 128, 2, is_tree=False, fp8=fp8).num_warps == warps


def test_few_programs_over_128_channels_take_eight_warps() -> None:
    """Requests times K/V heads: up to 16 wait for latency; more than 32 share a multiprocessor, so stages are few."""
    chosen = {heads: choose_rows(4, heads, 128, 2, is_tree=False, fp8=False) for heads in (8, 16, 32, 64)}
    assert chosen == {8: RowTiles(16, 8, 5), 16: RowTiles(16, 8, 5), 32: RowTiles(16, 4, 5), 64: RowTiles(16, 4, 3)}


def test_row_tiles_shrink_until_they_fit_the_shared_memory_and_the_cut_does_not() -> None:
    hopper, ampere, ada = 227 << 10, 163 << 10, 99 << 10  # bytes that one program may use
    cut = choose_key_split(512, 2, 1)
    assert cut == KeySplit(32, 256)
    tiles = RowTiles(32, 8, 5)
    assert fit_rows(tiles, cut, 512, 2, hopper) == tiles  # (32 + 2 * 32 * 3) KiB
    assert fit_rows(tiles, cut, 512, 2, ampere) == RowTiles(32, 8, 3)  # two tiles of K and V instead of three
    assert fit_rows(tiles, cut, 512, 2, ada) == RowTiles(16, 8, 3)  # no smaller ones: Triton will say what is missing
