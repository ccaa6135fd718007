"""Products over packed weights on a GPU, bits and times: `python tools/bench_packed.py`.

bits       every code, odd sizes: a weight dequantised on the device is the host's; of 4 bits, a product has the bits
           of the 16-bit kernel on the dequantised weight; a row has the same bits among 1 to 2,048, over and over
times      microseconds of 1, 5 and 16 rows next to the 16-bit kernel, with a cold L2 (250 MB of copies of the weight
           in turn) in a captured graph
mixtures   the same of experts, a few assignments
rows       of 48 to 2,048 rows in any order, with the norm or the gate that reads a product, next to 16 bits
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
from result_table import ResultTable, Row

from specdec.layers.gemm_small import gemm_small
from specdec.layers.linear import gated_linear, linear, vendor_gated_linear, vendor_linear
from specdec.layers.moe.experts import Experts, apply_experts
from specdec.layers.moe.routing import Routing
from specdec.layers.norm import Gain, norm
from specdec.layers.packed.dequantise import dequantise
from specdec.layers.packed.packed_weight import BITS, PackedWeight, dequantised
from specdec.layers.product import Tiles, cut_of, finish

DTYPE = torch.float32 if ON_CPU else torch.bfloat16
DTYPES = (DTYPE,) if ON_CPU else (torch.bfloat16, torch.float16)
FORMS = ("int4-g32", "int4-zeros", "int4-g128", "e2m1", "e4m3-row", "e4m3-block")
COLD_BYTES = 250e6
SHAPES = ((43008, 5376), (20480, 2560), (2560, 10240), (3072, 2560), (2560, 2048), (5376, 21504), (10240, 8192))
MIXTURES = ((32, 2880, 2880, 4, 2), (128, 2816, 704, 8, 1))  # experts, hidden, width, top_k, rows
ROWS = (1, 5, 16)
ROWS_AMONG = (1, 2, 5, 8, 16, 17, 32, 33, 64, 65, 100, 128, 160, 192, 256, 500, 1024)
REPEATS = 8
LOADED_SHAPES: dict[str, tuple[int, int, str | None]] = {  # [N, K], and what gates it
    "E4B gate and up": (20480, 2560, "gelu_tanh"),
    "E4B down": (2560, 10240, None),
    "E4B q, k, v": (3072, 2560, None),
    "E4B o": (2560, 2048, None),
    "Llama 8B gate and up": (28672, 4096, "silu"),
    "Llama 8B down": (4096, 14336, None),
    "Llama 8B q, k, v": (6144, 4096, None),
    "Llama 8B o": (4096, 4096, None),
}
LOADED_ROWS = (48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 2048)


def random_weight(form: str, *shape: int, dtype: torch.dtype = DTYPE) -> PackedWeight:
    """[.., N, K]"""
    code, _, kind = form.partition("-")
    *leading, n, k = shape
    words = torch.randint(-(2**31), 2**31 - 1, (*leading, n, k * BITS[code] // 32), dtype=torch.int32, device=DEVICE)
    if code == "e4m3":
        words &= ~0x44004400  # no highest bit of an exponent, so no NaN
    group = {"row": k, "block": 128, "g128": 128}.get(kind, 32)
    size = {"int4": 4.6, "e2m1": 3.0, "e4m3": 16.0}[code]
    scales = (torch.rand(*leading, k // group, n, device=DEVICE) + 0.5) * k**-0.5 / size
    scales = torch.exp2(scales.log2().round()) if code == "e2m1" else scales
    scales = scales.to(torch.float32 if code == "e4m3" else dtype)
    zeros = torch.randint(0, 17, scales.shape, device=DEVICE).to(scales.dtype) if kind == "zeros" else None
    return PackedWeight(code, words, scales, zeros, group).with_repeated_scales()


def bits(forms: Sequence[str]) -> Iterator[Row]:
    for form, dtype in product(forms, DTYPES):
        weight = random_weight(form, 200, 1152, dtype=dtype)
        same = torch.equal(dequantise(weight, dtype), dequantised(weight, dtype))
        yield Row(f"{form} {dtype}: dequantised on the device", "equal" if same else "differs", ok=same)
        for n, k in ((200, 1152), (2560, 2560), (64, 128)):
            yield from _bits_of_a_product(f"{form} {dtype} {n}x{k}", random_weight(form, n, k, dtype=dtype), dtype)
        yield _bits_of_experts(form, dtype)


def _bits_of_a_product(name: str, weight: PackedWeight, dtype: torch.dtype) -> Iterator[Row]:
    n, k = weight.shape
    whole = dequantised(weight, dtype)
    x = torch.randn(2048, k, device=DEVICE).to(dtype)
    if BITS[weight.code] == 4:
        cut = cut_of(weight)
        parts = torch.empty((cut.splits, 5, n), dtype=torch.float32, device=DEVICE)
        tiles = Tiles(64, 16, 32 if ON_CPU else 64, 4, 3, 64)
        gemm_small(x[:5], whole, None, parts, None, cut, tiles, split=True)
        ours = linear(x[:5], weight, apart=True).parts
        same = torch.equal(parts.to(ours.dtype), ours)
        yield Row(f"{name}: parts of the 16-bit kernel", "equal" if same else "differ", ok=same)
    many = finish(linear(x, weight))
    error = ((many.double() - x.double() @ whole.double().T).norm() / many.double().norm()).item()
    wrong = [m for m in ROWS_AMONG if not torch.equal(finish(linear(x[:m], weight)), many[:m])]
    again = all(torch.equal(finish(linear(x, weight)), many) for _ in range(REPEATS))
    alone = torch.equal(finish(linear(x[7:8], weight))[0], many[7])
    found = f"error {error:.1e}, other bits among {wrong}, again {again}, alone {alone}"
    yield Row(f"{name}: a row among 1 to 2,048", found, ok=again and alone and not wrong and error < 5e-3)
    many = gated_linear(x, weight, "silu")
    wrong = [m for m in ROWS_AMONG if not torch.equal(gated_linear(x[:m], weight, "silu"), many[:m])]
    yield Row(f"{name}: gated", f"other bits among {wrong}", ok=not wrong)


def _bits_of_experts(form: str, dtype: torch.dtype) -> Row:
    experts, hidden, width, top_k, rows = 8, 256, 128, 2, 300
    up, down = (random_weight(form, experts, *shape, dtype=dtype) for shape in ((2 * width, hidden), (hidden, width)))
    mixture = Experts(up, down, "silu")
    x = torch.randn(rows, hidden, device=DEVICE).to(dtype)
    routing = random_routing(rows, experts, top_k)
    many = finish(apply_experts(x, routing, mixture))
    among = (1, 2, 8, 16, 33, 64, 65, 128)
    alike = [finish(apply_experts(x[:m], Routing(*(part[:m] for part in routing)), mixture)) for m in among]
    wrong = [m for m, some in zip(among, alike, strict=True) if not torch.equal(some, many[:m])]
    return Row(f"{form} {dtype}: experts", f"other bits among {wrong}", ok=not wrong)


def random_routing(rows: int, experts: int, top_k: int) -> Routing:
    if rows * top_k <= experts:  # each another expert
        chosen = torch.randperm(experts, device=DEVICE)[: rows * top_k].view(rows, top_k).int()
    else:
        chosen = torch.stack([torch.randperm(experts, device=DEVICE)[:top_k] for _ in range(rows)]).int()
    return Routing(chosen, torch.rand(rows, top_k, device=DEVICE))


def microseconds(call: Callable[[Any], object], weights: Sequence[Any], times: int = 12) -> float:
    """Times one call, each with the next of the weights: the best of four replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(weights[0])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(times):
                call(weights[i % len(weights)])
        graph.replay()
        best = float("inf")
        for _ in range(4):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            stream.synchronize()
            best = min(best, begin.elapsed_time(end) / times)
    return best * 1e3


def times() -> Iterator[Row]:
    for n, k in SHAPES:
        x = torch.randn(max(ROWS), k, device=DEVICE).to(DTYPE)
        base: dict[str, float] = {}
        for form in ("bf16", *FORMS):
            if form in ("e2m1", "int4-zeros") and (n, k) != SHAPES[1]:
                continue
            count = max(2, int(COLD_BYTES / (n * k * (2 if form == "bf16" else 0.5))))
            weights: list[Any] = [
                torch.randn(n, k, device=DEVICE).to(DTYPE) if form == "bf16" else random_weight(form, n, k)
                for _ in range(count)
            ]
            us = {m: microseconds(partial(linear, x[:m]), weights) for m in ROWS}
            gate = microseconds(partial(_gated, x[:5]), weights)
            base = base or {"linear": us[5], "gated": gate}
            ratio = f"{base['linear'] / us[5]:.2f}x, gated {base['gated'] / gate:.2f}x"
            found = f"{weights[0].nbytes / us[5] / 1e6:.2f} TB/s, {ratio}, 5 rows {us[5] / us[1]:.2f} of one"
            shown = " ".join(f"{one:.1f}" for one in us.values())
            yield Row(f"{n}x{k} {form}", found, f"{shown} gated {gate:.1f} us")
            del weights


def _gated(x: torch.Tensor, weight: Any) -> torch.Tensor:
    return gated_linear(x, weight, "silu")


def mixtures() -> Iterator[Row]:
    for experts, hidden, width, top_k, rows in MIXTURES:
        x = torch.randn(rows, hidden, device=DEVICE).to(DTYPE)
        routing, base = random_routing(rows, experts, top_k), 0.0
        shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
        for form in ("bf16", "e2m1", "int4-g32", "e4m3-row"):
            made = [
                Experts(
                    *(_weights_of_experts(form, shape) for shape in shapes),
                    "swiglu_clamped",
                    None,
                    None,
                    True,
                    1.7,
                    7.0,
                )
                for _ in range(2)
            ]
            us = microseconds(partial(apply_experts, x, routing), made, 8)
            base = base or us
            name = f"{experts} experts {hidden}x{width}, {rows * top_k} assignments, {form}"
            yield Row(name, f"{base / us:.2f}x", f"{us:.1f} us")


def rows(forms: Sequence[str]) -> Iterator[Row]:
    """Microseconds, and how many times those of 16 bits."""
    for name, (n, k, activation) in LOADED_SHAPES.items():
        base: dict[int, float] = {}
        for form in ("bf16", *forms):
            count = max(4, int(COLD_BYTES / (n * k * (2 if form == "bf16" else BITS[form.partition("-")[0]] / 8))))
            weights = [_any_weight(form, n, k) for _ in range(count)]
            us = {m: _loaded_microseconds(m, weights, activation) for m in LOADED_ROWS}
            base = base or us
            megabytes = weights[0].nbytes / 1e6
            shown = " ".join(f"{m}: {one:.1f} ({one / base[m]:.2f})" for m, one in us.items())
            yield Row(f"{name} {n}x{k} {form}, {megabytes:.0f} MB", shown)
            del weights


def _any_weight(form: str, n: int, k: int) -> Any:
    return (torch.randn(n, k, device=DEVICE) * k**-0.5).to(DTYPE) if form == "bf16" else random_weight(form, n, k)


def _loaded_microseconds(num_rows: int, weights: Sequence[Any], activation: str | None) -> float:
    n, k = weights[0].shape
    x = torch.randn(num_rows, k, device=DEVICE).to(DTYPE)
    gain = Gain(torch.ones(n, device=DEVICE).to(DTYPE), 1e-6, False)

    def call(weight: Any) -> object:
        if activation is not None:
            return vendor_gated_linear(x, weight, activation)
        return norm(vendor_linear(x, weight), pre=gain)

    return microseconds(call, weights, max(12, len(weights)))


def _weights_of_experts(form: str, shape: tuple[int, int, int]) -> Any:
    if form != "bf16":
        return random_weight(form, *shape)
    return (torch.randn(shape, device=DEVICE) * shape[-1] ** -0.5).to(DTYPE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    kinds = {"bits": bits, "times": times, "mixtures": mixtures, "rows": rows}
    parser.add_argument("--only", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="of `bits` and `rows`")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    require_device()
    table = ResultTable(f"packed products, {machine()}")
    for name in arguments.only:
        table.add(kinds[name](arguments.forms) if name in ("bits", "rows") else kinds[name]())  # type: ignore[operator]
    return table.finish(arguments.out)


if __name__ == "__main__":
    sys.exit(main())
