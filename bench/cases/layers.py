"""The small kernels of fused layers at Gemma 4 E4B's shapes, against their references.

The whole decoder and its head are the verify stage of the case `rounds`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bench.device import DEVICE, DTYPE, ON_CPU  # isort: skip - before triton
import torch

from bench.kernel_calls import Call, Make, check_calls, time_calls
from bench.report import Row
from specdec.kvcache.layout import PrimaryLoc
from specdec.layers.gemm.linear import linear
from specdec.layers.norm import Norm, norm, reference_norm
from specdec.layers.per_layer_embedding import gated_projection, reference_gated_projection
from specdec.layers.rope_store import Destination, Heads, reference_rope_store, reference_rotary, rope_store, rotary

HIDDEN, INTERMEDIATE, LAYERS, PLE = (64, 96, 3, 32) if ON_CPU else (2560, 10240, 42, 256)
HEADS = ((32, 2), (64, 0)) if ON_CPU else ((256, 2), (512, 2), (512, 0))  # channels of a head, heads of K and V
LIMIT = 4e-3


def randn(*shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE) * std


def norm_call(rows: int, parts: str, seed: int) -> Call:
    product = linear(randn(rows, INTERMEDIATE), randn(HIDDEN, INTERMEDIATE, std=INTERMEDIATE**-0.5))
    gain, hidden, scale = Norm(randn(HIDDEN), 1e-6), randn(rows, HIDDEN), randn(1)
    every = {"pre": gain, "post": gain, "residual": hidden, "scale": scale}
    options: dict[str, Any] = {name: every[name] for name in parts.split()}
    return Call(lambda: norm(product, **options), lambda: reference_norm(product, **options), limit=LIMIT)


def rope_call(rows: int, dim: int, num_kv: int, seed: int) -> Call:
    """Rotary angles, and queries and keys turned and stored."""
    gains = Norm(randn(dim), 1e-6), *((Norm(randn(dim), 1e-6), Norm(None, 1e-6)) if num_kv else (None, None))
    heads = Heads(8, num_kv, dim, *gains)
    qkv = linear(randn(rows, HIDDEN), randn(heads.width, HIDDEN, std=HIDDEN**-0.5))
    positions = torch.randint(0, 100000, (rows,), device=DEVICE)
    frequencies = 1e4 ** (-torch.arange(0, dim, 2, device=DEVICE) / dim)
    pools = torch.zeros((4, 200, max(1, num_kv), dim), device=DEVICE, dtype=DTYPE)
    slots = PrimaryLoc(1 + torch.randperm(199, device=DEVICE)[:rows])
    table = rotary(positions, frequencies, 1.0, DTYPE)

    def outcome(store: Callable[..., Any], angles: Callable[..., Any], own: torch.Tensor) -> tuple[Any, ...]:
        turned = store(qkv, heads, table, Destination(own[0], own[1], slots))
        return (torch.stack(angles(positions, frequencies, 1.0, DTYPE)), *turned, *(own if num_kv else ()))

    return Call(
        lambda: outcome(rope_store, rotary, pools[:2]),
        lambda: outcome(reference_rope_store, reference_rotary, pools[2:]),
        limit=LIMIT,
    )


def projection_call(rows: int, seed: int) -> Call:
    inputs, weight = randn(rows, LAYERS, PLE)[:, 1], randn(HIDDEN, PLE, std=PLE**-0.5)
    gate = linear(randn(rows, HIDDEN), randn(PLE, HIDDEN, std=HIDDEN**-0.5))
    return Call(
        lambda: gated_projection(gate, inputs, weight, "gelu_tanh").parts,
        lambda: reference_gated_projection(gate, inputs, weight, "gelu_tanh").parts,
        limit=LIMIT,
    )


def calls_of(rows: Sequence[int]) -> Iterator[tuple[str, Make]]:
    for count in rows:
        for parts in ("pre", "post residual pre", "residual scale"):
            yield f"norm of {parts}, {count} rows", partial(norm_call, count, parts)
        for dim, num_kv in HEADS:
            yield f"rotary and store, {num_kv} heads of {dim}, {count} rows", partial(rope_call, count, dim, num_kv)
        yield f"gated projection, {count} rows", partial(projection_call, count)


def check_rows(rows: Sequence[int]) -> Iterator[Row]:
    yield from check_calls(calls_of(rows))


def times_rows(rows: Sequence[int]) -> Iterator[Row]:
    yield from time_calls(calls_of(rows), peers=False)
