"""Mixtures of experts at the shapes of Gemma 4 26B-A4B and GPT-OSS 20B, in 16 bits and packed.

Floors are the bytes of the router and of each chosen expert once; the peer is transformers' `grouped_mm`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

from bench.device import DEVICE, ON_CPU  # isort: skip - before triton
import torch
from transformers import Gemma4TextConfig, GptOssConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from bench.cases.products import random_weight
from bench.clock import bandwidth_row, floor_us, graph_seconds, timed_row
from bench.report import Row
from bench.verify import bits_row, company_bits, distance
from specdec.layers.description.moe_families import experts_of, router_of
from specdec.layers.gemm.product import finish, reference_finish
from specdec.layers.moe import experts as moe_experts
from specdec.layers.moe.experts import Experts, apply_experts, reference_apply_experts
from specdec.layers.moe.routing import Router, Routing, reference_route, route
from specdec.layers.norm import reference_rms_norm

DTYPE = torch.float16 if ON_CPU else torch.bfloat16
GROUPED: dict[str, Any] = {"experts_implementation": "grouped_mm"}
SMALL = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 8, "top_k_experts": 2}
SMALL_OSS = {"hidden_size": 64, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2}
GEMMA = {"hidden_size": 2816, "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8}
OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}
FAMILIES: dict[str, tuple[Any, Any, Any, dict[str, int]]] = {
    "26B-A4B": (Gemma4TextConfig, Gemma4TextRouter, Gemma4TextExperts, SMALL if ON_CPU else GEMMA),
    "GPT-OSS-20B": (GptOssConfig, GptOssTopKRouter, GptOssExperts, SMALL_OSS if ON_CPU else OSS),
}
MIXTURES = ((32, 2880, 2880, 4, 2), (128, 2816, 704, 8, 1))  # experts, hidden, width, top_k, rows
AMONG = (1, 2, 5, 8, 16, 17, 31, 32, 33, 64, 100, 128, 256, 511)

View = tuple[Router, Experts]


def layers_of(family: str, count: int) -> tuple[list[tuple[Any, Any]], list[View]]:
    """(transformers' routers and experts, ours of the same weights)."""
    config_type, router_type, experts_type, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = config_type(**sizes, **GROUPED)
    with torch.device(DEVICE):
        layers = [(router_type(config).to(DTYPE), experts_type(config).to(DTYPE)) for _ in range(count)]
    for module in itertools.chain(*layers):
        for parameter in module.parameters():
            parameter.normal_(std=0.02 if parameter.dim() > 1 else 0.5)
    return layers, [(router_of(router), experts_of(experts)) for router, experts in layers]


def applied(*arguments: Any, **options: Any) -> torch.Tensor:
    return finish(apply_experts(*arguments, **options))


def ours(x: torch.Tensor, view: View) -> torch.Tensor:
    """Without the norms of a layer's branches, which the launches around these do."""
    return applied(x, route(x, view[0]), view[1])


def theirs(x: torch.Tensor, layer: tuple[Any, Any]) -> torch.Tensor:
    _, weight, index = layer[0](x)
    out: torch.Tensor = layer[1](x, index, weight)
    return out


def check_rows(families: Sequence[str], formats: Sequence[str]) -> Iterator[Row]:
    for family in families:
        layers, views = layers_of(family, 1)
        yield from _check_family(family, layers[0][0], *views[0])
    for form in (form for form in formats if form != "bf16"):
        yield packed_row(form)


def _check_family(family: str, module: Any, router: Router, experts: Experts) -> Iterator[Row]:
    most, hidden = 21 if ON_CPU else 512, router.weight.shape[1]
    x = torch.randn(most, hidden, device=DEVICE, dtype=DTYPE)
    normed = x if router.gain is None else reference_rms_norm(x, router.gain) * router.factor
    routing, expected = route(x, router), reference_route(x, router)
    pairs = {
        "transformers": (route(normed, router).experts, module(x)[2]),
        "the reference": (routing.experts, expected.experts),
    }
    for whose, (got, want) in pairs.items():
        same = float((got == want).all(1).float().mean())
        yield Row(f"{family}, rows with the experts of {whose} in order", f"{same:.1%}", ok=same > 0.8)
    wide = Experts(*(f.float() if isinstance(f, torch.Tensor) else f for f in experts))
    some = Routing(routing.experts[:16], routing.weights[:16])
    want = reference_finish(reference_apply_experts(x[:16].float(), some, wide))
    for few in (True, False):
        error = distance(applied(x[:16], some, experts, few=few), want)
        yield Row(f"{family}, {'few' if few else 'listed'}, against float32", f"{error:.1e}", ok=error < 1e-2)
    yield bits_row(
        f"{family}, a row among 1 to {most}", company_bits(lambda rows: ours(x[rows], (router, experts)), most, AMONG)
    )


def packed_row(form: str) -> Row:
    """Packed experts: a row among any number of rows."""
    experts, hidden, width, top_k, rows = 8, 256, 128, 2, 12 if ON_CPU else 300
    dtype = torch.float32 if ON_CPU else torch.bfloat16
    shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
    mixture = Experts(*(random_weight(form, *shape, dtype=dtype) for shape in shapes), "silu")
    x, routing = torch.randn(rows, hidden, device=DEVICE).to(dtype), random_routing(rows, experts, top_k)

    def some(rows: slice) -> torch.Tensor:
        return applied(x[rows], Routing(*(part[rows] for part in routing)), mixture)

    return bits_row(f"{form}: a row among 1 to {rows}", company_bits(some, rows, AMONG))


def random_routing(rows: int, experts: int, top_k: int) -> Routing:
    if rows * top_k <= experts:  # each another expert
        chosen = torch.randperm(experts, device=DEVICE)[: rows * top_k].view(rows, top_k).int()
    else:
        chosen = torch.stack([torch.randperm(experts, device=DEVICE)[:top_k] for _ in range(rows)]).int()
    return Routing(chosen, torch.rand(rows, top_k, device=DEVICE))


def times_rows(families: Sequence[str], rows: Sequence[int]) -> Iterator[Row]:
    yield bandwidth_row()
    for family in families:
        layers, views = layers_of(family, 3)
        for count in rows:
            xs, chosen, num_bytes = inputs_of(count, views)
            calls: list[list[Callable[[], Any]]] = [
                [partial(ours, x, view) for x, view in zip(xs, views, strict=True)],
                [partial(route, x, view[0]) for x, view in zip(xs, views, strict=True)],
                [partial(theirs, x, layer) for x, layer in zip(xs, layers, strict=True)],
            ]
            whole, routed, peer = (graph_seconds(each) * 1e6 for each in calls)
            yield timed_row(
                f"{family}, {count} tokens, {chosen:.0f} experts", whole, num_bytes, peer, f"router {routed:.1f}"
            )


def inputs_of(count: int, views: Sequence[View]) -> tuple[list[torch.Tensor], float, float]:
    """(rows for each layer, distinct experts that they choose, bytes of these and the router)."""
    router, experts = views[0]
    xs = [torch.randn(count, router.weight.shape[1], device=DEVICE, dtype=DTYPE) for _ in views]
    chosen = sum(len(route(x, each).experts.unique()) for x, (each, _) in zip(xs, views, strict=True)) / len(views)
    one_expert = (experts.gate_up[0].numel() + experts.down[0].numel()) * 2
    return xs, chosen, chosen * one_expert + router.weight.nbytes


def packed_rows(formats: Sequence[str]) -> Iterator[Row]:
    """A few assignments, next to 16 bits."""
    for experts, hidden, width, top_k, rows in MIXTURES:
        x = torch.randn(rows, hidden, device=DEVICE).to(DTYPE)
        routing, base = random_routing(rows, experts, top_k), 0.0
        shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
        for form in formats:
            mixtures = [
                Experts(*(random_weight(form, *each) for each in shapes), "swiglu_clamped", None, None, True, 1.7, 7.0)
                for _ in range(2)
            ]
            us = graph_seconds([partial(apply_experts, x, routing, each) for each in mixtures] * 4) * 1e6
            base = base or us
            yield Row(
                f"{experts} experts {hidden}x{width}, {rows * top_k} assignments, {form}",
                f"{base / us:.2f}x",
                f"{us:.1f} us",
            )


def tiles_rows(families: Sequence[str]) -> Iterator[Row]:
    """One and eight tokens in other tiles."""
    chosen = moe_experts.expert_tiles
    for family, count in itertools.product(families, (1, 8)):
        _, views = layers_of(family, 3)
        xs, _, num_bytes = inputs_of(count, views)
        for n, warps, stages in itertools.product((64, 128), (4, 8), (3, 4, 5, 6, 8)):

            def other(*key: Any, n: int = n, w: int = warps, s: int = stages) -> dict[str, int]:
                usual = chosen(*key)
                most = 200_000 // (2 * usual["BLOCK_K"] * (n + usual["BLOCK_M"]))
                return usual | {"BLOCK_N": n, "num_warps": w, "num_stages": min(s, most)}

            with mock.patch.object(moe_experts, "expert_tiles", other):
                us = 1e6 * graph_seconds([partial(ours, x, view) for x, view in zip(xs, views, strict=True)])
            name = f"{family}, {count} tokens, columns {n}, warps {warps}, stages {stages}"
            yield Row(name, "", f"{us:.1f} us, floor {floor_us(num_bytes):.1f}")
