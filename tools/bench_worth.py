"""Are drafts ever a loss? Plain decoding, fixed and adaptive drafts of one pair in one run, as ratios of tokens/s.

    python tools/bench_worth.py --target DIR --drafter smollm2-135m-eagle3 --data gsm8k_test.jsonl mt_bench.jsonl

The drafter runs as it is, and again with random weights, so that hardly a draft is right. All engines take turns on
each group of prompts; no figure is printed unless every output is that of plain decoding. `plain again` is plain
decoding a second time: how far from 1 it is says what the machine's noise is.
"""

import argparse
import copy
import os
from pathlib import Path

import torch
from result_table import table_head, table_row

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.engine import Engine
from specdec.evaluation.conditions import VERSIONS, hardware
from specdec.evaluation.contest import engine_contestant, require_parity, take_turns
from specdec.evaluation.phases.random_weights import randomise
from specdec.text.prompt_files import read_prompts


def untrained(drafter: Eagle3Drafter, engine: Engine) -> Eagle3Drafter:
    """Returns a copy of the head with random weights."""
    head = copy.deepcopy(drafter.head)
    randomise(head, 1)
    return Eagle3Drafter(head, drafter.target_ids, engine.target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", default="smollm2-135m-eagle3", help="an EAGLE-3 head")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    params = SamplingParams(max_new_tokens=given.max_new_tokens)
    print(f"{hardware(torch.device('cpu'))}, {VERSIONS}, load {os.getloadavg()[0]:.1f}")
    names = ["plain again", "head, fixed", "head, adaptive", "random, fixed", "random, adaptive"]
    print(table_head("prompts", "batch", "plain tokens/s", *names, "accepted, fixed head", "load"))
    for batch in given.batches:
        sizes = EngineConfig(max_batch_size=batch, max_model_len=2048, prefix_cache=False, dtype=torch.float32)
        plain = Engine.from_pretrained(given.target, None, config=sizes)
        head = Engine.from_pretrained(given.target, given.drafter, config=sizes).drafter
        assert isinstance(head, Eagle3Drafter), "an EAGLE-3 head is expected"
        drafters = {"head": Eagle3Drafter(head.head, head.target_ids, plain.target), "random": untrained(head, plain)}
        specs = {"fixed": SpecConfig(given.steps, adaptive=False), "adaptive": SpecConfig(given.steps)}
        for path in given.data:
            engines = {
                f"{drafter}, {shape}": Engine(plain.target, drafters[drafter], spec=spec, config=sizes)
                for drafter in drafters
                for shape, spec in specs.items()
            }
            order = {"plain": plain, "plain again": plain, **engines}
            contestants = [engine_contestant(name, engine, params) for name, engine in order.items()]
            ids = [plain.chat_prompt(problem.text) for problem in read_prompts(path, given.limit)]
            for contestant in contestants:  # thread pools and allocations
                contestant.run(ids[:1])
            groups = [ids[i : i + batch] for i in range(0, len(ids), batch)]
            take_turns(contestants, groups)
            require_parity(contestants)
            speed = {contestant.name: contestant.tokens_per_second for contestant in contestants}
            ratios = [f"{speed[name] / speed['plain']:.2f}" for name in names]
            accepted = f"{engines['head, fixed'].stats().acceptance_length:.2f}"
            load = f"{os.getloadavg()[0]:.1f}"
            cells = [f"{path.stem} ({len(ids)})", batch, f"{speed['plain']:.1f}", *ratios, accepted, load]
            print(table_row(cells), flush=True)
            for engine in engines.values():
                engine.close()
        plain.close()


if __name__ == "__main__":
    main()
