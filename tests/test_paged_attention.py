"""The paged attention kernels and their reference, against `dense_oracle.py`."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.attention.kernels.paged_attention import (
    PagedTiles,
    choose_paged_tiles,
    fit_tiles,
    paged_attention,
    reference_paged_attention,
)
from specdec.attention.trees.tree import DraftTree
from specdec.kvcache.fp8_pool import Fp8Pool

from dense_oracle import attend
from marks import deep_cases, quick, usual_cases

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SMALL = PagedTiles(16, 16, 4, 1, waves=3.0)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty")


def chain(num_rows: int) -> list[int]:
    return [i - 1 for i in range(num_rows)]


def bushy(num_rows: int, seed: int = 0) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return [-1] + [int(torch.randint(0, i, (), generator=g)) for i in range(1, num_rows)]


def ancestor_words(ancestors: torch.Tensor) -> torch.Tensor:
    """[B, N, M] bool -> [B, N, ceil(M / 64)], bit by bit; bit 63 of a word is its sign."""
    out = torch.zeros((*ancestors.shape[:2], -(-ancestors.shape[2] // 64)), dtype=torch.int64)
    for key in range(ancestors.shape[2]):
        out[:, :, key // 64] += ancestors[:, :, key].long() << key % 64
    return out


class Case:
    """B requests over pools whose free slots hold NaN, and the keys of each as a list (position, K, V, node)."""

    def __init__(
        self,
        lengths: Sequence[int],
        num_rows: int,
        *,
        parents: list[int] | None = None,
        page_size: int = 1,
        heads: tuple[int, int] = (2, 1),
        head_dim: int = 8,
        v_dim: int | None = None,
        window: int | None = None,
        first_key: int = 0,
        softcap: float | None = None,
        sinks: bool = False,
        dtype: torch.dtype = torch.float32,
        spare_pages: int = 0,
        seed: int = 0,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        hq, hkv = heads
        batch = len(lengths)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g).to(dtype)

        counts = [-(-n // page_size) for n in lengths]
        num_slots = (1 + sum(counts) + 3) * page_size
        free = (torch.randperm(sum(counts) + 2, generator=g) + 1).tolist()
        v_dim = v_dim or head_dim
        pool_k, pool_v = (torch.full((num_slots, hkv, size), float("nan"), dtype=dtype) for size in (head_dim, v_dim))
        pages = torch.zeros(batch, max(counts) + spare_pages, dtype=torch.int64)
        self.keys: list[list[tuple[int, torch.Tensor, torch.Tensor]]] = []
        for b, length in enumerate(lengths):
            keys = []
            for p in range(length):
                page, offset = divmod(p, page_size)
                if offset == 0:
                    pages[b, page] = free.pop()
                slot = int(pages[b, page]) * page_size + offset
                pool_k[slot], pool_v[slot] = normal(hkv, head_dim), normal(hkv, v_dim)
                keys.append((p, pool_k[slot], pool_v[slot]))
            self.keys.append(keys)
        committed = torch.tensor(lengths)
        parents = parents or chain(num_rows)
        tree = DraftTree.from_parents(torch.zeros(batch, num_rows).long(), torch.tensor([parents] * batch))
        self.sees = tree.ancestors
        positions = committed[:, None] + tree.depth
        # queries and block keys as a packed projection leaves them: [B, N, H, D], transposed
        self.args: dict[str, Any] = {
            "query": normal(batch, num_rows, hq, head_dim).transpose(1, 2),
            "block_k": normal(batch, num_rows, hkv, head_dim).transpose(1, 2),
            "block_v": normal(batch, num_rows, hkv, v_dim).transpose(1, 2),
            "block_positions": positions,
            "ancestors": ancestor_words(tree.ancestors),
            "pool_k": pool_k,
            "pool_v": pool_v,
            "pages": pages,
            "start": None,
            "committed_len": committed,
            "positions": positions,
            "page_size": page_size,
            "scaling": head_dim**-0.5 * 1.5,
            "window": window,
            "first_key": first_key,
            "softcap": softcap,
            "sinks": normal(hq) if sinks else None,
        }

    def evict(self, keys: int) -> None:
        """Leave whole pages before the newest `keys` of each prefix out of its table, as a windowed group does."""
        a, page_size = self.args, self.args["page_size"]
        a["start"] = (a["committed_len"] - keys).clamp(min=0) // page_size * page_size
        columns = a["start"][:, None] // page_size + torch.arange(1 + -(-keys // page_size))
        a["pages"] = a["pages"].gather(1, columns.clamp(max=a["pages"].shape[1] - 1))

    def dense(self) -> torch.Tensor:
        """Every output by the definition, over the list of keys that it sees."""
        a, window = self.args, self.args["window"]
        options = {name: a[name] for name in ("scaling", "softcap", "sinks")}
        query = a["query"].transpose(1, 2)
        out = torch.zeros((*query.shape[:3], a["pool_v"].shape[2]), dtype=torch.float64)
        for b, i in itertools.product(range(query.shape[0]), range(query.shape[1])):
            position = int(a["positions"][b, i])
            seen = list(self.keys[b])
            for j in self.sees[b, i].nonzero().flatten().tolist():
                seen.append((int(a["block_positions"][b, j]), a["block_k"][b, :, j], a["block_v"][b, :, j]))
            seen = [key for key in seen if window is None or position - key[0] < window]
            seen = [key for key in seen if key[0] in (position, *range(a["first_key"], position))]
            if seen:
                out[b, i] = attend(query[b, i], *(torch.stack([key[n] for key in seen]) for n in (1, 2)), **options)
        return out

    def run(self, **options: Any) -> torch.Tensor:
        moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in self.args.items()}
        return paged_attention(**moved, **options).cpu()

    def check(self, **options: Any) -> None:
        """Kernel and reference against the definition."""
        expected = self.dense()
        tolerance = TOLERANCE[self.args["query"].dtype]
        for out in (self.run(**options), reference_paged_attention(**self.args)):
            assert out.is_contiguous()
            assert out.dtype == self.args["query"].dtype
            torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("head_dim", "v_dim"), [(12, 8), (24, 16), (24, 5)])
def test_v_may_be_narrower_than_k(head_dim: int, v_dim: int) -> None:
    """The answer has the width of V, as multi-head latent attention needs."""
    sizes = {"heads": (4, 2), "head_dim": head_dim, "v_dim": v_dim, "page_size": 4}
    Case([40, 3, 0], 5, parents=bushy(5), **sizes).check(tiles=SMALL)
    Case([40, 3], 5, window=9, sinks=True, softcap=2.0, **sizes).check(tiles=SMALL)


@usual_cases("0-3", "1-17", "3-1", "17-3", "63-17", "64-1", "65-3")
@pytest.mark.parametrize(
    ("length", "num_rows"),
    quick(
        itertools.product([0, 1, 3, 17, 63, 64, 65], [1, 3, 17]),
        lambda length, num_rows: length in ((1, 64), (17, 63), (0, 3, 65))[(1, 3, 17).index(num_rows)],
    ),
)
def test_trees_behind_prefixes_of_odd_length(length: int, num_rows: int) -> None:
    Case([length, 5], num_rows, parents=bushy(num_rows)).check(tiles=SMALL)


@pytest.mark.slow
def test_a_tree_of_every_bit() -> None:
    Case([20], 64, parents=bushy(64)).check(tiles=SMALL)
    Case([1], 63, parents=chain(63)).check(tiles=SMALL)


@usual_cases("(2, 2)-3", "(4, 1)-16", "(8, 1)-1", "(6, 2)-3")
@pytest.mark.parametrize(
    ("heads", "page_size"),
    quick(
        itertools.product([(2, 2), (4, 1), (8, 1), (6, 2)], [1, 3, 16]),
        lambda heads, page_size: page_size == 3 or heads == (6, 2),
    ),
    ids=str,
)
def test_page_sizes_and_groups(page_size: int, heads: tuple[int, int]) -> None:
    Case([37, 16, 0], 3, parents=[-1, 0, 0], page_size=page_size, heads=heads).check(tiles=SMALL)


@deep_cases("1-1", "2-3", "4-1", "18-3")
@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("window", [1, 2, 4, 18])
def test_windows_go_by_depth_and_may_be_smaller_than_the_tree(window: int, page_size: int) -> None:
    parents = [-1, 0, 0, 2, 1, 4, 5, 3]  # depths 0 1 1 2 2 3 4 3
    for kept in (None, window - 1, window - 1 + 16):
        case = Case([40, 3, 0], 8, parents=parents, window=window, page_size=page_size)
        if kept is not None:
            case.evict(kept)
        case.check(tiles=SMALL)


@pytest.mark.parametrize("window", [None, 3])
def test_keys_before_the_first_do_not_exist_but_for_a_querys_own(window: int | None) -> None:
    parents = [-1, 0, 0, 2, 1, 4, 5, 3]  # depths 0 1 1 2 2 3 4 3
    Case([40, 3, 0], 8, parents=parents, window=window, first_key=2, page_size=3).check(tiles=SMALL)


@deep_cases("three words-3", "tree-1", "window-3", "chain-1", "one word-3", "two words-1")
@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize(
    ("parents", "first", "options"),
    [
        ([-1, 0, 0, 1, 1, 4, 3], 5, {}),
        ([-1, 0, 0, 2, 1, 4, 5, 3], 6, {"window": 3, "sinks": True}),
        ([-1, 0, 1, 2], 3, {"window": 2}),
        pytest.param(bushy(150), 148, {"window": 9}, marks=pytest.mark.slow),
        pytest.param(bushy(64), 60, {"softcap": 1.5}, marks=pytest.mark.slow),
        (bushy(67), 65, {}),
    ],
    ids=["tree", "window", "chain", "three words", "one word", "two words"],
)
def test_the_newest_level_of_a_draft(parents: list[int], first: int, options: dict[str, Any], page_size: int) -> None:
    """Fewer queries than block keys: rows `first`, ... of a tree, among the keys of all its nodes."""
    case = Case([40, 0, 9], len(parents), parents=parents, page_size=page_size, heads=(4, 2), **options)
    expected, a = case.dense()[:, first:], case.args
    a["ancestors"], a["positions"] = a["ancestors"][:, first:], a["positions"][:, first:]
    a["query"] = a["query"][:, :, first:]
    for out in (case.run(tiles=SMALL), reference_paged_attention(**a)):
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


def test_a_query_whose_window_holds_nothing_is_zero() -> None:
    case = Case([40, 2], 2, window=3, sinks=True)
    case.args["positions"] = case.args["positions"] + torch.tensor([[0], [9]])  # row 1 looks from far past its keys
    case.check(tiles=SMALL)
    torch.testing.assert_close(case.run(tiles=SMALL)[1], torch.zeros(2, 2, 8))


@pytest.mark.parametrize(
    "extras", [{"softcap": 1.5}, {"sinks": True}, {"softcap": 2.0, "sinks": True, "window": 9}], ids=str
)
def test_softcap_and_sinks(extras: dict[str, Any]) -> None:
    Case([50, 0, 1], 5, heads=(4, 2), **extras).check(tiles=SMALL)


@deep_cases("16", "80")
@pytest.mark.parametrize("head_dim", [16, 40, 80, 512])
def test_head_sizes(head_dim: int) -> None:
    Case([18], 2, head_dim=head_dim).check(tiles=SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_keys_and_values_of_8_bits_are_attended_to_as_they_are_read_back(dtype: torch.dtype) -> None:
    """Those of the draft too, which are the newest of more rows."""
    case = Case([35, 4], 5, parents=[-1, 0, 0, 1, 3], dtype=dtype, head_dim=16, v_dim=12, heads=(4, 2), window=30)
    pools = {name: Fp8Pool.from_rows(case.args[name].to(DEVICE)) for name in ("pool_k", "pool_v")}
    blocks = [
        Fp8Pool.from_rows(case.args[name].transpose(1, 2).flatten(0, 1).to(DEVICE)) for name in ("block_k", "block_v")
    ]

    def rows(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.unflatten(0, (2, 5)).transpose(1, 2)

    plain = dict(zip(("block_k", "block_v"), (rows(block.read()) for block in blocks), strict=True))
    case.args |= {name: pool.read() for name, pool in pools.items()} | plain
    want = case.run(tiles=SMALL)
    own = dict(zip(("block_k", "block_v"), (rows(block.bits.view(torch.int16)) for block in blocks), strict=True))
    case.args |= pools | own | {"block_scales": tuple(block.scales for block in blocks)}
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(case.run(tiles=SMALL), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not CUDA:
        pytest.skip("the interpreter multiplies bfloat16 matrices as integers")
    Case([35, 4], 3, dtype=dtype, head_dim=16, heads=(4, 2), window=30).check(tiles=SMALL)


@pytest.mark.slow
def test_default_tiles() -> None:
    Case([150, 7], 3, page_size=3, heads=(4, 2), spare_pages=3).check()


def test_more_splits_than_are_merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """19 splits of 16 keys: a maximum in the last three scales what the first 16 have added up to."""
    monkeypatch.setattr("specdec.attention.kernels.paged_attention.choose_splits", lambda *_: 19)
    case = Case([240], 1, heads=(1, 1))
    case.keys[0][230][1].copy_(4 * case.args["query"][0, 0, 0])  # in the pool, too: the largest score comes late
    case.check(tiles=SMALL)


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
    case = Case([30, 9], 3, page_size=3, heads=(4, 2))
    a = case.args
    expected = case.run(tiles=SMALL)
    a["pages"], a["positions"] = a["pages"].int().t().contiguous().t(), a["positions"].int()
    a["committed_len"] = a["committed_len"].int()
    a["pool_k"] = a["pool_k"].transpose(0, 1).contiguous().transpose(0, 1)  # heads first
    a["pool_v"] = torch.stack([a["pool_v"], a["pool_v"]], -1)[..., 1]  # every other element
    a["query"] = a["query"].transpose(0, 3).contiguous().transpose(0, 3)
    a["block_k"] = a["block_k"].contiguous()
    torch.testing.assert_close(case.run(tiles=SMALL), expected)


def test_rows_that_nobody_sees_cannot_leak() -> None:
    case = Case([12], 4, parents=[-1, 0, 0, 2])
    case.args["ancestors"][0, 3] = 0  # a padded node: sees no row, seen by none
    case.sees = case.sees.clone()
    case.sees[0, 3] = False
    case.args["block_k"][:, :, 3] = float("nan")
    case.args["block_v"][:, :, 3] = float("nan")
    case.check(tiles=SMALL)
