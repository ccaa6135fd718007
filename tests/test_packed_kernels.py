"""Products over packed weights against the dequantised ones: every code, odd sizes, every kernel with a weight."""

import tomllib
from collections.abc import Callable
from math import gcd, inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_weights import CODES, random_weight

from specdec.gpu.operations import FAST
from specdec.layers import per_layer_embedding
from specdec.layers.description.decoder_parts import LayerParts
from specdec.layers.gemm import linear as linear_module
from specdec.layers.gemm.linear import (
    Mlp,
    gated_linear,
    linear,
    reference_gated_linear,
    reference_linear,
)
from specdec.layers.gemm.product import Product, SplitK, Tiles, finish, reference_finish, split_k_of
from specdec.layers.moe.dense_and_moe import mlp_and_experts, reference_mlp_and_experts
from specdec.layers.moe.experts import Experts, apply_experts, reference_apply_experts
from specdec.layers.moe.fork_join import BranchInputs
from specdec.layers.moe.routing import Router, Routing
from specdec.layers.packed import packed_gemm as packed_gemm_module
from specdec.layers.packed import packed_launch, unpack_asm
from specdec.layers.packed.packed_gemm import dequantise, packed_gemm
from specdec.layers.packed.packed_launch import PackedLaunch, choose_packed_rows, choose_packed_tiles
from specdec.layers.packed.packed_weight import BITS, PackedWeight, dequantised, pack_words
from specdec.layers.per_layer_embedding import gated_projection, reference_gated_projection

from devices import DEVICE, DTYPES, close
from marks import is_deep, usual_cases

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty", "seeded")

TIMES = tomllib.loads((Path(__file__).parent / "data" / "packed_times.toml").read_text("utf-8"))
GATED = (20480, 28672)
"""N of the weights in `TIMES` whose products are gated."""
SLOWER = {
    ("e4m3-row 2560 10240", "256-layer"): 1.06,
    ("e4m3-row 3072 2560", "192"): 1.05,
    ("e4m3-row 2048 2560", "96"): 1.10,
    ("e4m3-row 2048 2560", "160"): 1.08,
}
"""Bounds where the chosen launch is slower than the test allows: 4 of 162."""


def empty_weight(form: str, n: int, k: int) -> PackedWeight:
    """A weight of a form of `CODES`, on no device: for choices that read shapes alone."""
    code, _, kind = form.partition("-")
    group = gcd({"row": k, "block": 128, "g128": 64}.get(kind, 32), k)
    words = torch.empty((n, k * BITS[code] // 32), dtype=torch.int32, device="meta")
    return PackedWeight(code, words, torch.empty((k // group, n), device="meta"), None, group)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are chosen for 132 multiprocessors with 227 KiB each."""
    monkeypatch.setattr(packed_launch, "device_limits", lambda device: (132, 227 << 10))


def test_words_by_eye():
    """Word t of a row has columns 2 t and 2 t + 1 in the lowest 4 bits of its halves."""
    numbers = torch.zeros(1, 32, dtype=torch.uint8)
    numbers[0, 2], numbers[0, 3], numbers[0, 10], numbers[0, 18] = 1, 2, 3, 4  # t = 1; b = 1; a = 1
    assert pack_words(numbers, "int4")[0].tolist() == [0, 1 | 2 << 16 | 3 << 4 | 4 << 8, 0, 0]


def test_numbers_by_eye():
    """(q - 8) times a scale of its group of 32 columns."""
    numbers = torch.full((1, 64), 8, dtype=torch.uint8)
    numbers[0, 0], numbers[0, 33] = 11, 0
    weight = PackedWeight("int4", pack_words(numbers, "int4"), torch.tensor([[2.0], [0.5]]), None, 32)
    found = dequantised(weight, torch.float32)[0]
    assert found[0] == 6.0 and found[33] == -4.0 and found.count_nonzero() == 2


def test_coarse_scales_are_repeated():
    weight = random_weight("int4", 8, 256)
    coarse = PackedWeight("int4", weight.words, weight.scales[::4], None, 128)
    torch.testing.assert_close(
        dequantised(coarse, torch.float32), dequantised(coarse.with_repeated_scales(), torch.float32)
    )
    assert coarse.with_repeated_scales().group == 64


def test_a_row_of_4_bits_may_be_one_group():
    weight, x = random_weight("int4", 70, 32, dtype=torch.float16), torch.randn(3, 32, device=DEVICE).half()
    assert weight.group == 32 and not weight.has_row_scales
    close(finish(linear(x, weight)), reference_finish(reference_linear(x, weight)))


@pytest.mark.parametrize("form", CODES)
def test_many_rows_over_packed_weights(form: str):
    """Two tiles of x for one of the weight, ranges of K, a bias, a gate, short tiles; tiles that nothing divides: the
    last of x begins within the one before."""
    n, k, tiles = 70, 384 if form == "e4m3-block" else 448, Tiles(64, 16, 128, 4, 2, 64)
    weight, bias = random_weight(form, n, k, dtype=torch.float16), torch.randn(n, device=DEVICE).half()
    many = torch.randn(90, k, device=DEVICE).half()
    x = many[:40]
    want = reference_finish(reference_linear(x, weight, bias))
    whole, split_k, with_tail = SplitK(1, k), SplitK(2, 256), tiles._replace(tail_m=32)
    wide = tiles._replace(block_m=64, block_k=64 if k % 128 else 128)  # more rows than x has
    for launch in (
        PackedLaunch(tiles, whole),
        PackedLaunch(wide, whole),
        PackedLaunch(with_tail, split_k),
        PackedLaunch(tiles, split_k, summed=True),
    ):
        product = packed_gemm(x, weight, bias, None, launch)
        assert len(product.parts) == launch.parts
        close(finish(product), want)
    gated = packed_gemm(x, weight, None, "silu", PackedLaunch(with_tail, whole)).parts[0]
    close(gated, reference_gated_linear(x, weight, "silu"))
    for num_tall in (
        (1, 2) if is_deep() else (1 + CODES.index(form) % 2,)
    ):  # of two tiles of the weight; the short tiles have all rows of the second, or rows 64 to 90
        launch = PackedLaunch(wide, split_k, short_tiles=tiles, num_tall=num_tall)
        product = packed_gemm(many, weight, bias, None, launch)
        close(finish(product), reference_finish(reference_linear(many, weight, bias)))
        gated = packed_gemm(many, weight, None, "silu", launch._replace(split_k=whole)).parts[0]
        close(gated, reference_gated_linear(many, weight, "silu"))


@pytest.mark.parametrize(
    ("form", "num_rows", "n", "k", "want"),
    [  # rows of the weight, of x and their tail, ranges of K, of 132 multiprocessors; `TIMES` has other weights
        ("int4", 64, 20480, 2560, (64, 64, 0, 1)),  # Gemma 4 E4B, gate and up
        ("int4", 128, 20480, 2560, (128, 64, 0, 1)),
        ("int4", 512, 20480, 2560, (64, 128, 0, 1)),
        ("int4", 320, 20480, 2560, (128, 128, 0, 1)),
        ("int4", 2048, 20480, 2560, None),
        ("int4", 160, 28672, 4096, (128, 128, 32, 1)),  # Llama 8B
        ("int4-g128", 160, 28672, 4096, (128, 64, 0, 1)),  # scales of groups of 64 are too few for 8 warps
        ("e4m3-row", 160, 20480, 2560, (64, 128, 32, 1)),
        ("e4m3-block", 128, 20480, 2560, (64, 64, 0, 1)),
        ("e4m3-block", 640, 20480, 2560, None),  # a sum of each block takes registers, so tiles are small
        ("e4m3-block", 128, 20480, 2880, None),  # the last block of a row is half one, so groups have 64 columns
        ("int4", 64, 2560, 10240, (64, 64, 0, 6)),  # E4B, down
        ("int4", 160, 2560, 10240, (64, 64, 0, 3)),
        ("int4", 864, 2560, 10240, None),
    ],
)
def test_tiles_of_many_rows_over_packed_weights(
    form: str, num_rows: int, n: int, k: int, want: tuple[int, int, int, int] | None, hopper: None
):
    weight = empty_weight(form, n, k)
    launch = choose_packed_rows(num_rows, weight, DEVICE)
    assert want == (launch and (*launch.tiles[:2], launch.tiles.tail_m, launch.split_k.splits))
    assert launch is None or launch.split_k.split_len % launch.tiles.block_k == 0


@pytest.mark.parametrize(
    ("num_rows", "programs"),
    [  # gate and up of Gemma 4 E4B, 320 tiles: two tall ones for each of 132 multiprocessors, the others short
        (250, (264, 224)),
        (256, (264, 224)),
        (320, (320, 320)),  # rows 256 to 320 of all tiles
        (512, (528, 224)),
        (128, (320, 0)),
    ],
)
def test_short_tiles_cover_the_rows_that_tall_tiles_leave(num_rows: int, programs: tuple[int, int], hopper: None):
    launch = choose_packed_rows(num_rows, empty_weight("e4m3-row", 20480, 2560), DEVICE)
    assert launch is not None
    row_tiles, num_tall, short = launch.count_programs(num_rows, 20480)
    assert (row_tiles * num_tall, short) == programs


@pytest.mark.parametrize("weight", TIMES)
def test_no_launch_that_was_timed_is_much_faster(weight: str, hopper: None):
    """With the chosen launch a layer takes at most 2 % longer than with the fastest one, and a product that was timed
    alone 4 %; `SLOWER` are known."""
    form, n, k = weight.split()
    for key, line in TIMES[weight].items():
        names, microseconds = line.split()[::2], map(float, line.split()[1::2])
        times = dict(zip(names, microseconds, strict=True))
        num_rows = int(key.removesuffix("-layer"))
        launch = choose_packed_rows(num_rows, empty_weight(form, int(n), int(k)), DEVICE, gated=int(n) in GATED)
        assert launch is not None
        tiles, short = launch.tiles, launch.short_tiles
        name = f"{tiles.block_n}x{tiles.block_m}" + f"+{tiles.tail_m}" * (tiles.tail_m > 0)
        name += f"x{tiles.block_k}s{tiles.num_stages}" + (f"+{launch.num_tall}:{short.block_m}" if short else "")
        name += f"/{launch.parts}" * (launch.parts > 1)
        most = SLOWER.get((weight, key), 1.02 if key.endswith("-layer") else 1.04)
        assert times.get(name, inf) <= most * min(times.values()), f"{key=} {name=}"


@pytest.mark.parametrize(
    ("code", "group", "fast"), [("int4", 16, False), ("int4", 32, True), ("e2m1", 16, False), ("e4m3", 16, True)]
)
def test_numbers_of_a_word_have_one_scale_in_assembly(
    code: str, group: int, fast: bool, monkeypatch: pytest.MonkeyPatch
):
    """A word of 4 bits has numbers of 32 columns: groups of 16 are unpacked by plain operations."""
    monkeypatch.setattr(unpack_asm, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    scales = torch.empty(0, dtype=torch.bfloat16)
    weight = SimpleNamespace(code=code, group=group, device=torch.device("cuda"), scales=scales)
    assert unpack_asm.is_fast(weight, torch.bfloat16) == fast  # type: ignore[arg-type]


def test_tiles_of_more_rows_than_x_has_are_not_chosen(hopper: None):
    """They read past its end, which is slower."""
    for form in ("int4", "e4m3-row"):
        for n, k in ((20480, 2560), (2560, 10240), (28672, 4096), (6144, 4096), (256, 2560)):
            for num_rows, most in ((33, 64), (64, 64), (96, 96)):
                launch = choose_packed_rows(num_rows, empty_weight(form, n, k), DEVICE)
                assert launch is not None and launch.tiles.block_m <= most, f"{form=} {n=} {num_rows=}"


@pytest.mark.parametrize(
    ("form", "num_rows", "n", "k", "registers"),
    [  # gate and up has one range of K; other weights have parts
        ("e4m3-row", 8, 20480, 2560, 72),  # of E4B: 320 programs run at once, and leave room for the next kernel's
        ("e4m3-row", 8, 28672, 4096, 128),  # of Llama 8B: 448 run in turn
        ("e4m3-row", 32, 20480, 2560, 128),
        ("int4-g128", 32, 4096, 14336, 144),
        ("int4", 32, 4096, 14336, 168),
        ("int4-g128", 8, 4096, 14336, None),
    ],
)
def test_register_limits_of_few_rows(
    form: str, num_rows: int, n: int, k: int, registers: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Set where assembly unpacks: plain operations would spill."""
    weight, known = empty_weight(form, n, k), True
    monkeypatch.setattr(packed_launch, "is_fast", lambda weight, dtype: known)
    split_k = SplitK(1, k) if n in GATED else split_k_of(weight)
    assert choose_packed_tiles(num_rows, weight, split_k, torch.bfloat16).registers == registers
    known = False
    assert choose_packed_tiles(num_rows, weight, split_k, torch.bfloat16).registers in (None, 128, 168)


def test_a_second_sum_has_no_register_limit(monkeypatch: pytest.MonkeyPatch):
    limits = []

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, **options: limits.append(options["maxnreg"])

    monkeypatch.setattr(packed_gemm_module, "packed_gemm_kernel", Kernel())
    x, weight = torch.randn(64, 256, device=DEVICE).half(), random_weight("int4", 64, 256, dtype=torch.float16)
    for summed in (False, True):
        tiles = Tiles(64, 64, 128, 4, 3, 64, registers=96)
        packed_gemm(x, weight, None, None, PackedLaunch(tiles, SplitK(2, 128), summed=summed))
    assert limits == [96, None]


def test_in_order_ranges_are_those_of_the_weight(hopper: None):
    """Programs of their own while parts are few, then added up by one; of 8 bits `linear` does that."""
    for form, num_rows, parts in (("int4", 64, 8), ("int4", 2048, 1), ("e4m3-row", 64, 8), ("e4m3-row", 2048, None)):
        weight = empty_weight(form, 2560, 10240)
        launch = choose_packed_rows(num_rows, weight, DEVICE, split_k=split_k_of(weight))
        assert (
            launch is None if parts is None else launch is not None and launch[1:3] == (split_k_of(weight), parts == 1)
        )


def test_tiles_that_do_not_fit_are_not_chosen(monkeypatch: pytest.MonkeyPatch):
    """A device of compute capability 12 has 99 KiB for a program; of 8.x, nothing describes x there."""
    weight = empty_weight("int4", 20480, 2560)
    for shared, most in ((99 << 10, 64), (16 << 10, None)):
        monkeypatch.setattr(packed_launch, "device_limits", lambda device, shared=shared: (132, shared))
        launch = choose_packed_rows(512, weight, DEVICE)
        assert launch is None if most is None else launch is not None and launch.tiles.block_m <= most


@pytest.mark.parametrize("in_order", [False, True], ids=["any order", "in order"])
def test_which_kernel_multiplies_many_rows_over_packed_weights(
    in_order: bool, watched: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
):
    """From 33 rows on not the tiles of decoding: they would decode a weight once for each of a few rows."""
    launched = watched(linear_module, "packed_gemm", lambda given: len(given[0]))
    monkeypatch.setattr(packed_launch, "LIBRARY_ROWS", 64)
    multiply, gated = (linear, gated_linear) if in_order else (FAST(linear), FAST(gated_linear))
    for dtype, num_rows, count in (
        (torch.float16, 32, 0),
        (torch.float16, 33, 2),
        (torch.float16, 65, 2 if in_order else 0),
        (torch.float32, 33, 0),  # not what a descriptor describes
    ):
        launched.clear()
        weight = random_weight("int4", 64, 640, dtype=dtype)
        x = torch.randn(num_rows, 640, device=DEVICE).to(dtype)
        close(finish(multiply(x, weight)), reference_finish(reference_linear(x, weight)))
        close(gated(x, weight, "silu"), reference_gated_linear(x, weight, "silu"))
        assert len(launched) == count, f"{dtype=} {num_rows=}"


def test_norms_between_8_bit_weights_trigger_late_for_few_rows_too():
    for form, late in (("e4m3-row", True), ("int4", False)):
        parts: Any = SimpleNamespace(qkv=empty_weight(form, 64, 128))
        assert LayerParts.norms_late.fget(parts) == late  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", CODES)
def test_dequantised_on_the_device(form: str):
    for dtype, k in zip(DTYPES, (384, 448, 448), strict=False):
        weight = random_weight(form, 70, k, dtype=dtype)
        got, want = dequantise(weight, dtype), dequantised(weight, dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.cpu
@pytest.mark.parametrize("form", ["e4m3-row", "e4m3-block", "int4"])
def test_gated_projection_over_a_packed_weight(form: str, watched: Callable[..., list[Any]]):
    """Up to 256 rows, programs hold rows of the weight; not of a weight with several scales for a sum."""
    heights = watched(per_layer_embedding, "gemm_small", lambda given: given[6].block_m)
    weight = random_weight(form, 70, 256)
    for num_rows in (16, 17, 256, 257):
        inputs = torch.randn(num_rows, 256, device=DEVICE).half()
        product = Product(torch.randn(2, num_rows, 256, device=DEVICE), None, torch.float16)
        got = finish(gated_projection(product, inputs, weight, "gelu_tanh"))
        close(got, reference_finish(reference_gated_projection(product, inputs, weight, "gelu_tanh")))
    assert heights == ([] if form == "e4m3-block" else [16, 32, 32])


@pytest.mark.parametrize("form", ["int4", "int4-zeros", "e2m1"])
def test_columns_after_the_last_tile_of_an_expert(form: str):
    """320 are a tile of 256 and one of 64; 352 are two of 256, the second masked, and so are the last rows of its
    bias."""
    chosen = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32, device=DEVICE)
    routing = Routing(chosen, torch.rand(2, 2, device=DEVICE))
    for hidden in (320, 352):
        x = torch.randn(2, hidden, device=DEVICE).half()
        up, down = (random_weight(form, 3, *shape, dtype=x.dtype) for shape in ((128, hidden), (hidden, 64)))
        experts = Experts(up, down, "silu", *(torch.randn(3, n, device=DEVICE).half() for n in (128, hidden)))
        close(
            finish(apply_experts(x, routing, experts)), reference_finish(reference_apply_experts(x, routing, experts))
        )


@usual_cases("None-int4", "e2m1-e4m3-block", "e2m1-None", "e4m3-row-None")
@pytest.mark.parametrize("form", [None, "int4", "e4m3-block"], ids=str)
@pytest.mark.parametrize("of_experts", [None, "e2m1", "e4m3-row"], ids=str)
def test_an_mlp_next_to_experts_in_any_two_forms(form: str | None, of_experts: str | None):
    """Experts and MLP run by themselves when the tiles of one do not fit the ranges or groups of the other."""
    hidden, width, num_experts, dtype = 128, 1152, 3, torch.float16

    def weight(kind: str | None, *shape: int) -> torch.Tensor | PackedWeight:
        if kind is not None:
            return random_weight(kind, *shape, dtype=dtype)
        return (torch.randn(shape, device=DEVICE) * shape[-1] ** -0.5).to(dtype)

    mlp = Mlp(weight(form, 2 * width, hidden), "silu", weight(form, hidden, width))
    up, down = (weight(of_experts, num_experts, *shape) for shape in ((2 * 64, hidden), (hidden, 64)))
    router = Router(weight(None, num_experts, hidden), 2, expert_scale=torch.ones(num_experts, device=DEVICE).to(dtype))
    inputs = BranchInputs(*torch.randn(4, 3, hidden, device=DEVICE).to(dtype))
    found = mlp_and_experts(inputs, mlp, router, Experts(up, down, "silu"))
    for got, want in zip(found, reference_mlp_and_experts(inputs, mlp, router, Experts(up, down, "silu")), strict=True):
        close(finish(got), reference_finish(want))


def test_the_cut_of_a_packed_weight_is_its_shape_alone():
    """More ranges than in 16 bits: unpacking takes time that other programs hide."""
    shapes = {(256, 2560): 10}  # few rows: ranges of one tile, which a program holds
    shapes |= {(2560, 10240): 8, (2560, 2048): 4, (3072, 2560): 5, (20480, 2560): 2, (43008, 5376): 1, (8192, 28672): 3}
    shapes |= {(5376, 21504): 7, (10240, 8192): 4, (70, 128): 1}
    for (n, k), splits in shapes.items():
        weight = PackedWeight("int4", torch.empty(n, k // 8, dtype=torch.int32), torch.empty(k // 32, n), None, 32)
        split_k = split_k_of(weight)
        assert split_k.splits == splits and split_k.split_len % 256 == 0, f"{n=} {k=} {split_k=}"
    assert split_k == SplitK(1, 256)
    assert split_k_of(empty_weight("e4m3-row", 256, 2560)) == SplitK(5, 512)
    # tiles of more than a block have two scales
    assert split_k_of(empty_weight("e4m3-block", 256, 2560)) == SplitK(10, 256)


@pytest.mark.cpu
@pytest.mark.parametrize("multiply", [linear, FAST(linear)], ids=["in order", "any order"])
def test_programs_hold_ranges_of_packed_weights(multiply: Callable[..., Product], watched: Callable[..., list[Any]]):
    """A range of 512 columns up to 32 rows, and to 256 of a low FP8 weight; not over blocks of scales, whose tiles have
    one each."""
    columns = watched(linear_module, "gemm_small", lambda given: given[6].block_k)
    x = torch.randn(257, 2048, device=DEVICE).half()
    for form, height, num_rows, want in (
        ("e4m3-row", 70, 1, [512]),
        ("e4m3-row", 70, 256, [512]),
        ("e4m3-row", 70, 257, []),
        ("e4m3-row", 576, 32, [512]),
        ("e4m3-row", 576, 33, []),
        ("e4m3-block", 70, 32, [128]),
        ("e4m3-block", 70, 33, []),
        ("int4", 70, 32, [256]),
        ("int4", 576, 17, [512]),
        ("int4", 576, 33, []),
        ("e2m1", 576, 1, [512]),
    ):
        columns.clear()
        weight = random_weight(form, height, x.shape[1], dtype=x.dtype)
        product = multiply(x[:num_rows], weight)
        close(finish(product), reference_finish(reference_linear(x[:num_rows], weight)))
        assert columns == want, f"{form=} {height=} {num_rows=}"
