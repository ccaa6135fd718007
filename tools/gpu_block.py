"""What a round with a block drafter takes at the shape of Qwen3-8B: `python tools/gpu_block.py`.

Random weights in bfloat16, one request after a prompt of 1,024 tokens, a DFlash head of 5 layers with blocks of 16.
Medians of the device's own clock: a plain step, rounds with the block's chain and with trees of 31 and 63 drafts, and a
round with four steps of the EAGLE-3 head of that shape, whose draft time is compared with the block's. Bounds: the
chain's round at most 1.35 plain steps, the tree of 31 at most 1.5.

Each row makes an engine. A row that would not end within `--seconds` is left out and says so. Text is not compared
here: `gpu_adaptive_bits.py` does that. `--device cpu` runs two narrow layers in plain torch.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
from result_table import ResultTable, Row

from specdec.config import EngineConfig, SpecConfig
from specdec.draft_models.base import Drafter
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.block.block_head import BlockHead, BlockSpec
from specdec.engine import Engine
from specdec.evaluation.model_shapes import Shrink, find_shape
from specdec.evaluation.phases.random_weights import make_drafter, make_target, randomise
from specdec.evaluation.phases.timed_rounds import Driven, drive, most_new_tokens
from specdec.gpu.operations import FAST, REFERENCE
from specdec.models.target import TargetModel

DSPARK = {"shifted": True, "owns_vocabulary": True, "successor": "vanilla", "successor_rank": 16}
KINDS: dict[str, dict[str, Any]] = {"dflash": {}, "jetspec": {"causal": True}, "dspark": DSPARK}

BLOCK = 16
LAST = BLOCK - 1  # drafts of a block
ROUNDS = 2 if ON_CPU else 40
CONTEXT = 6 if ON_CPU else 1024
CASES = {
    "plain step": (None, SpecConfig(1), None),
    "block, chain of 15": ("block", SpecConfig(LAST), 1.35),
    "block, tree of 31": ("block", SpecConfig(LAST, 4, 32), 1.5),
    "EAGLE-3, chain of 4": ("eagle3", SpecConfig(4), None),
    "block, tree of 63": ("block", SpecConfig(LAST, 8, 64), None),
}
"""What is timed: the drafter, its draft, and how many plain steps a round may take."""


def random_block(target: TargetModel, kind: str, *, layers: int, block: int, seed: int) -> BlockDrafter:
    """A block drafter of random weights with the widths of its target; kind: of `KINDS`."""
    config, num_layers = target.config, len(target.layout.layers)
    taps = [1 + round(i * max(num_layers - 3, 0) / 4) for i in range(5)]
    spec = BlockSpec(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        aux_layers=tuple(dict.fromkeys(taps)),
        block_size=block,
        mask_token=target.vocab_size - 1,
        windows=(None,) * layers,
        **KINDS[kind],
    )
    with target.device:
        head = BlockHead(spec).place(target.device, target.dtype).eval()
    randomise(head, seed)
    return BlockDrafter(head, target)


def timed(target: TargetModel, drafter: Drafter | None, spec: SpecConfig) -> Driven:
    room = CONTEXT + most_new_tokens(ROUNDS, spec.depth)
    sizes = EngineConfig(max_model_len=room, max_batch_size=1, page_size=16, prefix_cache=False, prefill_chunk=512)
    prompt = [(7919 * i + 13) % target.vocab_size for i in range(CONTEXT)]
    with Engine(target, drafter, spec=spec, config=sizes) as engine:
        return drive(engine, [prompt], ROUNDS, spec.depth, profiled=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    parser.add_argument("--layers", type=int, default=2 if ON_CPU else None, help="of the target, to see that it runs")
    parser.add_argument("--seconds", type=float, default=150, help="no row is begun that would end later")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    require_device()
    begin = time.perf_counter()
    shape, shrink = find_shape("qwen3-8b"), Shrink(given.layers, 16 if ON_CPU else 1)
    results = ResultTable(f"{machine()}, {shape.published}, widths / {shrink.divisor}")
    with torch.no_grad():
        model = make_target(shape, shrink, DEVICE, torch.float32 if ON_CPU else torch.bfloat16, 0)
        target = TargetModel(model, REFERENCE if ON_CPU else FAST)
        drafters: dict[str | None, Drafter | None] = {
            None: None,
            "block": random_block(target, "dflash", layers=1 if ON_CPU else 5, block=BLOCK, seed=1),
            "eagle3": make_drafter(shape, shrink, target, 2),
        }
    results.add([Row("weights", "", f"{time.perf_counter() - begin:.0f} s")])
    plain, longest = 0.0, 0.0
    for case, (name, draft, bound) in CASES.items():
        started = time.perf_counter()
        if started - begin + longest > given.seconds:
            results.add([Row(case, "left out", f"{given.seconds:.0f} s are over", ok=bound is None)])
            continue
        rounds = timed(target, drafters[name], SpecConfig(draft.num_steps, draft.topk, draft.num_draft_tokens, False))
        took = time.perf_counter() - started
        longest = max(longest, took)
        parts = {
            part: 1e3 * median(getattr(each, part) for each in rounds.rounds) for part in ("draft", "verify", "other")
        }
        total = 1e3 * median(each.draft + each.verify + each.other for each in rounds.rounds)
        wall = 1e3 * median(each.wall for each in rounds.rounds)
        plain = plain or total
        emitted = sum(each.emitted for each in rounds.rounds) / len(rounds.rounds)
        stages = ", ".join(f"{part} {ms:.3f}" for part, ms in parts.items())
        found = f"{total:.3f} ms, {total / plain:.2f}x plain; {stages}; wall {wall:.3f}; {emitted:.2f} tokens a round"
        ok = ON_CPU or bound is None or total <= bound * plain
        results.add([Row(case, found, f"{took:.0f} s" + (f", at most {bound}x" if bound else ""), ok)])
    return results.finish(given.out)


if __name__ == "__main__":
    sys.exit(main())
