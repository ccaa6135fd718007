"""Products of rows with 16-bit and packed weights: bits in any company, times, and other tiles.

bits    every format, odd sizes: a weight dequantised on the device is the host's; of 4 bits, a product has the bits
        of the 16-bit kernel on the dequantised weight; a row has the same bits among 1 to 2,048, over and over
times   rows by rows, with a cold L2, next to the bytes of the weight, to the vendor's product and to 16 bits
loaded  many rows in any order, with the norm or the gate that reads the product, next to 16 bits
tiles   of many rows, in other tiles, which must have the same bits
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bench.device import DEVICE, DTYPE, ON_CPU  # isort: skip - before triton
import torch
import torch.nn.functional as F

from bench.clock import bandwidth_row, best_tiles, copies_of, floor_us, microseconds
from bench.report import Row
from bench.verify import bits_row, company_bits, distance
from specdec.gpu.operations import FAST
from specdec.layers.gemm.gemm_small import gemm_small
from specdec.layers.gemm.linear import (
    gated_linear,
    linear,
    reference_gated_linear,
    tiles_of,
)
from specdec.layers.gemm.product import Tiles, choose_split_k, finish, split_k_of
from specdec.layers.norm import Norm, norm
from specdec.layers.packed.packed_gemm import dequantise
from specdec.layers.packed.packed_weight import BITS, PackedWeight, dequantised
from specdec.measurement.random_weights import RandomPacking, empty_packed, fill_packed

SHAPES: dict[str, tuple[int, int, str | None]] = {  # [N, K], and what gates it
    "E4B gate and up": (20480, 2560, "gelu_tanh"),
    "E4B down": (2560, 10240, None),
    "E4B q, k, v": (3072, 2560, None),
    "E4B q, k, v, full": (6144, 2560, None),
    "E4B q": (2048, 2560, None),
    "E4B q, full": (4096, 2560, None),
    "E4B o": (2560, 2048, None),
    "E4B o, full": (2560, 4096, None),
    "E4B per-layer gate": (256, 2560, None),
    "E4B per-layer context": (10752, 2560, None),
    "E4B head": (262144, 2560, None),
    "31B gate and up": (43008, 5376, "gelu_tanh"),
    "31B down": (5376, 21504, None),
    "70B q, k, v": (10240, 8192, None),
    "Llama 8B gate and up": (28672, 4096, "silu"),
    "Llama 8B down": (4096, 14336, None),
    "Llama 8B q, k, v": (6144, 4096, None),
    "Llama 8B o": (4096, 4096, None),
}
ODD = ((200, 1152), (2560, 2560), (64, 128))
AMONG = (1, 2, 5, 8, 16, 17, 32, 33, 40, 64, 65, 100, 128, 160, 192, 256, 500, 513, 1024)
TILES = (
    Tiles(128, 64, 32 if ON_CPU else 64, 8, 4, 128),  # as deep as those of float32, see `_parts_row`
    *(Tiles(128, 128, 64, 8, stages, 128, tail_m=32) for stages in (3, 4)),
    Tiles(64, 128, 64, 4, 3, 64, tail_m=32),
    *(Tiles(128, n, 64, 8, stages, 128) for n in (128, 256) for stages in (3, 4)),
    *(Tiles(64, n, 64, 4, 4, 64) for n in (128, 256)),
)


def random_weight(form: str, *shape: int, dtype: torch.dtype = DTYPE) -> Any:
    """[.., N, K]; "bf16": as it is, in the dtype of models."""
    code, _, kind = form.partition("-")
    if code == "bf16":
        return (torch.randn(shape, device=DEVICE) * shape[-1] ** -0.5).to(dtype)
    group = {"row": None, "block": 128, "g128": 128}.get(kind, 32)
    weight = fill_packed(empty_packed(RandomPacking(form, code, group), DEVICE, torch.Size(shape)))
    scales = weight.scales.to(torch.float32 if code == "e4m3" else dtype)
    zeros = torch.randint(0, 17, scales.shape, device=DEVICE).to(scales.dtype) if kind == "zeros" else None
    return replace(weight, scales=scales, zeros=zeros).with_repeated_scales()


def compute(x: torch.Tensor, weight: Any, activation: str | None, tiles: Tiles | None = None) -> torch.Tensor:
    if activation is not None:
        return gated_linear(x, weight, activation, tiles=tiles)
    return finish(linear(x, weight, tiles=tiles))


def bits_rows(formats: Sequence[str], shapes: Sequence[str], most: int) -> Iterator[Row]:
    """Sixteen bits at published shapes, packed weights at odd ones."""
    for name in shapes if "bf16" in formats else ():
        n, k, activation = SHAPES[name]
        n, k = (128, 256) if ON_CPU else (min(n, 20480), k)
        yield from _company(f"{name} {n}x{k}", random_weight("bf16", n, k), DTYPE, activation, most)
    for form in (form for form in formats if form != "bf16"):
        for dtype in (DTYPE,) if ON_CPU else (torch.bfloat16, torch.float16):
            for n, k in ODD[: 1 if ON_CPU else None]:
                name, weight = f"{form} {dtype} {n}x{k}", random_weight(form, n, k, dtype=dtype)
                same = torch.equal(dequantise(weight, dtype), dequantised(weight, dtype))
                yield Row(f"{name}: dequantised on the device", "equal" if same else "differs", ok=same)
                if BITS[weight.code] == 4:
                    yield _parts_row(name, weight, dtype)
                for activation in (None, "silu"):
                    yield from _company(name, weight, dtype, activation, most)


def _parts_row(name: str, weight: PackedWeight, dtype: torch.dtype) -> Row:
    """The parts of a product next to those of the 16-bit kernel on the dequantised weight."""
    n, k = weight.shape
    x, split_k = torch.randn(5, k, device=DEVICE).to(dtype), split_k_of(weight)
    parts = torch.empty((split_k.splits, 5, n), dtype=torch.float32, device=DEVICE)
    depth = tiles_of(x, weight, split_k).block_k if ON_CPU else 64  # the interpreter adds up each tile by itself
    tiles = Tiles(64, 16, depth, 4, 3, 64)
    gemm_small(x, dequantised(weight, dtype), None, parts, None, split_k, tiles, split=True)
    ours = linear(x, weight, keep_parts=True).parts
    same = torch.equal(parts.to(ours.dtype), ours)
    return Row(f"{name}: parts of the 16-bit kernel", "equal" if same else "differ", ok=same)


def _company(name: str, weight: Any, dtype: torch.dtype, activation: str | None, most: int) -> Iterator[Row]:
    packed = isinstance(weight, PackedWeight)
    whole = (dequantised(weight, dtype) if packed else weight).double()
    x = torch.randn(most, weight.shape[1], device=DEVICE).to(dtype)
    want = F.linear(x.double(), whole) if activation is None else reference_gated_linear(x.double(), whole, activation)
    title = f"{name}{', gated' if activation else ''}"
    error = distance(compute(x, weight, activation), want)
    yield Row(f"{title}: against float64", f"{error:.1e}", ok=error < 5e-3)
    comparisons = company_bits(lambda some: compute(x[some], weight, activation), most, AMONG)
    yield bits_row(f"{title}: a row among 1 to {most}", comparisons)


def times_rows(formats: Sequence[str], shapes: Sequence[str], rows: Sequence[int]) -> Iterator[Row]:
    yield bandwidth_row()
    for name in shapes:
        n, k, activation = SHAPES[name]
        base: dict[int, float] = {}
        for form in formats:
            weights = _cold_weights(form, n, k)
            num_bytes = weights[0].nbytes
            us: dict[int, float] = {}
            for count in rows:
                x = torch.randn(count, k, device=DEVICE).to(DTYPE)
                us[count] = microseconds(partial(_launched, x, activation=activation), weights)
            base = base or us
            figures: dict[str, object] = {
                "format": form,
                "cut": tuple(choose_split_k(n, k)),
                "floor": f"{floor_us(num_bytes):.1f}",
            }
            figures |= {f"{count} rows": f"{one:.1f} ({base[count] / one:.2f}x)" for count, one in us.items()}
            vendor = {}
            if form == "bf16":
                for count in rows:
                    x = torch.randn(count, k, device=DEVICE).to(DTYPE)
                    vendor[count] = microseconds(partial(F.linear, x), weights)
            figures["vendor"] = ", ".join(f"{one:.1f}" for one in vendor.values())
            yield Row(f"{name} {n}x{k}", figures=figures)
            del weights


def _launched(x: torch.Tensor, weight: Any, activation: str | None) -> object:
    """Without the sum of parts, which the launch after it does."""
    return linear(x, weight) if activation is None else gated_linear(x, weight, activation)


def _cold_weights(form: str, n: int, k: int) -> list[Any]:
    first = random_weight(form, n, k)
    return [first, *(random_weight(form, n, k) for _ in range(copies_of(first.nbytes, 24) - 1))]


def loaded_rows(formats: Sequence[str], shapes: Sequence[str], many: Sequence[int]) -> Iterator[Row]:
    """Microseconds, and how many times those of 16 bits."""
    for name in shapes:
        n, k, activation = SHAPES[name]
        gain = Norm(torch.ones(n, device=DEVICE).to(DTYPE), 1e-6, False)

        def call(x: torch.Tensor, weight: Any, activation: Any = activation, gain: Norm = gain) -> object:
            if activation is not None:
                return FAST(gated_linear)(x, weight, activation)
            return norm(FAST(linear)(x, weight), pre=gain)

        base: dict[int, float] = {}
        for form in formats:
            weights = _cold_weights(form, n, k)
            us = {m: microseconds(partial(call, torch.randn(m, k, device=DEVICE).to(DTYPE)), weights) for m in many}
            base = base or us
            figures: dict[str, object] = {"format": form, "MB": f"{weights[0].nbytes / 1e6:.0f}"}
            yield Row(
                name, figures=figures | {f"{m} rows": f"{one:.1f} ({one / base[m]:.2f})" for m, one in us.items()}
            )
            del weights


def tiles_rows(shapes: Sequence[str], many: Sequence[int]) -> Iterator[Row]:
    """The chosen tiles, the vendor's product, and the best of others; all with the same bits."""
    for name in shapes:
        n, k, activation = SHAPES[name]
        n, k = (128, 256) if ON_CPU else (n, k)
        weight = random_weight("bf16", n, k)
        for count in many:
            x = torch.randn(count, k, device=DEVICE).to(DTYPE)

            def make(
                tiles: Tiles | None, x: Any = x, weight: Any = weight, a: Any = activation
            ) -> list[Callable[..., Any]]:
                return [partial(compute, x, weight, a, tiles)] * 4

            want = make(None)[0]()
            alone = compute(x[count // 2 : count // 2 + 1], weight, activation)
            found, equal = best_tiles(TILES, make, want)
            equal &= torch.equal(want[count // 2], alone[0])
            chosen, vendor = microseconds(make(None)[0]), microseconds(partial(F.linear, x, weight))
            note = f"chosen {chosen:.0f} us, vendor {vendor:.0f}; best: {found}"
            yield Row(f"{name}, {count} rows", "bits equal" if equal else "other bits", note, equal)
