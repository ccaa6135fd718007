"""`deterministic=True` on a GPU: the same bits in any company, and what that costs: `python tools/gpu_bits.py`.

    bits      requests alone, in a crowd, in chunks, preempted, found in the prefix cache, with n-gram and MTP drafts,
              in trees of 16 and 200 nodes whose paths are accepted, in captured rounds and not: tokens and
              log-probabilities must be equal; random weights at the widths of every published shape, few layers,
              and of three of them packed
    times     at the shape of Gemma 4 E4B, context 1,024: a round of 4 MTP drafts and a plain step at 1, 8 and 32
              requests, and prompts of 2,048 tokens, beside the default
    --sweep   products of many rows and attention of prompts in other tiles, timed, and whether their bits are the same

Log-probabilities are sums over the vocabulary, so one other bit in any logit shows. Bounds are 5 % a round at 1 and 8
requests, 20 % at 32, and half as much again for a prompt.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_setup import DEVICE, ON_CPU, device_option, machine, microseconds, require_device  # isort: skip - before triton
import torch
from result_table import ResultTable, Row

from specdec.attention.kernels.own_keys import own_keys
from specdec.attention.kernels.tree_attention import RowTiles, tree_attention
from specdec.attention.trees.tree import DraftTree
from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.base import DraftBatch, StatelessDrafter
from specdec.draft_models.ngram import NgramDrafter
from specdec.engine import Engine
from specdec.evaluation.model_shapes import Shrink, find_shape
from specdec.evaluation.phases.random_weights import UNPACKED, find_form, make_drafter, make_target
from specdec.gpu.operations import FAST
from specdec.layers.linear import gated_linear, linear
from specdec.layers.product import Tiles, finish
from specdec.models.target import TargetModel
from specdec.runtime.request import GenerationOutput

DTYPE = torch.float32 if ON_CPU else torch.bfloat16
DIVISOR = 16 if ON_CPU else 1
NEW = 2 if ON_CPU else 20
LENGTHS = (5, 9) if ON_CPU else (700, 33, 1, 260, 15, 512, 90, 1100)
SHAPES = {"gemma4-e4b": 8, "gemma4-26b-a4b": 4, "gemma4-31b": 6, "gpt-oss-20b": 3, "llama-8b": 2}
SHAPES |= {"gemma4-e4b:int4-g32": 8, "llama-8b:fp8": 2, "gpt-oss-20b:mxfp4": 3}  # SHAPE:WEIGHTS -> layers
BOUNDS = {1: 1.05, 8: 1.05, 32: 1.2}
CHAIN, TREE = SpecConfig(4, adaptive=False), SpecConfig(4, 4, 16, adaptive=False)

Answer = tuple[list[int], Any]


def prompts_of(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


class Planted(StatelessDrafter):
    """Trees of `num_nodes` random nodes in which the true continuation is hidden, a few levels deep."""

    name = "planted"

    def __init__(self, truths: Sequence[list[int]], vocab: int) -> None:
        self.truths, self.vocab = truths, vocab

    def propose(self, batch: DraftBatch) -> DraftTree:
        tokens, parents = [], []
        for row, length in zip(batch.history.tolist(), batch.history_len.tolist(), strict=True):
            past = row[:length]
            draw = random.Random(str(past[-8:]))
            true = next((t[length:] for t in self.truths if t[:length] == past), [])[:5]
            paths = [[past[-1]]]
            above = [-1]
            while len(paths) < batch.num_nodes:
                at = draw.randrange(len(paths))
                depth = len(paths[at]) - 1
                hidden = paths[at][1:] == true[:depth] and depth < len(true)
                path = [*paths[at], true[depth] if hidden else draw.randrange(self.vocab)]
                if path not in paths:
                    paths.append(path)
                    above.append(at)
            tokens.append([path[-1] for path in paths])
            parents.append(above)
        where = batch.root.device
        return DraftTree.from_parents(torch.tensor(tokens, device=where), torch.tensor(parents, device=where))


def read(outputs: Sequence[GenerationOutput]) -> list[Answer]:
    return [(out.token_ids, out.logprobs) for out in outputs]


def answers(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
    with engine:
        return read(engine.generate(list(prompts), list(params)))


def answers_again(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> tuple[list[Answer], int]:
    """The second time, with what the prefix cache holds by then; and for how many of the prompts it held something."""
    with engine:
        engine.generate(list(prompts), list(params))
        outputs = engine.generate(list(prompts), list(params))
        return read(outputs), sum(out.stats.cached_tokens > 0 for out in outputs)


def preempted_answers(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], crowd: Sequence[list[int]]
) -> tuple[list[Answer], int]:
    """Answers of requests that have begun when a crowd of higher rank takes their slots; and how many lost them."""
    with engine:
        handles = engine.submit_many(list(prompts), list(params), priority=1)
        while all(handle.num_output < 2 for handle in handles):
            engine.step()
        engine.submit_many(list(crowd), SamplingParams(max_new_tokens=8 if ON_CPU else 100, ignore_eos=True))
        outputs = [handle.output() for handle in handles]
        return read(outputs), sum(out.stats.preemptions > 0 for out in outputs)


def engine_of(target: TargetModel, drafter: Any, spec: SpecConfig, **config: Any) -> Engine:
    settings = {"max_model_len": 2048 if not ON_CPU else 64, "attention": "triton", "deterministic": True, **config}
    return Engine(target, drafter, spec=spec, config=EngineConfig(**settings))


def bits_of_shape(pair: str, layers: int) -> list[Row]:
    """One SHAPE or SHAPE:WEIGHTS in every company."""
    begin = time.perf_counter()
    name, _, weights = pair.partition(":")
    form = find_form(weights or UNPACKED)
    shape, shrink = find_shape(name), Shrink(2 if ON_CPU else layers, DIVISOR, multiple=32 if form else 8)
    model = make_target(shape, shrink, DEVICE, DTYPE, 0, form)
    name = pair
    target = TargetModel(model, FAST, deterministic=True)
    drafter = make_drafter(shape, shrink, target, 1)
    vocab = target.vocab_size
    prompts = prompts_of(LENGTHS, vocab, 0)
    params = [
        SamplingParams(max_new_tokens=NEW, logprobs=8, temperature=(i % 2) * 0.8, top_p=0.95, seed=i)
        for i in range(len(prompts))
    ]
    want = answers(engine_of(target, None, CHAIN, max_batch_size=1, prefill_chunk=2048), prompts, params)
    truths = [prompt + tokens for prompt, (tokens, _) in zip(prompts, want, strict=True)]
    crowd = prompts_of([3 + 11 * i % 300 for i in range(1 if ON_CPU else 72)], vocab, 1)
    quiet = SamplingParams(max_new_tokens=NEW // 2 + 1, temperature=0.5, seed=3)
    planted = Planted(truths, vocab)
    tight = {"full_slots": max(LENGTHS) + 400, "swa_slots": max(LENGTHS) + 400, "max_batch_size": 64}
    cases: list[tuple[str, Any, SpecConfig, dict[str, Any], bool]] = [
        ("among 80, chunks of 256", None, CHAIN, {"max_batch_size": 64, "prefill_chunk": 256}, True),
        ("chunks of 16, pages of 16", None, CHAIN, {"prefill_chunk": 16, "page_size": 16}, False),
        ("no graphs", None, CHAIN, {"cuda_graphs": False}, False),
        ("n-gram, among 80", NgramDrafter(), CHAIN, {}, True),
        (f"{drafter.name}, chain of 4", drafter, CHAIN, {}, False),
        (f"{drafter.name}, tree of 16, among 80", drafter, TREE, {"max_batch_size": 32}, True),
        (f"{drafter.name}, tree of 200", drafter, SpecConfig(6, 8, 200, adaptive=False), {}, False),
        ("accepted trees of 16", planted, SpecConfig(15, 2, 16, adaptive=False), {"cuda_graphs": False}, False),
        ("accepted trees of 200", planted, SpecConfig(20, 20, 200, adaptive=False), {"cuda_graphs": False}, False),
    ]
    rows = []

    def compare(what: str, found: Sequence[Answer], note: str, *, ok: bool = True) -> None:
        equal = sum(a == b for a, b in zip(found, want, strict=True))
        error = f"{equal} of {len(want)} equal"
        rows.append(Row(f"{name}, {layers} layers: {what}", error, note, ok and equal == len(want)))

    found, lost = preempted_answers(engine_of(target, None, CHAIN, **tight), prompts, params, crowd)
    compare("preempted", found, f"{lost} preempted", ok=ON_CPU or lost > 0)
    for what, draft, spec in (("cached", None, CHAIN), (f"{drafter.name}, tree of 16, cached", drafter, TREE)):
        found, hits = answers_again(engine_of(target, draft, spec), prompts, params)
        compare(what, found, f"{hits} found in the prefix cache", ok=hits > 0)
    for what, draft, spec, config, crowded in cases[:: 4 if ON_CPU else 1]:
        others = crowd if crowded else []
        engine = engine_of(target, draft, spec, **config)
        found = answers(engine, [*prompts, *others], [*params, *[quiet] * len(others)])[: len(prompts)]
        stats = engine.stats()
        note = f"acceptance length {stats.acceptance_length:.2f}" + (f", {stats.preemptions} preempted" * crowded)
        compare(what, found, note)
    plain = TargetModel(model, FAST)
    default = answers(
        engine_of(plain, None, CHAIN, deterministic=False, max_batch_size=64),
        [*prompts, *crowd],
        [*params, *[quiet] * len(crowd)],
    )
    same = sum(a == b for a, b in zip(default, want, strict=False))
    took = time.perf_counter() - begin
    rows.append(Row(f"{name}: the default among 80", f"{same} of {len(want)} equal", f"{took:.0f} s for this shape"))
    return rows


# times


def round_ms(engine: Engine, prompts: Sequence[list[int]]) -> float:
    """Milliseconds of the device for a steady round of these requests: the best of three runs."""
    rounds = []
    for _ in range(1 if ON_CPU else 3):
        params = SamplingParams(max_new_tokens=2 if ON_CPU else 100, ignore_eos=True)
        outs = engine.generate(list(prompts), params)
        stats = outs[-1].stats
        seconds = sum(o.stats.draft_seconds + o.stats.verify_seconds + o.stats.other_seconds for o in outs)
        rounds.append(seconds / stats.rounds * 1e3)
    return min(rounds)


def prompt_ms(engine: Engine, prompt: list[int]) -> float:
    times = []
    for _ in range(2 if ON_CPU else 5):
        [out] = engine.generate(prompt, SamplingParams(max_new_tokens=1))
        times.append(out.stats.prefill_seconds * 1e3)
    return statistics.median(times[1:])


def time_rows() -> list[Row]:
    shape, shrink = find_shape("gemma4-e4b"), Shrink(2 if ON_CPU else None, DIVISOR)
    model = make_target(shape, shrink, DEVICE, DTYPE, 0)
    plain = TargetModel(model, FAST)
    exact = plain.as_deterministic()
    rows = []
    context, prompt_len = (6, 8) if ON_CPU else (1024, 2048)
    for batch, bound in list(BOUNDS.items())[: 1 if ON_CPU else None]:
        prompts = prompts_of([context] * batch, plain.vocab_size, batch)
        for what, speculates in (("plain step", False), ("round of 4 drafts", True)):
            took = []
            for target in (plain, exact):
                drafter = make_drafter(shape, shrink, target, 1) if speculates else None
                config = {"max_batch_size": batch, "deterministic": target.deterministic}
                with engine_of(target, drafter, CHAIN, **config) as engine:
                    took.append(round_ms(engine, prompts))
            ratio = took[1] / took[0]
            cells = f"{took[0]:.3f} -> {took[1]:.3f} ms, {ratio - 1:+.1%}", f"at most {bound - 1:.0%}"
            rows.append(Row(f"E4B, {what}, {batch} requests", *reversed(cells), ok=ON_CPU or ratio <= bound))
    for chunk in (prompt_len // 4, prompt_len):
        prompt = prompts_of([prompt_len], plain.vocab_size, 5)[0]
        took = []
        for target in (plain, exact):
            config = {"max_model_len": prompt_len + 64, "prefill_chunk": chunk, "max_batch_size": 1}
            config |= {"prefix_cache": False, "deterministic": target.deterministic}  # the same prompt each time
            with engine_of(target, None, CHAIN, **config) as engine:
                took.append(prompt_ms(engine, prompt))
        ratio = took[1] / took[0]
        cells = f"{took[0]:.2f} -> {took[1]:.2f} ms, {ratio:.2f}x", "at most 1.5x"
        rows.append(
            Row(f"E4B, a prompt of {prompt_len}, chunks of {chunk}", *reversed(cells), ok=ON_CPU or ratio <= 1.5)
        )
    return rows


# other tiles


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


PRODUCTS = {
    "gate/up": (20480, 2560),
    "down": (2560, 10240),
    "qkv": (3072, 2560),
    "o": (2560, 2048),
    "head": (262144, 2560),
}
TILES = (
    Tiles(128, 64, 64, 8, 4, 128),
    Tiles(128, 128, 64, 8, 3, 128, tail_m=32),
    Tiles(128, 128, 64, 8, 4, 128, tail_m=32),
    Tiles(64, 128, 64, 4, 3, 64, tail_m=32),
    Tiles(128, 128, 64, 8, 3, 128),
    Tiles(128, 128, 64, 8, 4, 128),
    Tiles(128, 256, 64, 8, 3, 128),
    Tiles(128, 256, 64, 8, 4, 128),
    Tiles(64, 128, 64, 4, 4, 64),
    Tiles(64, 256, 64, 4, 4, 64),
)


def product_rows() -> list[Row]:
    """Compares, for every product and number of rows, the chosen tiles, the vendor's product, and the best tiles."""
    rows = []
    for name, (n, k) in PRODUCTS.items():
        n, k = (128, 256) if ON_CPU else (n, k)
        weight = randn(n, k) * k**-0.5
        for num_rows in (80,) if ON_CPU else (160, 512, 2048):
            x = randn(num_rows, k)

            def compute(tiles: Tiles | None, x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
                if len(weight) == 20480:
                    return gated_linear(x, weight, "gelu_tanh", tiles=tiles)
                return finish(linear(x, weight, tiles=tiles))

            want = compute(None)
            lone = compute(None, x[num_rows // 2 : num_rows // 2 + 1])
            equal = torch.equal(want[num_rows // 2], lone[0])
            vendor = microseconds(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight))
            found = []
            for tiles in TILES[: 1 if ON_CPU else None]:
                try:
                    equal = equal and torch.equal(compute(tiles), want)
                    found.append((microseconds(lambda tiles=tiles, compute=compute: compute(tiles)), tiles[:5]))
                except Exception as error:  # too large for the device, or two tiles where a program adds ranges up
                    print(name, tiles, type(error).__name__)
            chosen = microseconds(lambda compute=compute: compute(None))
            cells = " ".join(f"{us:.0f} {tiles}" for us, tiles in sorted(found)[:3])
            note = f"chosen {chosen:.0f} us, vendor {vendor:.0f}; best: {cells}"
            found_bits = "bits equal" if equal else "other bits"
            # the interpreter multiplies by numpy, whose sums depend on the tile
            rows.append(Row(f"{name} {n}x{k}, {num_rows} rows", found_bits, note, equal or ON_CPU))
    return rows


def prompt_attention_rows() -> list[Row]:
    """A prompt of 2,048 tokens in one chunk, in other row tiles."""
    rows = []
    length = 16 if ON_CPU else 2048
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    slots = torch.arange(1, length + 1, device=DEVICE)[None]
    positions = torch.arange(length, device=DEVICE)[None]
    block_len = zero + length
    pages = slots[:, :0]
    for head_dim, window in ((256, 512), (512, None)):
        query = randn(1, 8, length, head_dim)
        pools = [randn(length + 1, 2, head_dim) for _ in "kv"]
        shape = {"page_size": 1, "scaling": head_dim**-0.5, "window": window, "block_len": block_len}
        own = own_keys(pages, None, zero, slots, page_size=1)

        def tree(tiles: RowTiles | None, query=query, pools=pools, own=own, shape=shape) -> torch.Tensor:
            return tree_attention(query, *pools, own, pages, None, zero, positions, tiles=tiles, **shape)

        want, equal, found = tree(None), True, []
        shapes = [(16, 4), (32, 4), (64, 4), (64, 8)]
        candidates = [RowTiles(m, w, s, None, f) for m, w in shapes for s in (2, 3) for f in (True, False)]
        for tiles in candidates[: 1 if ON_CPU else None]:
            try:
                equal = equal and torch.equal(tree(tiles), want)
                found.append((microseconds(lambda tiles=tiles, tree=tree: tree(tiles), 8), tuple(tiles[:5])))
            except Exception as error:  # too large for the device
                print(head_dim, tiles, type(error).__name__)
        cells = " ".join(f"{us:.0f} {tiles}" for us, tiles in sorted(found)[:4])
        chosen = microseconds(lambda tree=tree: tree(None), 8)
        what = f"prompt attention, head {head_dim}, window {window}"
        note = f"chosen {chosen:.0f} us; best: {cells}"
        rows.append(Row(what, "bits equal" if equal else "other bits", note, equal))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES), help="whose bits to compare")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_device()
    torch.manual_seed(0)
    parts: list[Callable[[], list[Row]]] = []
    if not options.no_times:
        parts.append(time_rows)
    parts += [lambda name=name: bits_of_shape(name, SHAPES[name]) for name in options.shapes]
    if options.sweep:
        parts += [product_rows, prompt_attention_rows]
    results = ResultTable(machine())
    for part in parts:
        with torch.no_grad():
            results.add(part())
        if not ON_CPU:
            torch.cuda.empty_cache()
    return results.finish(options.out)


if __name__ == "__main__":
    sys.exit(main())
