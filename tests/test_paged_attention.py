"""The paged attention kernels against `dense_oracle.py`."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_scene import Request, bushy, dense, lay_out, request, rounded, taken

from specdec.attention.kernels.page_table import PageTable
from specdec.attention.kernels.paged_attention import (
    BlockKeys,
    PagedTiles,
    choose_paged_tiles,
    fit_tiles,
    paged_attention,
)
from specdec.attention.trees.tree import DraftTree

from marks import deep, slow

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SMALL = PagedTiles(16, 16, 4, 1, waves=3.0)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TREE = [-1, 0, 0, 2, 1, 4, 5, 3]  # depths 0 1 1 2 2 3 4 3

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty")


def ancestor_words(ancestors: torch.Tensor) -> torch.Tensor:
    """[B, N, M] bool -> [B, N, ceil(M / 64)], bit by bit; bit 63 of a word is its sign."""
    out = torch.zeros((*ancestors.shape[:2], -(-ancestors.shape[2] // 64)), dtype=torch.int64)
    for key in range(ancestors.shape[2]):
        out[:, :, key // 64] += ancestors[:, :, key].long() << key % 64
    return out


def trees(lengths: Sequence[int], parents: list[int], **sizes: Any) -> list[Request]:
    """A tree after a prefix of each length."""
    return [request(n, len(parents), parents, seed=n, **sizes) for n in lengths]


def drafts(requests: Sequence[Request], first: int = 0, **options: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of `paged_attention`, and what it gives by the definition: keys of the trees are in a block and in no
    pool; queries of the nodes `first`, ... only."""
    args = lay_out(requests, **options)
    expected = dense(requests, args)[:, first:]
    written = args.pop("write").flatten()
    args["pool_k"][written] = args["pool_v"][written] = torch.nan
    tree = DraftTree.from_parents(torch.zeros_like(args["positions"]), torch.tensor([one.parents for one in requests]))
    for name in ("k", "v"):
        args[f"block_{name}"] = torch.stack([getattr(one.block, name) for one in requests]).transpose(1, 2)
    args |= {"block_positions": args["positions"], "ancestors": ancestor_words(tree.ancestors)[:, first:]}
    args |= {"positions": args["positions"][:, first:], "query": args["query"][:, :, first:]}
    del args["parents"], args["block_len"]
    return args, expected


def run(args: dict[str, Any], tiles: PagedTiles | None = SMALL) -> torch.Tensor:
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    return paged_attention(**launched(moved), tiles=tiles).cpu()


def launched(args: dict[str, Any]) -> dict[str, Any]:
    """These arguments in the named tuples that launchers take."""
    args = {"block_scales": (None, None), **args}
    names = {"k": "block_k", "v": "block_v", "positions": "block_positions", "scales": "block_scales"}
    return {"table": taken(PageTable, args), "block": taken(BlockKeys, args, **names), **args}


def check(args: dict[str, Any], expected: torch.Tensor, tiles: PagedTiles | None = SMALL) -> None:
    """The kernel against the definition."""
    tolerance, out = TOLERANCE[args["query"].dtype], run(args, tiles)
    assert out.is_contiguous()
    assert out.dtype == args["query"].dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


GROUPED = {"heads": (4, 2)}
SINKS = torch.linspace(-1, 2, 4)
CASES: dict[str, tuple[tuple[int, ...], list[int], int, dict[str, Any], dict[str, Any]]] = {
    # lengths of prefixes, parents, the first query; sizes, and options of a launch
    "one node": ((64, 5), [-1], 0, {}, {}),
    "a wide tree": ((63, 5), bushy(17), 0, {}, {}),
    "no prefix": ((0, 5), [-1, 0, 0], 0, {}, {}),
    "a word of bits": ((20,), bushy(64), 0, {}, {}),
    "V narrower than K": ((40, 3, 0), TREE[:5], 0, {**GROUPED, "head_dim": 24, "v_dim": 5}, {"page_size": 4}),
    "a head of 512": ((18,), [-1, 0], 0, {"head_dim": 512}, {}),
    "pages of 3": ((37, 16, 0), [-1, 0, 0], 0, {"heads": (6, 2)}, {"page_size": 3, "spare_pages": 2}),
    "a window smaller than the tree": ((40, 3, 0), TREE, 0, {}, {"window": 2, "page_size": 3}),
    "an evicted window": ((40, 3, 0), TREE, 0, {}, {"window": 4, "page_size": 3, "evict": True}),
    # keys before the first do not exist, except a query's own
    "a first key": ((40, 3, 0), TREE, 0, {}, {"window": 3, "page_size": 3, "first_key": 2}),
    "softcap and sinks": ((50, 0, 1), TREE[:5], 0, GROUPED, {"window": 9, "softcap": 2.0, "sinks": SINKS}),
    # the newest level of a draft: fewer queries than block keys
    "a level of a tree": ((40, 0, 9), TREE, 6, GROUPED, {"window": 3, "page_size": 3, "sinks": SINKS}),
    "a level of a chain": ((40, 0, 9), [-1, 0, 1, 2], 3, GROUPED, {"window": 2}),
    "a level after two words of bits": ((40, 0, 9), bushy(67), 65, GROUPED, {}),
}


@pytest.mark.parametrize("name", [slow(name) if len(case[1]) == 64 else name for name, case in CASES.items()])
def test_the_kernel_is_the_definition(name: str) -> None:
    lengths, parents, first, sizes, options = CASES[name]
    check(*drafts(trees(lengths, parents, **sizes), first, **options))


@pytest.mark.parametrize("seed", [0, 1, *map(deep, range(2, 60))])
def test_random_cases_are_the_definition(seed: int) -> None:
    draw = random.Random(seed)
    num_nodes, kv_heads, dim = draw.choice((1, 3, 17, 63, 64, 65, 150)), draw.choice((1, 2)), draw.choice((12, 16, 24))
    sizes = {"heads": (kv_heads * draw.choice((1, 3)), kv_heads), "head_dim": dim, "v_dim": draw.choice((dim, 5))}
    lengths = [draw.choice((0, 1, 16, 63, draw.randrange(90))) for _ in range(draw.randrange(1, 4))]
    window = draw.choice((None, draw.randrange(1, 40)))
    options = {
        "page_size": draw.choice((1, 3, 16)),
        "window": window,
        "evict": window is not None and draw.random() < 0.5,
        "first_key": draw.choice((0, draw.randrange(30))),
        "softcap": draw.choice((None, 1.5)),
        "sinks": draw.choice((None, torch.randn(sizes["heads"][0]))),
    }
    first = draw.choice((0, max(0, num_nodes - 8)))
    check(*drafts(trees(lengths, bushy(num_nodes, seed), **sizes), first, **options))


def test_a_query_whose_window_holds_nothing_is_zero() -> None:
    args, _ = drafts(trees([40, 2], [-1, 0]), window=3, sinks=torch.ones(2))
    args["positions"] = args["positions"] + torch.tensor([[0], [9]])  # row 1 looks from far past its keys
    args["block_positions"] = args["block_positions"].clone()
    out = run(args)
    torch.testing.assert_close(out[1], torch.zeros(2, 2, 16))
    assert bool((out[0] != 0).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_keys_and_values_of_8_bits_are_attended_to_as_they_are_read_back(dtype: torch.dtype) -> None:
    """Those of the draft too, which are the newest of more rows."""
    args, _ = drafts(trees([35, 4], [-1, 0, 0, 1, 3], dtype=dtype, v_dim=12, **GROUPED), window=30)
    pools = {name: rounded(args[name].to(DEVICE)) for name in ("pool_k", "pool_v")}
    blocks = [rounded(args[name].transpose(1, 2).flatten(0, 1).to(DEVICE)) for name in ("block_k", "block_v")]

    def rows(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.unflatten(0, (2, 5)).transpose(1, 2)

    plain = dict(zip(("block_k", "block_v"), (rows(block.read()) for block in blocks), strict=True))
    args |= {name: pool.read() for name, pool in pools.items()} | plain
    want = run(args)
    own = dict(zip(("block_k", "block_v"), (rows(block.bits.view(torch.int16)) for block in blocks), strict=True))
    args |= pools | own | {"block_scales": tuple(block.scales for block in blocks)}
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(run(args), want, atol=tolerance, rtol=tolerance)


# the interpreter multiplies bfloat16 matrices as integers
@pytest.mark.parametrize("dtype", [torch.float16, *[torch.bfloat16] * CUDA], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    check(*drafts(trees([35, 4], [-1, 0, 1], dtype=dtype, **GROUPED), window=30))


@pytest.mark.slow
def test_default_tiles() -> None:
    check(*drafts(trees([150, 7], [-1, 0, 1], **GROUPED), page_size=3, spare_pages=3), tiles=None)


def test_more_splits_than_are_merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """19 splits of 16 keys: a maximum in the last three scales what the first 16 have added up to."""
    monkeypatch.setattr("specdec.attention.kernels.paged_attention.choose_splits", lambda *_: 19)
    one = request(240, 1, [-1], heads=(1, 1))
    one.prefix.k[230] = 4 * one.block.q[0]  # the largest score comes late
    check(*drafts([one]))


@pytest.mark.parametrize("name", ["V narrower than K", "a first key", "softcap and sinks", "a level of a tree"])
def test_splits_are_merged_into_the_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink counts once; requests of few keys leave splits empty."""
    monkeypatch.setattr("specdec.attention.kernels.paged_attention.choose_splits", lambda *_: 3)
    test_the_kernel_is_the_definition(name)


def test_a_table_that_begins_late_needs_no_window() -> None:
    """Keys that it lacks are not read, and the oldest that it has counts once."""
    requests = trees([40, 40], [-1, 0, 1], **GROUPED)
    args, _ = drafts(requests, page_size=3, window=30, evict=True)
    assert args["start"].tolist() == [9, 9]
    args["window"] = None
    check(args, dense(requests, args | {"first_key": 9}))


def test_tiles_shrink_until_they_fit_the_shared_memory() -> None:
    hopper, ampere, ada = 227 << 10, 163 << 10, 99 << 10  # bytes that one program may use
    decode, verify = choose_paged_tiles(4, 256, 2), choose_paged_tiles(64, 256, 2)
    assert verify[:4] == (64, 32, 4, 7) == fit_tiles(verify, 256, 2, hopper)[:4]  # (64 + 2 * 32 * 4) * 512 = 160 KiB
    assert fit_tiles(verify, 256, 2, ampere)[:4] == (64, 32, 4, 7)
    assert fit_tiles(verify, 256, 2, ada)[:4] == (64, 32, 4, 3)  # two tiles of K and V instead of four
    assert decode[:4] == (16, 64, 4, 5) == fit_tiles(decode, 256, 2, hopper)[:4]
    assert fit_tiles(decode, 256, 2, ada)[:4] == (16, 32, 4, 3)
    assert fit_tiles(verify, 256, 2, 1000)[:4] == (64, 16, 4, 3)  # no smaller ones: Triton will say what is missing


def test_strides_and_index_dtypes() -> None:
    a, _ = drafts(trees([30, 9], [-1, 0, 1], **GROUPED), page_size=3)
    expected = run(a)
    a["pages"], a["positions"] = a["pages"].int().t().contiguous().t(), a["positions"].int()
    a["committed_len"] = a["committed_len"].int()
    a["pool_k"] = a["pool_k"].transpose(0, 1).contiguous().transpose(0, 1)  # heads first
    a["pool_v"] = torch.stack([a["pool_v"], a["pool_v"]], -1)[..., 1]  # every other element
    a["query"] = a["query"].transpose(0, 3).contiguous().transpose(0, 3)
    a["block_k"] = a["block_k"].contiguous()
    torch.testing.assert_close(run(a), expected)


def test_unseen_rows_cannot_leak() -> None:
    args, expected = drafts(trees([12], [-1, 0, 0, 2]))
    args["ancestors"][0, 3] = 0  # a padded node: sees no row but the prefix, seen by none
    args["block_k"][:, :, 3] = args["block_v"][:, :, 3] = torch.nan
    out = run(args)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, :3].double(), expected[:, :3], atol=2e-5, rtol=2e-5)
