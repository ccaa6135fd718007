"""Adaptive drafts change no token: the same requests with `adaptive` on and off, in captured rounds on a GPU.

    python tools/gpu_adaptive_bits.py                       # every drafter, about three minutes
    python tools/gpu_adaptive_bits.py --drafters mtp block  # some of them

Targets of a few layers at published widths, random weights, `deterministic=True`, eight requests at a time, greedy and
seeded. Each is first decoded alone and plainly; these tokens must come out of

    fixed       every round has the engine's whole draft
    adaptive    the draft that the engine chooses
    in turn     every captured draft in turn, none included, whatever was chosen

Chains are planted: the drafter does all of its work, and then six of ten of its tokens are replaced by those that are
right, so that rounds accept and reject at every depth. Trees are the drafter's own. With `--device cpu` two narrow
layers run in plain torch, uncaptured.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
from gpu_block import random_block
from result_table import ResultTable, Row

from specdec.attention.trees.tree import DraftTree
from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.base import Binding, DraftBatch, Drafter, DraftWorker
from specdec.draft_models.language_model import LanguageModelDrafter
from specdec.draft_models.suffix import SuffixDrafter
from specdec.engine import Engine
from specdec.evaluation.model_shapes import Shape, Shrink, find_shape
from specdec.evaluation.phases.random_weights import make_drafter, make_target
from specdec.gpu.operations import FAST, REFERENCE
from specdec.models.target import TargetModel

OPERATIONS, DTYPE = (REFERENCE, torch.float32) if ON_CPU else (FAST, torch.bfloat16)
DIVISOR = 16 if ON_CPU else 1
LENGTHS = (3, 9, 5, 7) if ON_CPU else (700, 33, 2, 260, 15, 512, 90, 400)
NEW = 12 if ON_CPU else 64
CHAIN, TREE = SpecConfig(4), SpecConfig(4, 4, 16)


class Truth:
    """What plain decoding gave after each prompt, found by the prompt's first token, which is its number."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        longest = max(map(len, texts)) + CHAIN.num_steps + 1
        self.texts = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=DEVICE)

    def planted(self, batch: DraftBatch, tree: DraftTree) -> DraftTree:
        """Returns the chain with six of ten tokens right."""
        number = batch.history[:, :1].clamp(max=len(self.texts) - 1)
        position = batch.history_len[:, None] - 1 + torch.arange(tree.num_nodes, device=DEVICE)
        true = self.texts[number, position.clamp(max=self.texts.shape[1] - 1)]
        right = ((number * 104_723 + position * 15_485_863) >> 3) % 10 < 6
        right[:, 0] = False  # the root is the request's own
        return DraftTree.chain(torch.where(right, true, tree.tokens))

    def plant(self, drafter: Drafter) -> None:
        """In every worker of this drafter from now on."""
        bind = type(drafter).bind

        def planted_bind(binding: Binding) -> DraftWorker:
            worker = bind(drafter, binding)
            propose = worker.propose

            def planted(batch: DraftBatch) -> DraftTree:
                tree = propose(batch)
                return self.planted(batch, tree) if batch.topk == 1 else tree

            worker.propose = planted  # type: ignore[method-assign]
            return worker

        drafter.bind = planted_bind  # type: ignore[method-assign]


def smaller_model(shape: Shape, shrink: Shrink, target: TargetModel) -> Drafter:
    """A language model of the same family and other weights."""
    return LanguageModelDrafter(TargetModel(make_target(shape, shrink, DEVICE, DTYPE, 5), OPERATIONS), target)


Make = Callable[[Shape, Shrink, TargetModel], Drafter]
DRAFTERS: dict[str, tuple[str, int, tuple[SpecConfig, ...], Make]] = {
    "mtp": ("gemma4-e4b", 8, (CHAIN, TREE), lambda shape, shrink, target: make_drafter(shape, shrink, target, 1)),
    "eagle3": ("qwen3-8b", 4, (CHAIN,), lambda shape, shrink, target: make_drafter(shape, shrink, target, 1)),
    "block": ("qwen3-8b", 4, (CHAIN, TREE), lambda _, __, target: random_block(target, "dflash", **HEAD)),
    "suffix": ("qwen3-8b", 4, (CHAIN,), lambda *_: SuffixDrafter()),
    "lm": ("qwen3-8b", 4, (CHAIN,), smaller_model),
    "dspark": ("qwen3-8b", 4, (CHAIN,), lambda _, __, target: random_block(target, "dspark", **HEAD)),
}
"""Shape of the target, its layers, drafts, and how the drafter is made."""
HEAD = {"layers": 1 if ON_CPU else 2, "block": 8, "seed": 1}


def engine_of(target: TargetModel, drafter: Drafter | None, spec: SpecConfig, batch: int) -> Engine:
    sizes = EngineConfig(
        max_batch_size=batch, max_model_len=max(LENGTHS) + NEW + 8, deterministic=True, prefix_cache=False, page_size=16
    )
    return Engine(target, drafter, spec=spec, config=sizes)


def in_turn(engine: Engine) -> None:
    """From now on rounds have one draft after the other."""
    choice, turn = engine.steps.choice, count()
    assert choice is not None
    shapes = choice.shapes
    choice.choose = lambda *_, **__: shapes[next(turn) % len(shapes)]  # type: ignore[method-assign]


class Checked:
    """One target: its requests, and what plain decoding of each alone gives."""

    def __init__(self, name: str, layers: int) -> None:
        self.shape, self.shrink = find_shape(name), Shrink(2 if ON_CPU else layers, DIVISOR)
        model = make_target(self.shape, self.shrink, DEVICE, DTYPE, 0)
        self.target = TargetModel(model, OPERATIONS, deterministic=True)
        draw = random.Random(0)
        self.prompts = [
            [number, *(draw.randrange(len(LENGTHS), self.target.vocab_size) for _ in range(length))]
            for number, length in enumerate(LENGTHS)
        ]
        self.params = [
            SamplingParams(max_new_tokens=NEW, ignore_eos=True, temperature=i % 2 * 0.9, top_p=0.97, seed=i)
            for i in range(len(LENGTHS))
        ]
        with engine_of(self.target, None, CHAIN, 1) as engine:
            self.want = [out.token_ids for out in engine.generate(self.prompts, self.params)]
        self.truth = Truth([prompt + tokens for prompt, tokens in zip(self.prompts, self.want, strict=True)])

    def row(self, what: str, engine: Engine) -> Row:
        begin = time.perf_counter()
        before = engine.stats()
        found = [out.token_ids for out in engine.generate(self.prompts, self.params)]
        after = engine.stats()
        equal = sum(a == b for a, b in zip(found, self.want, strict=True))
        rounds = [now - then for now, then in zip(after.drafts.rounds, before.drafts.rounds, strict=True)]
        note = f"{after.acceptance_length:.2f} tokens a round"
        note += f", {'/'.join(map(str, rounds))} rounds by draft" if any(rounds) else ""
        uncaptured = after.captures.uncaptured_rounds - before.captures.uncaptured_rounds
        note += "" if ON_CPU else f", {uncaptured} rounds not captured"
        ok = equal == len(found) and (ON_CPU or uncaptured == 0)
        note += f", {time.perf_counter() - begin:.0f} s"
        return Row(f"{self.shape.name}, {what}", f"{equal} of {len(found)} equal", note, ok)

    def rows(self, name: str, drafter: Drafter, spec: SpecConfig) -> Iterator[Row]:
        draft = "chain of 4" if spec.topk == 1 else f"tree of {spec.num_nodes}"
        fixed = SpecConfig(spec.num_steps, spec.topk, spec.num_draft_tokens, adaptive=False)
        with engine_of(self.target, drafter, fixed, len(LENGTHS)) as engine:
            yield self.row(f"{name}, {draft}, fixed", engine)
        with engine_of(self.target, drafter, spec, len(LENGTHS)) as engine:
            yield self.row(f"{name}, {draft}, adaptive", engine)
            in_turn(engine)
            yield self.row(f"{name}, {draft}, in turn", engine)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--seconds", type=float, default=240, help="no drafter is begun after them")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    require_device()
    begin, results = time.perf_counter(), ResultTable(machine())
    checked: dict[str, Checked] = {}
    for name in given.drafters:
        shape, layers, specs, make = DRAFTERS[name]
        for spec in specs:
            if time.perf_counter() - begin > given.seconds:
                results.add([Row(f"{name}, {spec}", "left out", f"{given.seconds:.0f} s are over", ok=False)])
                continue
            with torch.no_grad():
                if shape not in checked:
                    checked.clear()
                    checked[shape] = Checked(shape, layers)
                each = checked[shape]
                drafter = make(each.shape, each.shrink, each.target)
                each.truth.plant(drafter)
                results.add(each.rows(name, drafter, spec))
        results.add([Row(f"{name}: all of it", "", f"{time.perf_counter() - begin:.0f} s since the start")])
    return results.finish(given.out)


if __name__ == "__main__":
    sys.exit(main())
