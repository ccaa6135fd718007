"""Check and time sampling, the centroid head and the mixtures of experts on a GPU, at the shapes of published models.

    python tools/bench_sampling_moe.py [--only sampling|centroid|moe] [--profile] [--device cpu]

Times are of CUDA graph replays, weights rotated beyond the L2 cache, logits as the head has just left them. The floor
is the bytes that must be read (logits once; each chosen expert once) over the read bandwidth measured first. Nothing
is timed when a check fails. `--device cpu` runs the checks at small shapes in the interpreter.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import numpy as np
import torch
from gpu_attention import bandwidth, graph_time
from result_table import ResultTable, Row
from transformers import Gemma4TextConfig, GptOssConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from specdec import SamplingParams
from specdec.draft_models.centroid_head import CentroidHead, centroid_best, centroid_sample, reference_centroid_logits
from specdec.layers.moe import experts as moe_experts
from specdec.layers.moe.experts import Experts, reference_apply_experts
from specdec.layers.moe.moe_families import experts_of, router_of
from specdec.layers.moe.routing import Router, Routing, reference_route, route
from specdec.layers.norm import reference_rms_norm
from specdec.layers.product import finish, reference_finish
from specdec.sampling.kernel_sampler import best_tokens, sample
from specdec.sampling.reference_sampler import ReferenceSampler
from specdec.sampling.sampling_table import ParamVectors, SamplingTable, Uses

VOCAB = 1000 if ON_CPU else 262_144
ROWS = (1, 3) if ON_CPU else (1, 5, 8, 16, 40, 160)
TOKENS = (1, 5) if ON_CPU else (1, 8, 16, 32, 128, 512)
DTYPE = torch.float16 if ON_CPU else torch.bfloat16  # bfloat16 is not interpreted

SETTINGS = {
    "greedy": SamplingParams(),
    "T 1": SamplingParams(temperature=1.0),
    "T 1, top-k 64, top-p .95": SamplingParams(temperature=1.0, top_k=64, top_p=0.95),
    "T .7, top-p .9": SamplingParams(temperature=0.7, top_p=0.9),
    "T 1, min-p .05": SamplingParams(temperature=1.0, min_p=0.05),
    "T 1, top-n-sigma 1": SamplingParams(temperature=1.0, top_n_sigma=1.0),
}


RESULTS = ResultTable("sampling, centroid head and mixtures of experts")


def line(name: str, text: str, ok: bool = True) -> None:
    RESULTS.add([Row(name, text, ok=ok)])


def logits_of(kind: str, rows: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """zipf: as a language model has them, P falling as rank^-1.3; flat: a nucleus of most of the vocabulary."""
    noise = torch.randn(rows, 1, VOCAB, device=DEVICE)
    if kind in ("normal", "flat"):
        return ((3 if kind == "normal" else 1) * noise).to(dtype)
    rank = torch.stack([torch.randperm(VOCAB, device=DEVICE) for _ in range(rows)])[:, None] + 1.0
    return (15 - 1.3 * rank.log() + 0.3 * noise).to(dtype)


def params_of(settings: list[SamplingParams]) -> tuple[ParamVectors, ReferenceSampler]:
    rows = np.arange(len(settings))
    table = SamplingTable(len(settings), DEVICE)
    table.load(rows, [(each, 100 + i) for i, each in enumerate(settings)])
    slow = ReferenceSampler(*table.at(torch.from_numpy(rows).to(DEVICE), Uses.of(settings)))
    return slow.params, slow


def check_sampling() -> None:
    """Tokens of `ReferenceSampler`, every setting and their mixture, and the same whatever the rows beside."""
    mixed = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, top_n_sigma=n)
        for t, k, p, m, n in itertools.product(
            (0.0, 0.6, 1.5), (0, 1, 50, 5000), (1.0, 0.95, 0.3, 1e-6), (0.0, 0.1), (0.0, 1.5)
        )
    ]
    for kind, dtype in itertools.product(("zipf", "normal", "flat"), (DTYPE, torch.float32)):
        differ = total = 0
        for first in range(0, len(mixed), 32):
            some = mixed[first : first + 32]
            torch.manual_seed(first)
            logits = logits_of(kind, len(some), dtype)
            positions = torch.randint(0, 10_000, (len(some), 1), device=DEVICE)
            fast, slow = params_of(some)
            wrong = (sample(logits, positions, fast) != slow.sample(logits, positions))[:, 0]
            for row in wrong.nonzero()[:, 0].tolist():
                print(f"    differs: {some[row]}", flush=True)
            differ += int(wrong.sum())
            total += len(some)
        line(f"sampling: {kind}, {dtype}", f"{differ} of {total} tokens differ", ok=differ <= (0 if ON_CPU else 1))
    torch.manual_seed(0)
    logits = logits_of("zipf", 6)
    positions = torch.arange(6, device=DEVICE)[:, None]
    fast, slow = params_of([SamplingParams(temperature=t) for t in (0.0, 1.0)] * 3)
    best, expected = best_tokens(logits, positions, fast, 4), slow.log_scores(logits, positions).topk(4, dim=-1)
    error = float((best.scores - expected.values).abs().max())
    line("sampling: 4 best, log-probabilities", f"{error:.1e}", ok=error < 1e-4)


def timed(name: str, call: Callable[[], Any], floor: float, peer: Callable[[], Any] | None, args: Any) -> None:
    own = graph_time([call] * 8)  # of one call the launch of the graph would be most
    text = f"{own * 1e6:8.1f} us, floor {floor * 1e6:6.1f} ({own / floor:5.1f}x)"
    if peer is not None:
        other = graph_time([peer] * 4)
        text += f", peer {other * 1e6:9.1f} us ({other / own:5.1f}x)"
    line(name, text)
    if args.profile:
        profile(call)


def profile(call: Callable[[], Any]) -> None:
    """Time on the GPU of each kernel of one call."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    for event in run.key_averages():
        print(f"    {event.key[:60]:60} {event.device_time_total / 5:9.1f} us", flush=True)


def time_sampling(read: float, args: Any) -> None:
    for name, setting in SETTINGS.items():
        for kind in ("zipf", "normal", "flat") if name == "T .7, top-p .9" else ("zipf",):
            for rows in ROWS:
                torch.manual_seed(rows)
                logits = logits_of(kind, rows)
                positions = torch.arange(rows, device=DEVICE)[:, None]
                fast, slow = params_of([setting] * rows)
                timed(
                    f"sample: {name}, {kind}, {rows} rows",
                    lambda x=logits, p=positions, f=fast: sample(x, p, f),
                    logits.nbytes / read,
                    (lambda x=logits, p=positions, s=slow: s.sample(x, p)) if rows in (8, 40) else None,
                    argparse.Namespace(profile=args.profile and rows in (8, 160)),
                )
    for rows in (8, 40):
        logits, positions = logits_of("zipf", rows), torch.arange(rows, device=DEVICE)[:, None]
        fast, slow = params_of([SETTINGS["T 1"]] * rows)
        timed(
            f"best_tokens: 4 best, T 1, {rows} rows",
            lambda x=logits, p=positions, f=fast: best_tokens(x, p, f, 4),
            logits.nbytes / read,
            lambda x=logits, p=positions, s=slow: s.log_scores(x, p).topk(4, dim=-1),
            args,
        )


def centroid_part(read: float, args: Any) -> None:
    """The head of the E2B and E4B assistants: hidden 256, 2,048 centroids of 128 tokens, 32 opened."""
    sizes = (20, 50, 32, 5) if ON_CPU else (2048, VOCAB // 2048, 256, 32)
    num_centroids, cluster, width, top_k = sizes
    torch.manual_seed(0)
    heads = [
        CentroidHead(
            torch.randn(num_centroids, width, device=DEVICE).to(DTYPE),
            torch.randperm(num_centroids * cluster, device=DEVICE).view(num_centroids, cluster),
            torch.randn(num_centroids * cluster, width, device=DEVICE).to(DTYPE),
            top_k,
        )
        for _ in range(1 if ON_CPU else 2)
    ]
    head = heads[0]
    settings = list(SETTINGS.values()) * 4
    fast, slow = params_of(settings)
    hidden = (torch.randn(len(settings), 2, width, device=DEVICE) * 0.2).to(DTYPE)
    positions = torch.arange(2 * len(settings), device=DEVICE).view(-1, 2)
    expected = slow.sample(reference_centroid_logits(hidden, head), positions)
    differ = int((centroid_sample(hidden, positions, fast, head) != expected).sum())
    # sums in another order round some logits otherwise, and then a draw is another
    line("centroid: tokens of the dense path", f"{differ} of {expected.numel()} differ", ok=differ <= 2)
    if ON_CPU or RESULTS.failed:
        return
    for rows in (1, 8, 32, 128):
        hidden = (torch.randn(rows, 1, width, device=DEVICE) * 0.2).to(DTYPE)
        positions = torch.arange(rows, device=DEVICE)[:, None]
        size = head.centroids.nbytes + rows * top_k * cluster * (2 * width + 8)
        for name in ("greedy", "T 1"):
            fast, slow = params_of([SETTINGS[name]] * rows)
            timed(
                f"centroid: {name}, {rows} rows",
                lambda h=hidden, p=positions, f=fast: centroid_sample(h, p, f, head),
                size / read,
                lambda h=hidden, p=positions, s=slow: s.sample(reference_centroid_logits(h, head), p),
                args,
            )
    fast, _ = params_of([SETTINGS["greedy"]] * 8)
    hidden, positions = hidden[:8], positions[:8]
    timed("centroid: 4 best, 8 rows", lambda: centroid_best(hidden, positions, fast, head, 4), size / read, None, args)


def gemma4_layers(count: int) -> list[tuple[Any, Any]]:
    """Router and experts of Gemma 4 26B-A4B."""
    small = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 8, "top_k_experts": 2}
    full = {"hidden_size": 2816, "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8}
    config = Gemma4TextConfig(**(small if ON_CPU else full), experts_implementation="grouped_mm")
    return [(Gemma4TextRouter(config), Gemma4TextExperts(config)) for _ in range(count)]


def gpt_oss_layers(count: int) -> list[tuple[Any, Any]]:
    """Router and experts of GPT-OSS-20B."""
    small = {"hidden_size": 64, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2}
    full = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}
    config = GptOssConfig(**(small if ON_CPU else full), experts_implementation="grouped_mm")
    return [(GptOssTopKRouter(config), GptOssExperts(config)) for _ in range(count)]


def apply_experts(*arguments: Any, **options: Any) -> torch.Tensor:
    return finish(moe_experts.apply_experts(*arguments, **options))


def ours(x: torch.Tensor, view: tuple[Router, Experts]) -> torch.Tensor:
    """Without the norms of a layer's branches, which the launches around these do."""
    return apply_experts(x, route(x, view[0]), view[1])


def picked(x: torch.Tensor, view: tuple[Router, Experts]) -> Routing:
    return route(x, view[0])


def theirs(x: torch.Tensor, layer: tuple[Any, Any]) -> torch.Tensor:
    _, weight, index = layer[0](x)
    return layer[1](x, index, weight)


@torch.no_grad()
def moe_part(read: float, args: Any) -> None:
    for family, make in (("26B-A4B", gemma4_layers), ("GPT-OSS-20B", gpt_oss_layers)):
        torch.manual_seed(0)
        torch.set_default_device(DEVICE)
        torch.set_default_dtype(DTYPE)
        layers = make(1 if ON_CPU else 3)
        torch.set_default_device("cpu")
        torch.set_default_dtype(torch.float32)
        for module in itertools.chain(*layers):
            for parameter in module.parameters():
                parameter.normal_(std=0.02 if parameter.dim() > 1 else 0.5)
        views = [(router_of(router), experts_of(experts)) for router, experts in layers]
        hidden = views[0][0].weight.shape[1]
        check_moe(family, *views[0], hidden)
        check_router(family, layers[0][0], views[0][0], hidden)
        if ON_CPU or RESULTS.failed:
            continue
        for tokens in TOKENS:
            xs = [torch.randn(tokens, hidden, device=DEVICE, dtype=DTYPE) for _ in layers]
            routings = [route(x, router) for x, (router, _) in zip(xs, views, strict=True)]
            chosen = sum(len(r.experts.unique()) for r in routings) / len(routings)
            weights = views[0][1]
            expert_bytes = (weights.gate_up[0].numel() + weights.down[0].numel()) * 2

            floor = (chosen * expert_bytes + views[0][0].weight.nbytes) / read
            whole = graph_time([partial(ours, x, v) for x, v in zip(xs, views, strict=True)])
            routed = graph_time([partial(picked, x, v) for x, v in zip(xs, views, strict=True)])
            peer = graph_time([partial(theirs, x, m) for x, m in zip(xs, layers, strict=True)])
            line(
                f"moe: {family}, {tokens} tokens, {chosen:.0f} experts",
                f"{whole * 1e6:8.1f} us (router alone {routed * 1e6:5.1f}), floor {floor * 1e6:6.1f} "
                f"({whole / floor:4.2f}x), grouped_mm {peer * 1e6:8.1f} us ({peer / whole:4.1f}x)",
            )
            if args.tune and tokens in (1, 8):
                tune(xs, views)
            if args.profile and tokens in (1, 32):
                profile(partial(ours, xs[0], views[0]))
        del layers, views


def tune(xs: list[torch.Tensor], views: list[Any]) -> None:
    """Times these layers with other tiles."""
    tiles = moe_experts._tiles
    for block_n, num_warps, stages in itertools.product((64, 128), (4, 8), (3, 4, 6, 8)):

        def other(*key: Any, n: int = block_n, w: int = num_warps, s: int = stages) -> dict[str, int]:
            usual = tiles(*key)
            most = 200_000 // (2 * usual["BLOCK_K"] * (n + usual["BLOCK_M"]))
            return usual | {"BLOCK_N": n, "num_warps": w, "num_stages": min(s, most)}

        moe_experts._tiles = other
        seconds = graph_time([partial(ours, x, v) for x, v in zip(xs, views, strict=True)])
        print(f"    {block_n=} {num_warps=} {stages=}: {seconds * 1e6:.1f} us", flush=True)
    moe_experts._tiles = tiles


def check_router(family: str, module: Any, router: Router, hidden: int) -> None:
    """From a residual stream: the norm that only Gemma 4's router has, and its choice, beside transformers'."""
    x = torch.randn(21 if ON_CPU else 512, hidden, device=DEVICE, dtype=DTYPE)
    normed = x if router.gain is None else reference_rms_norm(x, router.gain) * router.factor
    same = float((route(normed, router).experts == module(x)[2]).all(1).float().mean())
    line(f"moe: {family}, rows with transformers' experts in order", f"{same:.1%}", ok=same > 0.8)


def check_moe(family: str, router: Router, experts: Experts, hidden: int) -> None:
    most = 21 if ON_CPU else 512
    x = torch.randn(most, hidden, device=DEVICE, dtype=DTYPE)
    routing = route(x, router)
    expected = reference_route(x, router)
    same = float((routing.experts == expected.experts).all(1).float().mean())
    line(f"moe: {family}, rows with the reference's experts in order", f"{same:.1%}", ok=same > 0.8)
    wide = Experts(*(f.float() if isinstance(f, torch.Tensor) else f for f in experts))
    some = Routing(routing.experts[:24], routing.weights[:24])
    expected_out = reference_finish(reference_apply_experts(x[:24].float(), some, wide))
    del wide
    for few in (True, False):
        error = float((apply_experts(x[:24], some, experts, few=few) - expected_out).norm() / expected_out.norm())
        line(f"moe: {family}, {'few' if few else 'listed'}, against float32", f"{error:.1e}", ok=error < 1e-2)
    whole = apply_experts(x, routing, experts)
    counts = (1, 2, 5, 16, 20) if ON_CPU else (1, 2, 5, 8, 16, 17, 31, 32, 33, 64, 100, 128, 256, 511)
    equal = []
    for count in counts:
        alone = route(x[:count], router)
        out = apply_experts(x[:count], alone, experts)
        last = apply_experts(x[-count:], Routing(*(r[-count:] for r in routing)), experts)
        bits = torch.equal(alone.weights, routing.weights[:count]) and torch.equal(out, whole[:count])
        equal.append(bits and torch.equal(last, whole[-count:]))
    name = f"moe: {family}, same bits at {len(counts)} numbers of rows up to {most}"
    line(name, f"{sum(equal)} equal", ok=all(equal))


def main() -> int:
    parser = argparse.ArgumentParser(parents=[device_option], description=__doc__)
    parser.add_argument("--only", choices=["sampling", "centroid", "moe"], nargs="*")
    parser.add_argument("--tune", action="store_true", help="also other tiles of the products")
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel")
    args = parser.parse_args()
    require_device()
    print(machine(), flush=True)
    read = 1.0 if ON_CPU else bandwidth()[0]
    line("read bandwidth", f"{read / 1e12:.2f} TB/s")
    wanted = args.only or ["moe", "sampling", "centroid"]
    if "moe" in wanted:
        moe_part(read, args)
    if "sampling" in wanted:
        check_sampling()
        if not (ON_CPU or RESULTS.failed):
            time_sampling(read, args)
    if "centroid" in wanted:
        centroid_part(read, args)
    return RESULTS.finish()


if __name__ == "__main__":
    sys.exit(main())
