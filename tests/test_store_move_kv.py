"""store_kv and move_kv: the kernels, run by Triton's interpreter without a GPU, against what torch does row by row."""

import pytest
import torch

from specdec.kvcache.layer_context import Destination
from specdec.kvcache.layout import GroupLoc, PrimaryLoc
from specdec.kvcache.store import PoolAddresses, move_kv, reference_move_kv, reference_store_kv, store_kv

from marks import usual_cases

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty")


def slots(*values: int) -> PrimaryLoc:
    return PrimaryLoc(torch.tensor(values, dtype=torch.int64, device=DEVICE))


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def test_store_by_eye():
    pool_k, pool_v = torch.zeros(4, 1, 2, device=DEVICE), torch.zeros(4, 1, 2, device=DEVICE)
    k = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]], device=DEVICE)
    store_kv(Destination(pool_k, pool_v, slots(3, 1)), k, 10 * k)
    assert pool_k[:, 0].tolist() == [[0, 0], [3, 4], [0, 0], [1, 2]]
    assert pool_v[:, 0].tolist() == [[0, 0], [30, 40], [0, 0], [10, 20]]


@usual_cases(
    *("1-1-torch.float32", "3-5-torch.bfloat16", "2-64-torch.float16", "1-127-torch.bfloat16", "3-400-torch.float32"),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 5), (2, 64), (1, 127), (3, 400)])
def test_store_is_the_reference(heads: int, dim: int, dtype: torch.dtype):
    torch.manual_seed(heads * 1000 + dim)
    k, v, pool_k, pool_v = (numbers(n, heads, dim, dtype=dtype) for n in (7, 7, 20, 20))
    where = PrimaryLoc(1 + torch.randperm(19, device=DEVICE)[:7])
    want_k, want_v = pool_k.clone(), pool_v.clone()
    reference_store_kv(Destination(want_k, want_v, where), k, v)
    store_kv(Destination(pool_k, pool_v, where), k, v)
    torch.testing.assert_close((pool_k, pool_v), (want_k, want_v), rtol=0, atol=0)


def test_store_takes_any_strides():
    """K as attention hands it over (heads before tokens), V sliced out of a fused projection, slots in a column."""
    k = numbers(1, 3, 5, 8)[0].transpose(0, 1)
    v = numbers(5, 3, 30)[:, :, 2:17:2]
    where = PrimaryLoc(torch.tensor([[4, 0], [9, 0], [2, 0], [1, 0], [7, 0]], device=DEVICE)[:, 0])
    pool_k, pool_v = torch.zeros(10, 3, 8, device=DEVICE), torch.zeros(10, 3, 8, device=DEVICE)
    store_kv(Destination(pool_k, pool_v, where), k, v)
    torch.testing.assert_close((pool_k[where], pool_v[where]), (k, v), rtol=0, atol=0)
    others = slots(0, 3, 5, 6, 8)
    assert not pool_k[others].any() and not pool_v[others].any()


@pytest.mark.parametrize(("k_dim", "v_dim"), [(5, 3), (3, 5), (3, 700)])
def test_keys_and_values_may_differ_in_size(k_dim: int, v_dim: int):
    """No row is written past its end: every other slot keeps its numbers."""
    torch.manual_seed(0)
    k, v, pool_k, pool_v = (numbers(n, 2, dim) for n in (3, 9) for dim in (k_dim, v_dim))
    where, want = slots(7, 1, 4), (pool_k.clone(), pool_v.clone())
    reference_store_kv(Destination(*want, where), k, v)
    store_kv(Destination(pool_k, pool_v, where), k, v)
    assert torch.equal(pool_k, want[0]) and torch.equal(pool_v, want[1])


def test_move_by_eye():
    """Node path 0, 2, 3 after 4 committed tokens: rows 6 and 7 go to 5 and 6, so 6 is read before it is written."""
    pool = torch.arange(8, dtype=torch.float32, device=DEVICE).view(8, 1, 1)
    move_kv(PoolAddresses.from_pools([pool]), slots(6, 7), slots(5, 6))
    assert pool.flatten().tolist() == [0, 1, 2, 3, 4, 6, 7, 7]


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ((1, 2, 3), (2, 3, 4)),
        ((4, 3, 2), (5, 4, 3)),
        ((1, 2, 3), (3, 1, 2)),
        ((5, 0, 6, 0), (5, 0, 1, 0)),
        ((9,), (1,)),
    ],
    ids=["up", "up-reversed", "cycle", "sink-and-self", "one"],
)
def test_moves_that_overlap(source: tuple[int, ...], destination: tuple[int, ...]):
    torch.manual_seed(0)
    pools = [numbers(10, heads, dim) for heads, dim in [(1, 1), (2, 3), (1, 700), (4, 300)]]
    want = [pool.clone() for pool in pools]
    reference_move_kv(want, slots(*source), slots(*destination))
    pairs = slots(*source, *destination).view(2, -1).t().contiguous()
    move_kv(PoolAddresses.from_pools(pools), *(GroupLoc(column) for column in pairs.unbind(1)))
    for pool, expected in zip(pools, want, strict=True):
        torch.testing.assert_close(pool, expected, rtol=0, atol=0)


def test_move_copies_bits_of_any_dtype():
    """bf16 rows of 3 numbers are moved as 2-byte words, NaN payloads and all; a table built before serves twice."""
    torch.manual_seed(0)
    pools = [numbers(6, 1, 3, dtype=torch.bfloat16), numbers(6, 2, 4, dtype=torch.float32)]
    pools[0].view(torch.int16)[2, 0, 1] = 0x7FC1  # a NaN
    want = [pool.view(torch.int16).clone() for pool in pools]
    rows = PoolAddresses.from_pools(pools)
    assert (rows.word, rows.longest, rows.total) == (torch.int16, 16, 19)
    for source, destination in ((slots(2, 3), slots(3, 2)), (slots(3, 5), slots(1, 0))):
        move_kv(rows, source, destination)
        reference_move_kv(want, source, destination)
    for pool, expected in zip(pools, want, strict=True):
        assert torch.equal(pool.view(torch.int16), expected)


def test_words_are_as_large_as_all_rows_allow():
    assert PoolAddresses.from_pools([numbers(3, 2, 8), numbers(3, 1, 2)]).word == torch.int64
    assert PoolAddresses.from_pools([numbers(3, 2, 8), numbers(3, 1, 3)]).word == torch.int32
    assert PoolAddresses.from_pools([numbers(25)[1:].view(3, 2, 4)]).word == torch.int32  # begins within 8 bytes


def test_nothing_to_store_and_nothing_to_move():
    pool = torch.ones(2, 1, 2, device=DEVICE)
    store_kv(Destination(pool, pool, slots()), numbers(0, 1, 2), numbers(0, 1, 2))
    move_kv(PoolAddresses.from_pools([pool]), slots(), slots())
    assert bool((pool == 1).all())
