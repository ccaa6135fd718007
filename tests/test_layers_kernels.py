"""The kernels of specdec.layers against their references: odd sizes, strides, every option; rows that do not meet."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from specdec.gpu import triton_shim
from specdec.gpu.operations import FAST
from specdec.gpu.triton_shim import LATE
from specdec.layers import norm as norm_module
from specdec.layers.gemm import gemm_large, gemm_medium, gemm_small
from specdec.layers.gemm import linear as linear_module
from specdec.layers.gemm.gemm_medium import choose_medium_tiles
from specdec.layers.gemm.gemm_medium import gemm_medium as multiply_medium
from specdec.layers.gemm.linear import (
    gated_linear,
    linear,
    reference_gated_linear,
    reference_linear,
)
from specdec.layers.gemm.product import (
    Product,
    SplitK,
    Tiles,
    choose_split_k,
    finish,
    reference_activate,
    reference_finish,
)
from specdec.layers.head_gates import gate_heads
from specdec.layers.moe.experts import Experts, apply_experts, reference_apply_experts
from specdec.layers.moe.fork_join import fork_norm, join_norm, reference_fork_norm, reference_join_norm
from specdec.layers.moe.routing import Routing
from specdec.layers.norm import Norm, norm, reference_norm
from specdec.layers.per_layer_embedding import gated_projection
from specdec.layers.rope_store import Heads, Rotary, reference_rope_store, rope_store, rotary

from devices import DEVICE, DTYPES, close
from marks import deep, deep_cases, slow

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty", "seeded")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """On a GPU. In the interpreter a product is numpy's, which adds in an order of its own for each shape."""
    if DEVICE.type == "cuda":
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    else:
        close(got, want)


# products


def test_a_gate_of_any_size_is_exact():
    """Far out an activation is 0 or its argument; nothing overflows on the way."""
    x = torch.tensor([[1.0], [-1.0]], device=DEVICE)
    for activation in ("silu", "gelu_tanh"):
        gates = torch.tensor([0.5, 30.0, 1e4, 1e12], device=DEVICE)
        weight = torch.cat([gates, torch.ones_like(gates)])[:, None]
        got = gated_linear(x, weight, activation)
        close(got[0], reference_activate(gates, activation))
        close(got[1], -reference_activate(-gates, activation))


def test_a_limited_gate_may_be_wider_than_a_program():
    x, weight = randn(2, 8), randn(2 * 1030, 8)
    close(gated_linear(x, weight, "silu", 0.5), reference_gated_linear(x, weight, "silu", 0.5))


@pytest.mark.parametrize(
    ("rows", "n", "splits", "large"),
    [(512, 2560, 4, False), (1024, 2560, 4, True), (2048, 2560, 4, False), (2048, 6144, 4, True), (512, 8448, 1, True)],
)
def test_large_tiles_are_for_waves_that_they_fill(rows, n, splits, large, monkeypatch):
    """1,024 rows of 2,560 are 80 large tiles, one wave of 132 programs, or 160 small ones, two waves. 2,048 rows are
    two waves or three; a wave of large tiles takes 7 / 4 as long."""
    monkeypatch.setattr(gemm_large, "device_limits", lambda _: (132, 227 << 10))
    tiles = gemm_large.choose_large_tiles(rows, n, SplitK(splits, 640), torch.device("cpu"), gated=False)
    assert tiles == (gemm_large.LARGE if large else gemm_large.SMALL)


@pytest.mark.parametrize(("num_rows", "n", "k"), [(257, 520, 328), deep(400, 1100, 328)])
def test_many_rows_are_multiplied_in_tiles_of_their_own(
    num_rows: int, n: int, k: int, watched: Callable[..., list[Any]]
):
    """With ranges of K and without, biased, gated; rows that descriptors cannot describe go the usual way."""
    launched = watched(linear_module, "gemm_large", len)
    x, weight = randn(num_rows, k, dtype=torch.float16), randn(n, k, dtype=torch.float16) * k**-0.5
    bias = randn(n, dtype=torch.float16)
    close(finish(linear(x, weight, bias)), reference_linear(x, weight, bias).parts[0])
    close(finish(linear(x, weight, bias, SplitK(1, k))), reference_linear(x, weight, bias).parts[0])
    close(gated_linear(x, weight, "silu"), reference_gated_linear(x, weight, "silu"))
    assert len(launched) == 3
    same_bits(linear(x[:300], weight, bias).parts[0][:3], finish(linear(x[:3], weight, bias)))
    skewed = randn(num_rows, k + 1, dtype=torch.float16)[:, :k]
    close(finish(linear(skewed, weight)), reference_linear(skewed, weight).parts[0])
    linear(x, weight, bias, keep_parts=True)
    assert len(launched) == 4


@pytest.mark.parametrize(("num_rows", "n", "k"), [(33, 130, 200), (50, 66, 328)])
def test_some_rows_are_multiplied_by_descriptors(num_rows: int, n: int, k: int):
    """In ranges of K and without, biased; gated, with a tail and without. Tiles that nothing divides."""
    x, weight = randn(num_rows, k, dtype=torch.float16), randn(n, k, dtype=torch.float16) * k**-0.5
    bias = randn(n, dtype=torch.float16)
    for tiles in (Tiles(32, 64, 64, 4, 3, 32, ranges=3), Tiles(64, 16, 32, 4, 3, 64)):
        close(finish(multiply_medium(x, weight, bias, None, tiles)), reference_linear(x, weight, bias).parts[0])
    for tiles in (Tiles(32, 64, 64, 4, 3, 48, tail_n=16), Tiles(64, 16, 64, 4, 3, 64)):
        gated = multiply_medium(x, weight, None, "gelu_tanh", tiles).parts[0]
        close(gated, reference_gated_linear(x, weight, "gelu_tanh"))


def test_which_kernel_multiplies_a_medium_number_of_rows(
    watched: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
):
    """Weights that fill the device: 33 to 128 rows; of a gated weight also 193 to 256. Not what has no descriptors."""
    launched = watched(linear_module, "gemm_medium", len)

    def launches(num_rows: int, *, gated: bool = False, dtype: torch.dtype = torch.float16, columns: int = 64) -> int:
        launched.clear()
        monkeypatch.setattr(gemm_medium, "device_limits", lambda device: (4 if gated else 9, 227 << 10))
        x, weight = randn(num_rows, 72, dtype=dtype)[:, :columns], randn(520, columns, dtype=dtype) / 8
        if gated:
            close(FAST(gated_linear)(x, weight, "silu"), reference_gated_linear(x, weight, "silu"))
        else:
            close(finish(FAST(linear)(x, weight)), F.linear(x, weight))
        return len(launched)

    assert [launches(num_rows) for num_rows in (32, 33, 128, 129)] == [0, 1, 1, 0]
    assert [launches(num_rows, gated=True) for num_rows in (32, 33, 128, 160, 256, 257)] == [0, 1, 1, 0, 1, 0]
    assert launches(64, dtype=torch.float32) == launches(64, columns=60) == 0


@pytest.mark.parametrize(
    ("num_rows", "n", "k", "gated", "want"),
    [
        (128, 20480, 2560, True, (160, 1)),  # Gemma 4 E4B: 128 programs
        (128, 28672, 4096, True, (128, 1)),  # Llama 8B: 224 programs, two a multiprocessor
        (64, 4224, 2816, True, None),  # Gemma 4 26B-A4B: 33 programs
        (128, 43008, 5376, True, None),  # 31B: two and a half waves
        (128, 2560, 10240, False, (64, 3)),  # 120 programs
        (128, 2560, 256, False, None),  # ranges of K would be short
        (64, 5120, 2880, False, (64, 1)),  # 80 programs are enough next to `linear`, not next to the vendor's library
        (128, 5120, 2880, False, None),
        (128, 262144, 2560, False, (128, 1)),  # a head
        (256, 256, 2560, False, (64, 5)),  # a small weight
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


def test_a_part_is_its_range_of_columns():
    split_k = choose_split_k(40, 700)
    assert split_k == SplitK(splits=3, split_len=256)
    x, weight = randn(2, 700), randn(40, 700)
    parts = linear(x, weight).parts
    for part, begin in zip(parts, (0, 256, 512), strict=True):
        close(part, x[:, begin : begin + 256] @ weight[:, begin : begin + 256].T)


@deep_cases("large-torch.float32", "split-torch.float32", "whole-torch.float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(70, 600), (33, 128), slow(530, 300)], ids=["split", "whole", "large"])
def test_a_row_has_the_same_bits_with_any_other_rows(n: int, k: int, dtype: torch.dtype):
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
    few, many = (linear(x[:rows], weight, bias, keep_parts=True) for rows in (3, 600))
    assert len(linear(x, weight, bias).parts) == 1
    assert len(few.parts) == len(many.parts) == 2 and few.parts.dtype == many.parts.dtype == torch.float32
    same_bits(many.parts[:, :3], few.parts)
    close(finish(many), F.linear(x, weight, bias))
    assert linear(x[:, :64], weight[:, :64], keep_parts=True).parts.dtype == torch.float32  # one part, not rounded


def test_tiles_change_no_bit():
    x, weight = randn(20, 300), randn(50, 300)
    assert choose_split_k(50, 300) == SplitK(splits=2, split_len=256)
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


@pytest.mark.parametrize("shared_memory", [99, 163, 227], ids=lambda kilobytes: f"{kilobytes} KiB")
def test_tiles_fit_the_shared_memory(shared_memory: int, monkeypatch: pytest.MonkeyPatch):
    """An A10, an A100 and an H200; a program that waits for no load of its own has one tile of each at least."""
    monkeypatch.setattr(gemm_small, "device_limits", lambda device: (108, shared_memory << 10))
    x = torch.empty(0, dtype=torch.float16, device=DEVICE)
    for n, k in ((128, 2816), (256, 2560), (4224, 2816), (2560, 10240), (20480, 2560), (262144, 2560)):
        for split_k in (choose_split_k(n, k), SplitK(1, k)):
            for rows in (1, 8, 17, 33, 64, 65, 160, 192, 500, 2048):
                tiles = gemm_small.choose_small_tiles(rows, n, split_k, x, gated=split_k.splits == 1)
                assert tiles.num_stages >= 1
                taken = tiles.num_stages * (tiles.block_n + tiles.block_m + tiles.tail_m) * tiles.block_k * 2
                assert taken <= shared_memory << 10, f"{n=} {k=} {rows=} {tiles=}"


# norms


def test_an_addend_is_added_to_the_sum_and_rounded_with_it():
    """In float16 2048 + 1 is 2048, to which the residual's 1 adds nothing either."""
    two = Product(torch.tensor([[[1024.0]], [[1024.0]]], device=DEVICE), None, torch.float16)
    one = torch.ones(1, 1, dtype=torch.float16, device=DEVICE)
    assert norm(two, addend=Product.from_value(one), residual=one)[0].tolist() == [[2048.0]]


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


def test_when_a_norm_lets_the_next_kernel_start(monkeypatch: pytest.MonkeyPatch):
    """Late, after its own wait, if it has many rows; with few rows only if asked to."""
    chosen: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **options: chosen.append(options["PDL"])

    monkeypatch.setattr(norm_module, "_norm_kernel", Kernel())
    monkeypatch.setattr(norm_module, "_row_options", norm_module._row_options.__wrapped__)
    monkeypatch.setattr(triton_shim, "has_pdl", lambda device: True)
    for num_rows, late in ((1, False), (32, False), (33, False), (1, True)):
        norm(Product.from_value(randn(num_rows, 8)), pre=Norm(randn(8), 1e-6), late=late)
    assert chosen == [True, True, LATE.value, LATE.value]


def test_branches_by_eye():
    """The residual stream is [3, 4] after a norm of nothing: rows of mean square 12.5, which each reader norms."""
    ones, twos = torch.ones(2, device=DEVICE), torch.full((2,), 2.0, device=DEVICE)
    nothing, residual = Product.from_value(torch.zeros(1, 2, device=DEVICE)), torch.tensor([[3.0, 4.0]], device=DEVICE)
    readers = {"mlp": Norm(ones, 0.0), "experts": Norm(twos, 0.0), "router": Norm(ones, 12.5, True), "factor": 10.0}
    inputs = fork_norm(nothing, post=Norm(ones, 1.0), residual=residual, **readers)
    unit = residual / 12.5**0.5
    for got, want in zip(inputs, (residual, unit, 2 * unit, 10 * residual / 5), strict=True):
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


# per-layer embeddings


@pytest.mark.gpu
@pytest.mark.parametrize("width", [256, 512])
def test_gated_projection_gives_a_row_the_same_bits_with_any_other_rows(width: int):
    gate = Product(randn(5, 300, width), None, torch.bfloat16)
    inputs, weight = randn(300, width, dtype=torch.bfloat16), randn(2560, width, dtype=torch.bfloat16) * width**-0.5

    def projected(rows: slice) -> torch.Tensor:
        parts = gate._replace(parts=gate.parts[:, rows].contiguous())
        return finish(gated_projection(parts, inputs[rows], weight, "gelu_tanh"))

    whole = projected(slice(None))
    for rows in (slice(7, 8), slice(64), slice(65), slice(40, 200), slice(44, 300)):
        assert torch.equal(projected(rows), whole[rows]), rows


def test_experts_of_a_clamped_silu_by_eye():
    """The gate is 10 x, up is -20 x; neither of their factors is above 7."""
    gate_up, one = torch.tensor([[[10.0], [-20.0]]], device=DEVICE), torch.ones(2, 1, device=DEVICE)
    experts = Experts(gate_up, one[:1, None], "silu_clamped", limit=7.0)
    x, routing = torch.tensor([[1.0], [-1.0]], device=DEVICE), Routing(torch.zeros_like(one, dtype=torch.int32), one)
    want = torch.tensor([[-49.0], [-10 * 7 / (1 + math.exp(10))]], device=DEVICE)
    torch.testing.assert_close(reference_finish(reference_apply_experts(x, routing, experts)), want)
    for few in (True, False):
        torch.testing.assert_close(finish(apply_experts(x, routing, experts, few=few)), want)
