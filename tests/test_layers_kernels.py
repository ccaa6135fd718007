"""The kernels of specdec.layers against their references: odd sizes, strides, every option; rows that do not meet."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from specdec.kvcache.index_spaces import PrimaryLoc
from specdec.layers import gemm_large, gemm_medium, gemm_small
from specdec.layers.activation import reference_activate
from specdec.layers.gemm_medium import MediumTiles, choose_medium_tiles
from specdec.layers.gemm_medium import gemm_medium as multiply_medium
from specdec.layers.gemm_small import balanced_rows
from specdec.layers.head_gates import gate_channels, gate_heads, reference_gate_channels, reference_gate_heads
from specdec.layers.linear import (
    gated_linear,
    linear,
    reference_gated_linear,
    reference_linear,
    vendor_gated_linear,
    vendor_linear,
)
from specdec.layers.moe.fork_join import fork_norm, join_norm, reference_fork_norm, reference_join_norm
from specdec.layers.norm import Norm, norm, qk_norm, reference_norm, reference_qk_norm
from specdec.layers.per_layer_embedding import (
    gated_projection,
    layer_inputs,
    reference_gated_projection,
    reference_layer_inputs,
    vendor_gated_projection,
)
from specdec.layers.product import Cut, Product, Tiles, choose_cut, finish, reference_finish
from specdec.layers.rope_store import (
    Destination,
    Heads,
    Rotary,
    reference_rope_store,
    reference_rotary,
    rope_store,
    rotary,
)

from marks import deep, deep_cases, slow, usual_cases

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + (
    [torch.bfloat16] if DEVICE.type == "cuda" else []
)  # interpreter: no bf16 dots

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """On a GPU. In the interpreter a product is numpy's, which adds in an order of its own for each shape."""
    if DEVICE.type == "cuda":
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    else:
        close(got, want)


# products


def test_linear_by_eye():
    x = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]], device=DEVICE)
    weight = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], device=DEVICE)
    assert finish(linear(x, weight, torch.tensor([10.0, 20.0], device=DEVICE))).tolist() == [[11, 23], [10, 22]]


@usual_cases(
    *("1-64-128-plain-torch.float32", "2-1-1-bias-torch.float16", "5-70-100-bias-torch.float32"),
    *("17-130-600-plain-torch.float16", "17-130-600-bias-torch.float32", "70-33-1000-bias-torch.float16"),
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 128), (2, 1, 1), (5, 70, 100), (17, 130, 600), (70, 33, 1000)])
def test_linear_is_the_reference(rows: int, n: int, k: int, biased: bool, dtype: torch.dtype):
    x, weight = randn(rows, k, dtype=dtype), randn(n, k, dtype=dtype) * k**-0.5
    bias = randn(n, dtype=dtype) if biased else None
    product = linear(x, weight, bias)
    assert product.dtype == dtype and product.parts.shape[1:] == (rows, n)
    assert len(product.parts) == choose_cut(n, k).splits
    close(finish(product), F.linear(x, weight, bias))
    close(reference_finish(product), reference_finish(reference_linear(x, weight, bias)))


@deep_cases("1-2-16-gelu_tanh", "3-64-100-silu", "19-66-300-gelu_tanh", "2-130-128-silu")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 2, 16), (3, 64, 100), (19, 66, 300), (2, 130, 128)])
def test_gated_linear_is_the_reference(rows: int, n: int, k: int, activation: str):
    x, weight = randn(rows, k), randn(n, k) * k**-0.5
    close(gated_linear(x, weight, activation), reference_gated_linear(x, weight, activation))


@pytest.mark.parametrize("multiply", [gated_linear, vendor_gated_linear])
def test_a_limited_gate_is_the_reference(multiply: Callable[..., torch.Tensor]):
    x, weight = randn(5, 40), randn(66, 40)
    want = reference_gated_linear(x, weight, "silu", 1.5)
    torch.testing.assert_close(multiply(x, weight, "silu", 1.5), want, rtol=1e-4, atol=1e-4)
    assert want.abs().max() <= 1.5**2 < reference_gated_linear(x, weight, "silu").abs().max()
    assert gated_linear(x[:0], weight, "silu", 1.5).shape == (0, 33)


def test_a_gate_of_any_size_is_exact():
    """Far out an activation is 0 or its argument; nothing overflows on the way."""
    x = torch.tensor([[1.0], [-1.0]], device=DEVICE)
    for activation in ("silu", "gelu_tanh"):
        gates = torch.tensor([0.5, 30.0, 1e4, 1e12], device=DEVICE)
        weight = torch.cat([gates, torch.ones_like(gates)])[:, None]
        got = gated_linear(x, weight, activation)
        close(got[0], reference_activate(gates, activation))
        close(got[1], -reference_activate(-gates, activation))


@pytest.mark.parametrize(("num_rows", "n", "k"), [(257, 520, 136), slow(400, 1100, 328)])
def test_many_rows_are_multiplied_in_tiles_of_their_own(num_rows: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch):
    """With ranges of K and without, biased, gated; rows that descriptors cannot describe go the usual way."""
    launched = []
    kernel = gemm_large.gemm_large_kernel
    monkeypatch.setattr(gemm_large, "gemm_large_kernel", Launches(kernel, launched))
    x, weight = randn(num_rows, k, dtype=torch.float16), randn(n, k, dtype=torch.float16) * k**-0.5
    bias = randn(n, dtype=torch.float16)
    close(finish(linear(x, weight, bias)), reference_linear(x, weight, bias).parts[0])
    close(finish(linear(x, weight, bias, Cut(1, k))), reference_linear(x, weight, bias).parts[0])
    close(gated_linear(x, weight, "silu"), reference_gated_linear(x, weight, "silu"))
    assert len(launched) == 3
    same_bits(linear(x[:300], weight, bias).parts[0][:3], finish(linear(x[:3], weight, bias)))
    skewed = randn(num_rows, k + 1, dtype=torch.float16)[:, :k]
    close(finish(linear(skewed, weight)), reference_linear(skewed, weight).parts[0])
    linear(x, weight, bias, apart=True)
    assert len(launched) == 4


@pytest.mark.parametrize(("num_rows", "n", "k"), [(33, 130, 200), (50, 66, 328)])
def test_some_rows_are_multiplied_by_descriptors(num_rows: int, n: int, k: int):
    """In ranges of K and without, biased; gated, with a tail and without. Tiles that nothing divides."""
    x, weight = randn(num_rows, k, dtype=torch.float16), randn(n, k, dtype=torch.float16) * k**-0.5
    bias = randn(n, dtype=torch.float16)
    for tiles in (MediumTiles(64, 32, 0, 64, 4, 3, 3), MediumTiles(16, 64, 0, 32, 4, 3)):
        close(finish(multiply_medium(x, weight, bias, None, tiles)), reference_linear(x, weight, bias).parts[0])
    for tiles in (MediumTiles(64, 32, 16, 64, 4, 3), MediumTiles(16, 64, 0, 64, 4, 3)):
        gated = multiply_medium(x, weight, None, "gelu_tanh", tiles).parts[0]
        close(gated, reference_gated_linear(x, weight, "gelu_tanh"))


def test_who_multiplies_some_rows(monkeypatch: pytest.MonkeyPatch):
    """Weights that fill the device: 33 to 128 rows; of a gated weight also 193 to 256. Not what has no descriptors."""
    launched: list[object] = []
    monkeypatch.setattr(gemm_medium, "gemm_medium_kernel", Launches(gemm_medium.gemm_medium_kernel, launched))

    def launches(num_rows: int, *, gated: bool = False, dtype: torch.dtype = torch.float16, columns: int = 64) -> int:
        launched.clear()
        monkeypatch.setattr(gemm_medium, "device_limits", lambda device: (4 if gated else 9, 227 << 10))
        x, weight = randn(num_rows, 72, dtype=dtype)[:, :columns], randn(520, columns, dtype=dtype) / 8
        if gated:
            close(vendor_gated_linear(x, weight, "silu"), reference_gated_linear(x, weight, "silu"))
        else:
            close(finish(vendor_linear(x, weight)), F.linear(x, weight))
        return len(launched)

    assert [launches(num_rows) for num_rows in (32, 33, 128, 129)] == [0, 1, 1, 0]
    assert [launches(num_rows, gated=True) for num_rows in (32, 33, 128, 160, 256, 257)] == [0, 1, 1, 0, 1, 0]
    assert launches(64, dtype=torch.float32) == launches(64, columns=60) == 0


@pytest.mark.parametrize(
    ("num_rows", "n", "k", "gated", "want"),
    [
        (128, 20480, 2560, True, (160, 1)),  # Gemma 4 E4B: 128 programs
        (256, 20480, 2560, True, (160, 1)),
        (160, 20480, 2560, True, None),
        (128, 28672, 4096, True, (128, 1)),  # Llama 8B: 224 programs, two a multiprocessor
        (256, 28672, 4096, True, None),
        (64, 4224, 2816, True, None),  # Gemma 4 26B-A4B: 33 programs
        (128, 43008, 5376, True, None),  # 31B: two and a half waves
        (128, 2560, 10240, False, (64, 3)),  # 120 programs
        (128, 2560, 256, False, None),  # ranges of K would be short
        (64, 5120, 2880, False, (64, 1)),  # 80 programs are enough next to `linear`, not next to the vendor's library
        (128, 5120, 2880, False, None),
        (64, 16384, 5376, False, (128, 1)),
        (128, 16384, 5376, False, None),
        (128, 262144, 2560, False, (128, 1)),  # a head
        (256, 262144, 2560, False, None),
        (256, 256, 2560, False, (64, 5)),  # a small weight
        (128, 256, 2560, False, None),
    ],
)
def test_tiles_by_descriptors(
    num_rows: int, n: int, k: int, gated: bool, want: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
):
    """Rows of a weight's tile and ranges of K, on 132 multiprocessors; None: others multiply."""
    for shared in (227 << 10, 100 << 10):
        monkeypatch.setattr(gemm_medium, "device_limits", lambda device, shared=shared: (132, shared))
        tiles = choose_medium_tiles(num_rows, (n, k), DEVICE, gated=gated)
        assert want == (tiles and (tiles.block_n + tiles.tail_n, tiles.ranges))
        if tiles is not None:
            stage = (tiles.block_m + tiles.block_n + tiles.tail_n) * tiles.block_k * 2
            assert tiles.num_stages == 1 or tiles.num_stages * stage <= shared


class Launches:
    """A kernel that counts how often it is launched."""

    def __init__(self, kernel: object, launched: list[object]) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid: object) -> object:
        self.launched.append(grid)
        return self.kernel[grid]


def test_linear_takes_rows_of_any_stride():
    x, weight = randn(5, 3, 64)[:, 1], randn(40, 96)[:, 16:80]
    close(finish(linear(x, weight)), x @ weight.T)
    close(gated_linear(x, weight, "silu"), reference_gated_linear(x, weight, "silu"))


def test_linear_of_no_rows():
    assert finish(linear(randn(0, 16), randn(8, 16))).shape == (0, 8)
    assert gated_linear(randn(0, 16), randn(8, 16), "silu").shape == (0, 4)


@pytest.mark.parametrize("rows", [64, 65])
def test_vendor_products_are_the_same_products(rows: int):
    x, weight, bias = randn(rows, 40), randn(70, 40), randn(70)
    close(finish(vendor_linear(x, weight, bias)), F.linear(x, weight, bias))
    close(vendor_gated_linear(x, weight, "silu"), reference_gated_linear(x, weight, "silu"))
    close(vendor_gated_linear(x, weight, "gelu_tanh"), reference_gated_linear(x, weight, "gelu_tanh"))


def test_a_part_is_its_range_of_columns():
    cut = choose_cut(40, 700)
    assert cut == Cut(splits=3, split_len=256)
    x, weight = randn(2, 700), randn(40, 700)
    parts = linear(x, weight).parts
    for part, begin in zip(parts, (0, 256, 512), strict=True):
        close(part, x[:, begin : begin + 256] @ weight[:, begin : begin + 256].T)


@deep_cases("large-torch.float32", "split-torch.float32", "whole-torch.float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(70, 600), (33, 128), slow(530, 300)], ids=["split", "whole", "large"])
def test_a_row_has_the_same_bits_beside_any_others(n: int, k: int, dtype: torch.dtype):
    """Few rows split K over programs and many do not; a row's result shows neither."""
    x, weight = randn(600, k, dtype=dtype), randn(n, k, dtype=dtype)
    alone = [finish(linear(x[i : i + 1], weight))[0] for i in (0, 31, 599)]
    for rows in (1, 2, 17, 33, 65, 160, 600) if DEVICE.type == "cuda" else (2, 17, 160, 600):
        product = linear(x[:rows], weight)
        if rows == 600:
            assert len(product.parts) == 1
        value = finish(product)
        for i, row in zip((0, 31, 599), alone, strict=True):
            if i < rows:
                same_bits(value[i], row)


def test_parts_stay_apart_at_any_number_of_rows():
    x, weight, bias = randn(600, 300, dtype=torch.float16), randn(40, 300, dtype=torch.float16), randn(40).half()
    few, many = (linear(x[:rows], weight, bias, apart=True) for rows in (3, 600))
    assert len(linear(x, weight, bias).parts) == 1
    assert len(few.parts) == len(many.parts) == 2 and few.parts.dtype == many.parts.dtype == torch.float32
    same_bits(many.parts[:, :3], few.parts)
    close(finish(many), F.linear(x, weight, bias))


def test_tiles_change_no_bit():
    x, weight = randn(20, 300), randn(50, 300)
    assert choose_cut(50, 300) == Cut(splits=2, split_len=256)
    want = finish(linear(x, weight))
    for tiles in (
        Tiles(64, 16, 64, 4, 2, 64),
        Tiles(64, 32, 128, 4, 2, 12),
        Tiles(128, 16, 64, 8, 3, 128),
        Tiles(64, 32, 256, 4, 1, 32),  # a range: held
        Tiles(64, 16, 64, 4, 2, 64, tail_m=16),
        Tiles(64, 16, 128, 4, 2, 12, tail_m=32),
    ):
        same_bits(finish(linear(x, weight, tiles=tiles)), want)


@deep_cases("16", "32")
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 40, 70])
def test_two_tiles_of_rows_in_one_program(rows: int):
    """Groups of 16 and 16 rows here: the second may have none, and there may be more than one pair."""
    x, weight, bias = randn(rows, 100), randn(48, 100) * 0.1, randn(48)
    one, two = Tiles(64, 16, 64, 4, 2, 32), Tiles(64, 16, 64, 4, 2, 32, tail_m=16)
    same_bits(finish(linear(x, weight, bias, tiles=two)), finish(linear(x, weight, bias, tiles=one)))
    gated = gated_linear(x, weight, "silu", tiles=two)
    same_bits(gated, gated_linear(x, weight, "silu", tiles=one))
    close(gated, reference_gated_linear(x, weight, "silu"))


def test_two_tiles_hold_the_rows():
    for rows in range(65, 193):
        first, second = gemm_small.two_tiles(rows)
        assert first in (64, 128) and second in (0, 16, 32, 64) and rows <= first + second < rows + 32


def test_tiles_of_some_rows():
    """160 rows of Gemma 4 E4B on 132 multiprocessors: gate/up and head load a weight once, q/k/v are one wave."""
    some = functools.partial(gemm_small.tiles_of_some, 160, wave=264)
    assert some(20480, 1, gated=True) == Tiles(128, 128, 64, 8, 3, 128, tail_m=32)
    assert some(262144, 1, gated=False) == Tiles(128, 128, 64, 8, 4, 128, tail_m=32)
    assert some(3072, 4, gated=False) == Tiles(64, 128, 64, 4, 3, 64, tail_m=32)  # 192 programs, where 288 were
    for n, splits in ((2560, 4), (5120, 4), (10752, 1)):
        assert some(n, splits, gated=False) == Tiles(128, 64, 64, 8, 4, 128)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3072, 2560), (2560, 10240), (20480, 2560), (256, 2560), (2560, 256)])
def test_a_cut_covers_every_column_once(n: int, k: int):
    splits, length = choose_cut(n, k)
    assert (splits - 1) * length < k <= splits * length and length % 128 == 0


@pytest.mark.parametrize(("n", "splits"), [(20480, 1), (3072, 4), (2560, 4), (10752, 1), (262144, 1), (2, 1)])
def test_balanced_rows_fill_the_multiprocessors(n: int, splits: int):
    rows, programs = balanced_rows(n, splits, 132)
    assert rows % 2 == 0 and 32 <= rows <= 64
    if n < 4 * 132 * 64:
        assert -(-n // rows) * splits <= programs * 132
    assert -(-n // rows) * splits > (programs - 1) * 132 or n < 132 * 32 or rows == 64


@pytest.mark.parametrize("shared_memory", [99, 163, 227], ids=lambda kilobytes: f"{kilobytes} KiB")
def test_tiles_fit_the_shared_memory(shared_memory: int, monkeypatch: pytest.MonkeyPatch):
    """An A10, an A100 and an H200; a program that waits for no load of its own has one tile of each at least."""
    monkeypatch.setattr(gemm_small, "device_limits", lambda device: (108, shared_memory << 10))
    x = torch.empty(0, dtype=torch.float16, device=DEVICE)
    for n, k in ((128, 2816), (256, 2560), (4224, 2816), (2560, 10240), (20480, 2560), (262144, 2560)):
        for cut in (choose_cut(n, k), Cut(1, k)):
            for rows in (1, 8, 17, 33, 64, 65, 160, 192, 500, 2048):
                tiles = gemm_small.choose_small_tiles(rows, n, cut, x, gated=cut.splits == 1)
                assert tiles.num_stages >= 1
                taken = tiles.num_stages * (tiles.block_n + tiles.block_m + tiles.tail_m) * tiles.block_k * 2
                assert taken <= shared_memory << 10, f"{n=} {k=} {rows=} {tiles=}"


# norms


def product_of(rows: int, width: int, splits: int, biased: bool = False) -> Product:
    return Product(randn(splits, rows, width), randn(width) if biased else None, torch.float32)


@deep_cases("1-3", "63-1", "100-3", "2000-1")
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("width", [1, 63, 100, 2000])
def test_norm_is_the_reference(width: int, splits: int):
    rows = 3
    gains = [Norm(randn(width), 1e-6), Norm(randn(width), 1e-5, round_first=True), Norm(None, 1e-6)]
    residual = randn(rows, 2, width)[:, 1]
    product = product_of(rows, width, splits, biased=splits > 1)
    for options in (
        {},
        {"pre": gains[0]},
        {"post": gains[0]},
        {"residual": residual, "pre": gains[1]},
        {"post": gains[1], "residual": residual, "pre": gains[2]},
        {"post": gains[2], "residual": residual, "scale": randn(1), "pre": gains[0]},
        {"scale": randn(1)},
        {"factor": 0.22, "residual": residual, "pre": gains[1]},
        {"post": gains[0]._replace(plus_one=True), "residual": residual, "pre": gains[2]._replace(plus_one=True)},
        {"residual": residual, "pre": gains[0]._replace(centred=True)},
        {"post": gains[0]._replace(centred=True), "factor": 3.0},
        {"beside": product_of(rows, width, 2), "residual": residual, "pre": gains[0]},
        {"beside": Product.from_value(randn(rows, width))},
    ):
        torch.testing.assert_close(norm(product, **options), reference_norm(product, **options), rtol=2e-5, atol=2e-5)


def test_what_lies_beside_is_added_to_the_sum_and_rounded_with_it():
    """In float16 2048 + 1 is 2048, to which the residual's 1 adds nothing either."""
    two = Product(torch.tensor([[[1024.0]], [[1024.0]]], device=DEVICE), None, torch.float16)
    one = torch.ones(1, 1, dtype=torch.float16, device=DEVICE)
    assert norm(two, beside=Product.from_value(one), residual=one)[0].tolist() == [[2048.0]]


def test_norm_rounds_where_transformers_rounds():
    x = randn(4, 100, dtype=torch.float16)
    for round_first in (False, True):
        gain = Norm(randn(100, dtype=torch.float16), 1e-6, round_first)
        options = {"post": gain, "residual": randn(4, 100, dtype=torch.float16), "pre": gain}
        for got, want in zip(
            norm(Product.from_value(x), **options), reference_norm(Product.from_value(x), **options), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)
            assert (got != want).float().mean() <= 0.01  # a number between two roundings, now and then


def test_norm_of_a_sum_that_is_done_copies_nothing():
    x = randn(3, 8)
    hidden, normed = norm(Product.from_value(x), pre=Norm(None, 1e-6))
    assert hidden.data_ptr() == x.data_ptr() and normed.data_ptr() != x.data_ptr()


# branches


def gain(width: int, dtype: torch.dtype = torch.float32, round_first: bool = False) -> Norm:
    return Norm(randn(width, dtype=dtype), float(torch.rand(()) * 0.1), round_first)  # eps that are seen


@deep_cases("1-3", "63-1", "100-3", "2000-1")
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("width", [1, 63, 100, 2000])
def test_fork_norm_is_the_reference(width: int, splits: int):
    product = product_of(3, width, splits, biased=splits > 1)
    readers = {"mlp": gain(width), "experts": gain(width), "router": gain(width, round_first=True), "factor": 0.3}
    options = {"post": gain(width), "residual": randn(3, 2, width)[:, 1], **readers}
    got, want = fork_norm(product, **options), reference_fork_norm(product, **options)
    torch.testing.assert_close(tuple(got), tuple(want), rtol=2e-5, atol=2e-5)


@deep_cases("1-3-8", "63-1-1", "100-3-8", "2000-1-1")
@pytest.mark.parametrize(("splits", "top_k"), [(1, 1), (3, 8)])
@pytest.mark.parametrize("width", [1, 63, 100, 2000])
def test_join_norm_is_the_reference(width: int, splits: int, top_k: int):
    dense, chosen = product_of(3, width, splits), product_of(3, width, top_k)
    gains = {"dense_gain": gain(width), "chosen_gain": gain(width), "post": gain(width)}
    for end in ({}, {"pre": gain(width)}, {"scale": randn(1), "pre": gain(width)}):
        options = {**gains, "residual": randn(3, 2, width)[:, 1], **end}
        got, want = (f(dense, chosen, **options) for f in (join_norm, reference_join_norm))
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_branches_by_eye():
    """The residual stream is [3, 4] after a norm of nothing: rows of mean square 12.5, which each reader norms."""
    ones, twos = torch.ones(2, device=DEVICE), torch.full((2,), 2.0, device=DEVICE)
    nothing, residual = Product.from_value(torch.zeros(1, 2, device=DEVICE)), torch.tensor([[3.0, 4.0]], device=DEVICE)
    readers = {"mlp": Norm(ones, 0.0), "experts": Norm(twos, 0.0), "router": Norm(ones, 12.5, True), "factor": 10.0}
    fork = fork_norm(nothing, post=Norm(ones, 1.0), residual=residual, **readers)
    unit = residual / 12.5**0.5
    for got, want in zip(fork, (residual, unit, 2 * unit, 10 * residual / 5), strict=True):
        close(got, want)
    minus = Product.from_value(-7 * residual)  # of any length: what is added is normed; here the two cancel
    gains = {"dense_gain": Norm(twos, 0.0), "chosen_gain": Norm(twos, 0.0), "post": Norm(ones, 1.0)}
    scale = torch.tensor([0.5], device=DEVICE)
    hidden, normed = join_norm(Product.from_value(5 * residual), minus, **gains, residual=residual, scale=scale)
    close(hidden, residual / 2)
    assert normed is hidden


def test_branches_round_where_transformers_rounds():
    half = torch.float16
    x, y, residual = (randn(4, 100, dtype=half) for _ in range(3))
    readers = {"mlp": gain(100, half), "experts": gain(100, half), "router": gain(100, half, True), "factor": 0.1}
    options = {"post": gain(100, half), "residual": residual, **readers}
    for got, want in zip(*(f(Product.from_value(x), **options) for f in (fork_norm, reference_fork_norm)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert (got == want).float().mean() > 0.98  # the rest are ties of another order of the mean
    gains = {"dense_gain": gain(100, half), "chosen_gain": gain(100, half), "post": gain(100, half)}
    options = {**gains, "residual": residual, "scale": randn(1, dtype=half), "pre": gain(100, half)}
    for got, want in zip(
        *(f(Product.from_value(x), Product.from_value(y), **options) for f in (join_norm, reference_join_norm)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
        assert (got == want).float().mean() > 0.95


# rotary and store

HEADS = {
    "gemma": lambda d: Heads(4, 2, d, Norm(randn(d), 1e-6), Norm(randn(d), 1e-6), Norm(None, 1e-6)),
    "keys as values": lambda d: Heads(2, 1, d, Norm(randn(d), 1e-6), Norm(randn(d), 1e-6), Norm(None, 1e-6), True),
    "queries": lambda d: Heads(3, 0, d, Norm(randn(d), 1e-6)),
    "llama": lambda d: Heads(4, 1, d),
    "gemma3": lambda d: Heads(2, 1, d, Norm(randn(d), 1e-6, plus_one=True), Norm(randn(d), 1e-6, plus_one=True)),
    "glm": lambda d: Heads(4, 2, d, interleaved=True),
    "mimo": lambda d: Heads(4, 2, d, narrow_v_dim=d // 2 - 1, v_scale=0.707),
    "latent": lambda d: Heads(2, 2, d, last=True, narrow_v_dim=d - 2),
    "qwen3.5": lambda d: Heads(
        2, 1, d, Norm(randn(d), 1e-6, plus_one=True), Norm(randn(d), 1e-6, plus_one=True), gated=True
    ),
    "qwen3": lambda d: Heads(2, 2, d, Norm(randn(d), 1e-6, True), Norm(randn(d), 1e-6, True)),
}


@usual_cases(
    *("gemma-8-8-3", "gemma-64-16-1", "keys as values-20-12-3", "queries-64-16-1", "llama-8-8-3", "llama-20-12-3"),
    *("gemma3-8-8-3", "glm-20-12-3", "mimo-64-16-1", "latent-8-8-3", "qwen3.5-20-12-3", "qwen3-64-16-1"),
)
@pytest.mark.parametrize(
    ("dim", "rotated", "splits"), [deep(8, 8, 1), slow(8, 8, 3), (20, 12, 3), slow(64, 16, 1), deep(64, 16, 3)]
)
@pytest.mark.parametrize("kind", HEADS)
def test_rope_store_is_the_reference(kind: str, splits: int, dim: int, rotated: int):
    rows, heads = 5, HEADS[kind](dim)
    product = product_of(rows, heads.width, splits, biased=splits > 1)
    table = Rotary(*randn(2, rows, rotated // 2 + 3)[..., : rotated // 2])
    pools = [torch.zeros((12, heads.num_kv, size), device=DEVICE) for size in (dim, heads.v_dim, dim, heads.v_dim)]
    slots = PrimaryLoc(torch.tensor([[7, 1], [3, 1], [0, 1], [11, 1], [0, 1]], device=DEVICE)[:, 0])  # two padded rows
    got = rope_store(product, heads, table, Destination(pools[0], pools[1], slots))
    want = reference_rope_store(product, heads, table, Destination(pools[2], pools[3], slots))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    for pool, wanted in zip(pools[:2], pools[2:], strict=True):
        torch.testing.assert_close(pool[1:], wanted[1:], rtol=2e-5, atol=2e-5)
    if heads.num_kv:
        torch.testing.assert_close(pools[0][slots[[0, 1, 3]]], got.k[[0, 1, 3]], rtol=0, atol=0)
        assert not any(pool[[1, 2, 4, 5, 6, 8, 9, 10]].any() for pool in pools)
    without = rope_store(product, heads, table)
    torch.testing.assert_close(without, got, rtol=0, atol=0)


def test_rope_by_eye():
    """Position 0 turns nothing; a quarter turn sends channel j to j + R / 2; channels past R stay."""
    table = Rotary(torch.tensor([[1.0], [0.0]], device=DEVICE), torch.tensor([[0.0], [1.0]], device=DEVICE))
    rows = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=DEVICE).expand(2, 4)
    got = rope_store(Product.from_value(rows.contiguous()), Heads(1, 0, 4), table).q
    assert got[:, 0].tolist() == [[1, 2, 3, 4], [-2, 1, 3, 4]]


def test_the_last_channels_turn_and_narrow_values_are_scaled():
    """One head each; a quarter turn of the last two channels, and values of three numbers, times a half."""
    table = Rotary(torch.zeros(1, 1, device=DEVICE), torch.ones(1, 1, device=DEVICE))
    rows = Product.from_value(torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8, 2, 4, 6]], device=DEVICE))
    heads = Heads(1, 1, 4, last=True, narrow_v_dim=3, v_scale=0.5)
    for operation in (rope_store, reference_rope_store):
        q, k, v = (x[0, 0].tolist() for x in operation(rows, heads, table))
        assert (q, k, v) == ([1, 2, -4, 3], [5, 6, -8, 7], [1, 2, 3])


@pytest.mark.parametrize(("heads", "width", "splits"), [(1, 1030, 1), (6, 8, 2), (3, 20, 1)])
def test_gates_are_those_of_the_reference(heads: int, width: int, splits: int):
    x, gates = randn(4, heads + 1, width)[:, 1:], product_of(4, heads, splits, biased=splits > 1)
    torch.testing.assert_close(gate_heads(x, gates), reference_gate_heads(x, gates), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("heads", "width", "splits", "biased"), [(1, 33, 1, False), (3, 8, 3, True)])
def test_gates_by_channel_are_those_of_the_reference(heads: int, width: int, splits: int, biased: bool):
    """What follows the pairs of queries and gates, keys and values, is not read. Heads may lie in any order: those of
    torch's attention, which proves a target's layers, lie before tokens."""
    x, product = randn(heads, 4, width).transpose(0, 1), product_of(4, 2 * heads * width + 5, splits, biased=biased)
    found = gate_channels(x, product)
    torch.testing.assert_close(found, reference_gate_channels(x, product), rtol=2e-6, atol=2e-6)
    gate = reference_finish(product)[2, 2 * heads * width - 1]
    torch.testing.assert_close(found[2, -1, -1], x[2, -1, -1] * gate.sigmoid())


def test_a_gate_by_eye():
    """Zero halves a head, a large number keeps it, a very negative one takes it away."""
    gates = Product.from_value(torch.tensor([[0.0, 90.0, -90.0]], device=DEVICE))
    assert gate_heads(torch.ones(1, 3, 2, device=DEVICE), gates).tolist()[0][:2] == [[0.5, 0.5], [1, 1]]
    assert gate_heads(torch.ones(1, 3, 2, device=DEVICE), gates)[0, 2].max() < 1e-30


def test_interleaved_rope_by_eye():
    """A quarter turn sends channel 2 j to 2 j + 1; channels past R stay. Without channels that turn all stay."""
    rows = Product.from_value(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]], device=DEVICE))
    table = Rotary(torch.zeros(1, 2, device=DEVICE), torch.ones(1, 2, device=DEVICE))
    assert rope_store(rows, Heads(1, 0, 6, interleaved=True), table).q[0, 0].tolist() == [-2, 1, -4, 3, 5, 6]
    none = rotary(torch.tensor([7], device=DEVICE), torch.empty(0, device=DEVICE), 1.0, torch.float32)
    assert rope_store(rows, Heads(1, 0, 6), none).q[0, 0].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("widths", "splits"), [((1, 1), 1), ((63, 21), 3), ((64, 64), 1), ((100, 20), 2)])
def test_qk_norm_is_the_reference(widths: tuple[int, int], splits: int):
    q_width, k_width = widths
    product = product_of(3, q_width + 2 * k_width, splits, biased=splits > 1)
    for round_first in (False, True):
        gains = [Norm(randn(width), eps, round_first) for width, eps in zip(widths, (0.1, 0.2), strict=True)]
        got, want = (finish(f(product, *gains)) for f in (qk_norm, reference_qk_norm))
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_rotary_is_the_reference():
    positions = torch.tensor([[0, 9], [1, 9], [77, 9], [131071, 9]], device=DEVICE)[:, 0]
    frequencies = 1e4 ** (-torch.arange(0, 70, device=DEVICE) / 70)
    for dtype in (torch.float32, torch.float16):
        got, want = (f(positions, frequencies, 0.9, dtype) for f in (rotary, reference_rotary))
        torch.testing.assert_close(tuple(got), tuple(want), rtol=1e-3, atol=1e-4)


# per-layer embeddings


@deep_cases(
    *("1-8-32-1-torch.float16", "5-20-70-3-torch.float32", "40-16-33-2-torch.float16", "200-20-33-2-torch.float32"),
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "height", "splits"), [(1, 8, 32, 1), (5, 20, 70, 3), (40, 16, 33, 2), (200, 20, 33, 2)]
)
def test_gated_projection_is_the_reference(rows: int, width: int, height: int, splits: int, dtype: torch.dtype):
    gate = Product(randn(splits, rows, width), None, dtype)
    inputs, weight = randn(rows, 3, width, dtype=dtype)[:, 1], randn(height, width, dtype=dtype) * width**-0.5
    got, want = (f(gate, inputs, weight, "gelu_tanh") for f in (gated_projection, reference_gated_projection))
    close(finish(got), reference_finish(want))


@pytest.mark.parametrize("rows", [65, 193])
def test_gated_projection_in_any_order_is_the_reference(rows: int):
    gate = Product(randn(2, rows, 24), None, torch.float16)
    inputs, weight = randn(rows, 24, dtype=torch.float16), randn(72, 24, dtype=torch.float16) / 5
    got, want = (f(gate, inputs, weight, "silu") for f in (vendor_gated_projection, reference_gated_projection))
    close(finish(got), reference_finish(want))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [256, 512])
def test_gated_projection_gives_a_row_the_same_bits_beside_any_others(width: int):
    gate = Product(randn(5, 300, width), None, torch.bfloat16)
    inputs, weight = randn(300, width, dtype=torch.bfloat16), randn(2560, width, dtype=torch.bfloat16) * width**-0.5

    def projected(rows: slice) -> torch.Tensor:
        parts = gate._replace(parts=gate.parts[:, rows].contiguous())
        return finish(gated_projection(parts, inputs[rows], weight, "gelu_tanh"))

    whole = projected(slice(None))
    for rows in (slice(7, 8), slice(64), slice(65), slice(40, 200), slice(44, 300)):
        assert torch.equal(projected(rows), whole[rows]), rows


@pytest.mark.parametrize(("rows", "layers", "width", "splits"), [(1, 1, 8, 1), (4, 3, 20, 2), (3, 2, 64, 3)])
def test_layer_inputs_is_the_reference(rows: int, layers: int, width: int, splits: int):
    context = product_of(rows, layers * width, splits)
    tokens, table = torch.randint(0, 9, (rows,), device=DEVICE), randn(9, layers * width + 3)[:, : layers * width]
    options = {"context_scale": 0.3, "table_scale": 4.0}
    gain = Norm(randn(width), 1e-6)
    got = layer_inputs(context, tokens, table, gain, **options)
    assert got.shape == (rows, layers, width)
    close(got, reference_layer_inputs(context, tokens, table, gain, **options))


@pytest.mark.parametrize(
    "operation", [norm, fork_norm, join_norm, rope_store, gated_projection, layer_inputs], ids=lambda f: f.__name__
)
def test_nothing_to_do(operation: Callable[..., object]):
    empty = torch.empty((1, 0, 8), device=DEVICE)
    product, nobody = Product(empty, None, torch.float32), torch.empty((0, 4), device=DEVICE)
    arguments = {
        norm: (product,),
        fork_norm: (product,),
        join_norm: (product, product),
        rope_store: (product, Heads(1, 0, 8), Rotary(nobody, nobody)),
        gated_projection: (product, empty[0], randn(4, 8), "silu"),
        layer_inputs: (product, torch.zeros(0, dtype=torch.int64, device=DEVICE), randn(3, 8), Norm(randn(8), 1e-6)),
    }[operation]
    some = Norm(randn(8), 1e-6)
    around = {"post": some, "residual": empty[0]}
    options = {
        layer_inputs: {"context_scale": 1.0, "table_scale": 1.0},
        fork_norm: {**around, "mlp": some, "experts": some, "router": some._replace(round_first=True), "factor": 1.0},
        join_norm: {**around, "dense_gain": some, "chosen_gain": some},
    }
    operation(*arguments, **options.get(operation, {}))
