"""Tree attention: kernels in Triton's interpreter where there is no GPU, the plain path, and their oracle.

Closeness is against `dense_oracle.py`; bits are compared between the same row computed in different company.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_scene import (
    Request,
    Text,
    attend_plainly,
    bushy,
    dense,
    depths,
    lay_out,
    path_of,
    request,
    rounded,
    taken,
)

from specdec.attention.kernels import tree_attention as module
from specdec.attention.kernels.own_keys import ALIGN, own_keys, reference_own_keys
from specdec.attention.kernels.page_table import PageTable
from specdec.attention.kernels.tree_attention import (
    KeySplit,
    RowTiles,
    choose_key_split,
    choose_rows,
    count_splits,
    fit_rows,
    merges_late,
    tree_attention,
)

from marks import deep, deep_cases, is_deep, slow

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
BLOCK_K = 16
SMALL: dict[str, Any] = {"cut": KeySplit(BLOCK_K, 2 * BLOCK_K), "tiles": RowTiles(16, 4, 1)}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty")


def run(args: dict[str, Any], **options: Any) -> torch.Tensor:
    """Attention by the kernels."""
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    return tree_attention(path=path_of(moved), **moved, **{**SMALL, **options}).cpu()


def run_plain(args: dict[str, Any]) -> torch.Tensor:
    """In plain torch, on the CPU."""
    args = dict(args)
    fields = "write", "parents", "positions", "block_len", "window", "first_key"
    return attend_plainly(taken(PageTable, args), *(args.pop(name) for name in fields))(**args)


def folded(args: dict[str, Any]) -> torch.Tensor:
    """Attention by the kernels, in half empty tiles of few rows, one program folding all splits of its rows."""
    return run(args, tiles=RowTiles(8, 4, 1, 4, True))


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


TREE = [-1, 0, 0, 2, 1, 4, 5, 3]  # depths 0 1 1 2 2 3 4 3
SINKS = torch.linspace(-1, 2, 4)
GROUPED = {"heads": (4, 2)}
CASES: dict[str, tuple[tuple[int, ...], int, list[int] | None, dict[str, Any], dict[str, Any]]] = {
    # lengths of prefixes, rows, parents; sizes, and options of a launch
    "one node": ((0, 4 * BLOCK_K), 1, [-1], {}, {}),  # the second one's own key is the first of a split
    "a wide tree": ((BLOCK_K - 1, BLOCK_K), 17, bushy(17, 1), {}, {}),
    "V narrower than K": ((40, 3, 0), 5, TREE[:5], {**GROUPED, "head_dim": 24, "v_dim": 5}, {"page_size": 4}),
    "a head of 512": ((18,), 2, [-1, 0], {"head_dim": 512}, {}),
    "pages of 16": ((37, 16, 0), 3, [-1, 0, 0], {"heads": (6, 2)}, {"page_size": 16, "spare_pages": 2}),
    "a window smaller than the tree": ((40, 3, 0), 8, TREE, {}, {"window": 2, "page_size": 4, "evict": True}),
    # keys before the first do not exist, except a query's own: in committed tiles, in the block's tile, in the block
    "a first key": ((40, 19, 16, 0), 8, TREE, {}, {"window": 24, "page_size": 4, "first_key": 18}),
    "a first key in the block": ((3, 0), 8, TREE, {}, {"first_key": 2}),
    "softcap and sinks": ((50, 0, 1), 5, TREE[:5], GROUPED, {"sinks": SINKS, "softcap": 2.0, "window": 9}),
    "frozen queries": ((33, 1, 0), 2, None, {**GROUPED, "frozen": True}, {"window": 5, "sinks": SINKS}),
}


@pytest.mark.parametrize("name", [slow(name) if case[1] == 17 else name for name, case in CASES.items()])
def test_kernels_and_plain_torch_are_the_definition(name: str) -> None:
    lengths, num_rows, parents, sizes, options = CASES[name]
    check([request(n, num_rows, parents, seed=n, **sizes) for n in lengths], **options)


@pytest.mark.parametrize("seed", [0, *map(deep, range(1, 60))])
def test_random_cases_are_the_definition(seed: int) -> None:
    draw = random.Random(seed)
    kind, num_rows = draw.choice(("tree", "chain", "frozen")), draw.randrange(1, 24)
    parents = bushy(num_rows, seed) if kind == "tree" else None
    kv_heads, dim = draw.choice((1, 2)), draw.choice((12, 16, 24))
    sizes = {"heads": (kv_heads * draw.choice((1, 3)), kv_heads), "head_dim": dim, "v_dim": draw.choice((dim, 5))}
    lengths = [draw.choice((0, 1, BLOCK_K - 1, BLOCK_K, draw.randrange(90))) for _ in range(draw.randrange(1, 4))]
    window = draw.choice((None, draw.randrange(1, 40)))
    check(
        [request(n, num_rows, parents, seed=seed + n, frozen=kind == "frozen", **sizes) for n in lengths],
        page_size=draw.choice((1, 3, 16)),
        window=window,
        evict=window is not None and draw.random() < 0.5,
        first_key=draw.choice((0, draw.randrange(30))),
        softcap=draw.choice((None, 1.5)),
        sinks=draw.choice((None, torch.randn(sizes["heads"][0]))),
    )


@pytest.mark.parametrize("window", [13, 30, None])
def test_keys_before_the_first_slot_of_a_table_do_not_exist(window: int | None) -> None:
    """Tables begin within a shared tile and within the nodes' own, some after the oldest key of the window."""
    requests = [request(n, 5, TREE[:5], seed=n) for n in (40, 31)]
    args = lay_out(requests, window=13, evict=True, page_size=3) | {"window": window}
    assert args["start"].tolist() == [27, 18]
    later = [replace(r, prefix=r.prefix[start:]) for r, start in zip(requests, (27, 18), strict=True)]
    expected = dense(later, args)
    for attend_by in (run, folded, run_plain):
        torch.testing.assert_close(attend_by(args).double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("num_rows", "window"), [(17, 20), deep(35, None)])
def test_prefill_chunks_with_padded_rows(num_rows: int, window: int | None) -> None:
    """The slots of padded rows hold NaN, and no result has it."""
    valid = zip((0, 21, 9), (num_rows, num_rows // 2, 0), strict=True)
    check([request(n, num_rows, heads=(3, 1), seed=n, valid=rows) for n, rows in valid], window=window)


@pytest.mark.parametrize("window", [None, deep(9)])
def test_keys_and_values_of_8_bits_are_attended_to_as_they_are_read_back(window: int | None) -> None:
    requests = [request(n, 5, [-1, 0, 0, 1, 3], seed=n, heads=(4, 2), head_dim=24, v_dim=12) for n in (40, 3)]
    args = lay_out(requests, window=window, page_size=4)
    fp8 = {name: rounded(args[name].to(DEVICE)) for name in ("pool_k", "pool_v")}
    expected = run(args | {name: pool.read() for name, pool in fp8.items()})
    for attend_by in (run, folded):
        torch.testing.assert_close(attend_by(args | fp8), expected, atol=1e-5, rtol=1e-5)


def test_scales_of_8_bit_values_are_in_v_itself_in_float16() -> None:
    """V is transposed there, and so are its scales."""
    args = lay_out([request(20, 3, seed=n, heads=(4, 2), head_dim=24, v_dim=12) for n in (1, 2)])
    args |= {name: args[name].half() for name in ("query", "pool_k", "pool_v")}
    args |= {name: rounded(args[name].to(DEVICE)) for name in ("pool_k", "pool_v")}
    torch.testing.assert_close(folded(args), run(args), atol=1e-3, rtol=1e-3)


@PATHS
def test_a_query_whose_window_holds_nothing_is_zero(attend_by: Run) -> None:
    args = lay_out([request(n, 2, frozen=True, seed=n) for n in (40, 2)], window=3, sinks=torch.ones(2))
    args["positions"] += torch.tensor([[0], [9]])  # row 1 looks from far after its two keys
    out = attend_by(args)
    torch.testing.assert_close(out[1], torch.zeros(2, 2, 16))
    assert bool((out[0] != 0).any())


def test_windows_of_a_chunk_that_begin_in_different_splits() -> None:
    """40 rows, windows of 20, splits of 16 keys: tiles of rows begin up to two splits after their request."""
    requests = [request(40, 40)]
    args = lay_out(requests, window=20)
    out = run(args, cut=KeySplit(16, 16))
    torch.testing.assert_close(out.double(), dense(requests, args), atol=2e-5, rtol=2e-5)


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
        table = PageTable(pages, None, length, 1)
        own = make(table, write, parents, 3)
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
        chain = make(table, write)
        assert chain.run_end is None
        assert chain.slots[0, 0, :8].tolist() == [164, 165, 7, 8, 9, 10, 11, 0]


@pytest.mark.parametrize("page_size", [deep(1), 4])
def test_own_keys_against_the_reference(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs make a row, and the nodes are the first of a wider table."""
    monkeypatch.setattr("specdec.attention.kernels.own_keys.BLOCK", 32)
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 63, 64, 100], device=DEVICE)
    start = torch.tensor([0, 60, 0, 72], device=DEVICE)
    pages = torch.randint(1, 99, (4, 100 // page_size), generator=g).to(DEVICE)
    write = torch.randint(1, 999, (4, 33), generator=g).to(DEVICE)
    parents = torch.tensor([bushy(40, seed) for seed in range(4)], device=DEVICE)[:, :33]
    for tree in (None, parents):
        for nodes in (None, write) if tree is None else (write,):
            table = PageTable(pages, start, lengths, page_size)
            made, expected = (
                find(table, nodes, tree, 32 if tree is None else None) for find in (own_keys, reference_own_keys)
            )
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


@deep_cases("21-run-torch.float32", "21-run_plain-torch.bfloat16")
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
    few = attend_by is folded and not is_deep()  # programs for one row take as long as for a tile
    for p in (0, 1, tile - 1, tile, length - 1)[3 * few :]:
        assert torch.equal(rows([Request(text[:p], text[p : p + 1])])[0, 0], expected[p]), f"alone at {p}"
    for begin, size in ((0, length), (3, tile), (tile, tile + 1), (tile - 2, 5))[2 * few :]:
        out = rows([Request(text[:begin], text[begin : begin + size])], page_size=4)[0]
        assert torch.equal(out, expected[begin : begin + size]), f"a chunk of {size} at {begin}"
    padded = Request(text[:9], text[9:39], valid=12)
    assert torch.equal(rows([padded])[0, :12], expected[9:21]), "a padded chunk"
    for begin in (0, tile - 3, tile)[few : 3 - few]:
        chain = Request(text[:begin], text[begin : begin + 7], list(range(-1, 6)))
        assert torch.equal(rows([chain])[0], expected[begin : begin + 7]), f"a chain at {begin}"
    for begin in (1, tile - 3)[few:]:
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
    """The quick one: a tree next to another, whose longest path begins in the tile before the last."""
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
@pytest.mark.parametrize("parents", [[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2, 3, 4]], ids=["a tree", "one path"])
def test_nodes_that_do_not_exist_may_hold_anything(attend_by: Run, parents: list[int]) -> None:
    """Behind `block_len` a tree's slots hold NaN; what is in front has the bits of the smaller tree."""
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


def test_tiles_of_decoding_rows() -> None:
    """Two warps decode keys of 8 bits and serve few programs, one serves many. A lone request over 128 channels in 16
    bits has full tiles."""
    decode: dict[str, Any] = {"item_size": 2, "is_tree": False, "windowed": False}
    for fp8, heads, tiles in (
        (True, 64, RowTiles(8, 2, 5)),
        (False, 64, RowTiles(8, 1, 5)),
        (True, 256, RowTiles(8, 1, 2)),
        (True, 8, RowTiles(8, 2, 5)),
        (False, 8, RowTiles(16, 8, 5)),
    ):
        assert choose_rows(4, heads, 128, fp8=fp8, **decode) == tiles
    assert choose_rows(8, 64, 256, fp8=True, **decode).num_warps == 1
    assert choose_rows(8, 64, 256, fp8=True, **decode | {"windowed": True}).num_warps == 4
    assert choose_rows(9, 64, 128, fp8=True, **decode).block_m == 16
    assert choose_rows(4, 64, 128, fp8=False, **decode | {"item_size": 4}).block_m == 16


def test_tiles_of_many_programs_hold_a_chain_or_the_rows_of_few_paths() -> None:
    """Tiles of 64 rows where a chain fills them, of 16 for trees; a warp for 128 channels."""
    tall: dict[str, Any] = {"item_size": 2, "fp8": False, "windowed": False}
    assert choose_rows(40, 256, 128, is_tree=False, **tall) == RowTiles(64, 4, 3)
    assert choose_rows(40, 256, 128, is_tree=True, **tall) == RowTiles(16, 1, 3)
    assert [choose_rows(12, 512, width, is_tree=False, **tall).num_warps for width in (128, 256, 512)] == [1, 2, 4]


def test_a_program_takes_several_splits_only_where_programs_are_many(monkeypatch) -> None:
    """18 splits: one each for a lone request, at least 16 programs for any number of requests."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(module, "attend_kernel", Kernel())
    monkeypatch.setattr(module, "merge_kernel", {(2 * batch,): lambda *_, **__: None for batch in (1, 300)})
    for batch in (1, 300):
        args = lay_out([request(300 if i == 0 else 1, 1, [-1], heads=(2, 1)) for i in range(batch)])
        run(args, cut=KeySplit(16, 16), tiles=RowTiles(16, 1, 1, None, False))
    assert [grid[2] for grid in grids] == [18, 16]


def test_row_tiles_shrink_until_they_fit_the_shared_memory_and_the_cut_does_not() -> None:
    hopper, ampere, ada = 227 << 10, 163 << 10, 99 << 10  # bytes that one program may use
    cut = choose_key_split(512, 2, 1)
    assert cut == KeySplit(32, 256)
    tiles = RowTiles(32, 8, 5)
    assert fit_rows(tiles, cut, 512, 2, hopper) == tiles  # (32 + 2 * 32 * 3) KiB
    assert fit_rows(tiles, cut, 512, 2, ampere) == RowTiles(32, 8, 3)  # two tiles of K and V instead of three
    assert fit_rows(tiles, cut, 512, 2, ada) == RowTiles(16, 8, 3)  # no smaller ones: Triton will say what is missing


def test_a_program_of_one_warp_has_another_beside_it_or_more_warps() -> None:
    tiles, cut = RowTiles(8, 1, 5), choose_key_split(128, 2, 8)
    for shared, fitted in ((227 << 10, tiles), (163 << 10, RowTiles(8, 1, 3)), (99 << 10, RowTiles(8, 4, 3))):
        assert fit_rows(tiles, cut, 128, 2, shared) == fitted


def test_when_a_merge_lets_the_next_product_start():
    assert [merges_late(*case) for case in ((32, 8), (33, 8), (128, 8), (64, 32))] == [False, True, True, False]
