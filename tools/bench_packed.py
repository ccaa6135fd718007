"""Products over packed weights on a GPU: bits, and microseconds beside the 16-bit kernel: `python tools/bench_packed.py`.

bits      every code, odd sizes: dequantised on the device as on the host; a product equal to the 16-bit kernel's on
          the dequantised weight in the same ranges (4 bits: to the bit), a row's bits the same among 1 to 2,048
times     a cold L2 (copies of the weight in turn, 250 MB of them), in a captured graph without dependent launches
--sweep   the same products in other tiles and cuts
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
from result_table import ResultTable, Row

from specdec.layers.linear import _launch, gated_linear, linear
from specdec.layers.moe.experts import Experts, apply_experts
from specdec.layers.moe.routing import Routing
from specdec.layers.packed.packed_tile import dequantise, weight_constants, weight_pointers
from specdec.layers.packed.packed_weight import BITS, PackedWeight, dequantised, numbers_of
from specdec.layers.product import Cut, Tiles, choose_tiles, cut_of, finish, tiles_of

DTYPE = torch.float32 if ON_CPU else torch.bfloat16
FORMS = ("int4-g32", "int4-zeros", "int4-g128", "e2m1", "e4m3-row", "e4m3-block")
COLD = 250e6
SHAPES = ((43008, 5376), (20480, 2560), (2560, 10240), (3072, 2560), (2560, 2048), (5376, 21504), (10240, 8192))
MOE = ((32, 2880, 2880, 4, 2), (128, 2816, 704, 8, 1))  # experts, hidden, width, top_k, tokens
ROWS = (1, 5, 16)


def random_weight(form: str, *shape: int, dtype: torch.dtype = DTYPE) -> PackedWeight:
    code, _, kind = form.partition("-")
    *leading, n, k = shape
    bits = BITS[code]
    words = torch.randint(-(2**31), 2**31 - 1, (*leading, n, k * bits // 32), dtype=torch.int32, device=DEVICE)
    if code == "e4m3":
        words &= 0x77777777  # positive, and no NaN
    group = {"row": k, "block": 128, "g128": 128}.get(kind, 32)
    size = {"int4": 4.6, "e2m1": 3.0, "e4m3": 16.0}[code]
    scales = (torch.rand(*leading, k // group, n, device=DEVICE) + 0.5) * k**-0.5 / size
    scales = torch.exp2(scales.log2().round()) if code == "e2m1" else scales
    scales = scales.to(torch.float32 if code == "e4m3" else dtype)
    zeros = torch.randint(0, 17, scales.shape, device=DEVICE).to(scales.dtype) if kind == "zeros" else None
    return PackedWeight(code, words, scales, zeros, group).with_repeated_scales()


def bits(forms: Sequence[str]) -> Iterator[Row]:
    dtypes = (DTYPE,) if ON_CPU else (torch.bfloat16, torch.float16)
    for form, dtype in product(forms, dtypes):
        weight = random_weight(form, 200, 1152, dtype=dtype)
        same = torch.equal(dequantise(weight, dtype), dequantised(weight, dtype))
        yield Row(f"{form} {dtype}: dequantised on the device", "equal" if same else "differs", ok=same)
        for n, k in (
            (200, 1152),
            (2560, 2560),
            (64, 32 if form[:4] in ("int4", "e2m1") and "g128" not in form else 128),
        ):
            weight = random_weight(form, n, k, dtype=dtype)
            whole = dequantised(weight, dtype)
            x = torch.randn(2048, k, device=DEVICE).to(dtype)
            many = finish(linear(x, weight))
            error = ((many.double() - x.double() @ whole.double().T).norm() / many.double().norm()).item()
            cut = cut_of(weight)
            if BITS[weight.code] == 4:
                parts = torch.empty((cut.splits, 5, n), dtype=torch.float32, device=DEVICE)
                tiles = Tiles(64, 16, 64 if dtype != torch.float32 else 32, 4, 3, 64)
                _launch(x[:5], whole, None, parts, None, cut, tiles, split=True)
                ours = linear(x[:5], weight, apart=True).parts
                same = torch.equal(parts, ours.float() if len(ours) == len(parts) else ours)
                if cut.splits == 1:
                    same = torch.equal(parts[0].to(dtype), ours[0].to(dtype))
                yield Row(f"{form} {dtype} {n}x{k}: parts of the 16-bit kernel", "equal" if same else "differ", ok=same)
            rows = {
                m: torch.equal(finish(linear(x[:m], weight)), many[:m])
                for m in (1, 2, 5, 8, 16, 17, 32, 33, 64, 65, 100, 128, 160, 192, 256, 500, 1024)
            }
            again = all(torch.equal(finish(linear(x, weight)), many) for _ in range(8))
            alone = again and torch.equal(finish(linear(x[7:8], weight))[0], many[7])
            good = alone and all(rows.values()) and error < 1e-2
            wrong = [m for m, equal in rows.items() if not equal]
            yield Row(
                f"{form} {dtype} {n}x{k}: a row among 1 to 2,048",
                f"error {error:.1e}, other bits at {wrong}, again {again}",
                ok=good,
            )
            if n % 2 == 0:
                many = gated_linear(x, weight, "silu")
                wrong = [m for m in rows if not torch.equal(gated_linear(x[:m], weight, "silu"), many[:m])]
                yield Row(f"{form} {dtype} {n}x{k}: gated", f"other bits at {wrong}", ok=not wrong)
        experts, hidden, width, top_k = 8, 256, 128, 2
        mixture = Experts(
            random_weight(form, experts, 2 * width, hidden, dtype=dtype),
            random_weight(form, experts, hidden, width, dtype=dtype),
            "silu",
        )
        x = torch.randn(300, hidden, device=DEVICE).to(dtype)
        chosen = torch.stack([torch.randperm(experts, device=DEVICE)[:top_k] for _ in range(300)]).int()
        routing = Routing(chosen, torch.rand(300, top_k, device=DEVICE))
        many = finish(apply_experts(x, routing, mixture))
        wrong = [
            m
            for m in (1, 2, 8, 16, 33, 64, 65, 128)
            if not torch.equal(finish(apply_experts(x[:m], Routing(*(r[:m] for r in routing)), mixture)), many[:m])
        ]
        yield Row(f"{form} {dtype}: experts", f"other bits at {wrong}", ok=not wrong)


def microseconds(call: Callable[[int], object], times: int = 12) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(times):
                call(i)
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


def copies(make: Callable[[], Any], nbytes: float) -> list[Any]:
    return [make() for _ in range(max(2, int(COLD / nbytes)))]


def times(shapes: tuple[tuple[int, int], ...]) -> Iterator[Row]:
    for n, k in shapes:
        x = torch.randn(16, k, device=DEVICE).to(DTYPE)
        plain = copies(lambda n=n, k=k: torch.randn(n, k, device=DEVICE).to(DTYPE), n * k * 2)
        base = {m: microseconds(lambda i, m=m: linear(x[:m], plain[i % len(plain)])) for m in ROWS}
        gate = {m: microseconds(lambda i, m=m: gated_linear(x[:m], plain[i % len(plain)], "silu")) for m in ROWS}
        yield Row(
            f"{n}x{k} bf16",
            f"{n * k * 2 / base[5] / 1e6:.2f} TB/s",
            f"{base[1]:.1f} {base[5]:.1f} {base[16]:.1f} gated {gate[5]:.1f} us",
        )
        del plain
        for form in FORMS:
            if form in ("e2m1", "int4-zeros") and (n, k) != (20480, 2560):
                continue
            weights = copies(lambda n=n, k=k, form=form: random_weight(form, n, k), n * k // 2)
            us = {m: microseconds(lambda i, m=m: linear(x[:m], weights[i % len(weights)])) for m in ROWS}
            gated = microseconds(lambda i: gated_linear(x[:5], weights[i % len(weights)], "silu"))
            ratio = f"{base[5] / us[5]:.2f}x, gated {gate[5] / gated:.2f}x"
            yield Row(
                f"{n}x{k} {form}",
                f"{weights[0].nbytes / us[5] / 1e6:.2f} TB/s, {ratio}, 5 rows {us[5] / us[1]:.2f} of one",
                f"{us[1]:.1f} {us[5]:.1f} {us[16]:.1f} gated {gated:.1f} us",
            )
            del weights


def mixtures() -> Iterator[Row]:
    for experts, hidden, width, top_k, tokens in MOE:
        x = torch.randn(tokens, hidden, device=DEVICE).to(DTYPE)
        chosen = torch.stack([torch.randperm(experts, device=DEVICE)[:top_k] for _ in range(tokens)]).int()
        routing = Routing(chosen, torch.rand(tokens, top_k, device=DEVICE))

        def mixture(form: str | None, experts: int = experts, hidden: int = hidden, width: int = width) -> Experts:
            shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
            up, down = (
                torch.randn(s, device=DEVICE).to(DTYPE) * s[-1] ** -0.5 if form is None else random_weight(form, *s)
                for s in shapes
            )
            return Experts(up, down, "swiglu_clamped", interleaved=True, alpha=1.7, limit=7.0)

        base = 0.0
        for form in (None, "e2m1", "int4-g32", "e4m3-row"):
            if form == "e4m3-row" and hidden % 16:
                continue
            made = [mixture(form) for _ in range(2)]
            us = microseconds(lambda i, made=made: apply_experts(x, routing, made[i % 2]), 8)
            base = base or us
            yield Row(
                f"{experts} experts {hidden}x{width}, {tokens * top_k} assignments, {form or 'bf16'}",
                f"{base / us:.2f}x",
                f"{us:.1f} us",
            )


def sweep() -> Iterator[Row]:
    """Tiles and cuts of 5 rows."""
    for n, k in SHAPES:
        x = torch.randn(5, k, device=DEVICE).to(DTYPE)
        for form in ("int4-g32", "e4m3-row", "e2m1"):
            if form == "e2m1" and n != 20480:
                continue
            weights = copies(lambda n=n, k=k, form=form: random_weight(form, n, k), n * k // 2)
            found = []
            for block_n, block_k, warps, stages in (
                (64, 256, 4, 2),
                (64, 256, 4, 3),
                (64, 256, 4, 4),
                (64, 128, 4, 3),
                (64, 128, 4, 4),
                (64, 128, 4, 5),
                (128, 256, 8, 3),
                (128, 256, 8, 2),
                (128, 128, 8, 4),
                (128, 256, 4, 3),
            ):
                for splits in (1, 2, 3, 4, 5, 8, 10, 14, 16):
                    length = -(-(-(-k // 256)) // splits) * 256
                    if -(-k // length) != splits or (splits > 1 and length < 512) or n * splits > 100_000:
                        continue
                    for rows in (block_n, *(() if splits > 1 else (block_n - 8, block_n - 16))):
                        out = torch.empty((splits, 5, n), dtype=torch.float32, device=DEVICE)
                        tiles = Tiles(block_n, 16, block_k, warps, stages, rows)
                        try:
                            us = microseconds(
                                lambda i: _launch(
                                    x,
                                    weights[i % len(weights)],
                                    None,
                                    out,
                                    None,
                                    Cut(splits, length),
                                    tiles,
                                    split=splits > 1,
                                )
                            )
                        except Exception as error:
                            yield Row(f"{n}x{k} {form} {tiles}", f"{type(error).__name__}", ok=False)
                            continue
                        found.append((us, splits, tiles))
            for us, splits, tiles in sorted(found, key=lambda f: f[0])[:6]:
                yield Row(f"{n}x{k} {form}", f"{splits} ranges, {tuple(tiles)}", f"{us:.1f} us")
            del weights


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    parser.add_argument(
        "--only", nargs="+", choices=["bits", "times", "mixtures", "sweep"], default=["bits", "times", "mixtures"]
    )
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="of `bits`")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    require_device()
    table = ResultTable(f"packed products, {machine()}")
    for name in arguments.only:
        table.add(
            {
                "bits": lambda: bits(arguments.forms),
                "times": lambda: times(SHAPES),
                "mixtures": mixtures,
                "sweep": sweep,
            }[name]()
        )
    return table.finish(arguments.out)


if __name__ == "__main__":
    sys.exit(main())
