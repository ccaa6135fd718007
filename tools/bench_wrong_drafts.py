"""What a drafter costs that is never right: `python tools/bench_wrong_drafts.py --pair tiny-gemma4-mtp`, on a CPU.

Three engines have the same requests and take turns step by step, so that what else runs on the machine meets all of
them alike: plain decoding, plain decoding again (how far its ratio is from 1 says what the noise is), and an engine
with a drafter that does all its work and whose drafts are then made wrong, anew for each repeat. Processor time of the
steps after the last first token; every output is that of plain decoding. `by the table` counts the engine's rounds at
what its cost table says of them, catching up included, to plain rounds alone: what was chosen, without the noise and
without the host's part.

smollm2-135m-eagle3: the published shapes of SmolLM2-135M, with random weights.
"""

import argparse
import copy
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from result_table import table_head, table_row
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention.trees.tree import DraftTree
from specdec.draft_models.base import DraftBatch, Drafter
from specdec.drafter_loading import load_any_drafter
from specdec.evaluation.conditions import VERSIONS, hardware
from specdec.gpu.operations import choose_operations
from specdec.models.target import TargetModel
from specdec.runtime.rounds.unread import KEPT

SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
PROMPT = 16
WARM = 24
"""Tokens of each request before anything is timed: what torch makes at the first product of a size is the process's, a
plain engine's as well as a drafting one's. Enough for a draft and for catching up."""


def make_target(pair: str, config: EngineConfig) -> TargetModel:
    if not pair.startswith("smollm2"):
        return Engine.from_pretrained("tiny-gemma4", None, config=config).target
    torch.manual_seed(0)
    operations = choose_operations("auto", "auto", torch.device("cpu"), torch.float32)
    return TargetModel(LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval(), operations)


def never_right(drafter: Drafter) -> Drafter:
    """Returns a copy of the drafter whose drafts are the tokens after those that it drafted."""
    wrong, bind = copy.copy(drafter), drafter.bind

    def binding(given: Any) -> Any:
        worker = bind(given)
        propose = worker.propose

        def proposed(batch: DraftBatch) -> DraftTree:
            tokens = propose(batch).tokens
            tokens[:, 1:] = (tokens[:, 1:] + 1) % (int(tokens.max()) + 2)
            return DraftTree.chain(tokens)

        worker.propose = proposed
        return worker

    wrong.bind = binding  # type: ignore[method-assign]
    return wrong


def in_turns(engines: Sequence[Engine], prompts: Sequence[Sequence[int]], tokens: int) -> list[float]:
    """Processor seconds of each engine's steps, from its last first token on."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    handles = [engine.submit_many(prompts, params) for engine in engines]
    for engine, own in zip(engines, handles, strict=True):
        with engine.prompts_only():
            while not all(handle.stats.output_tokens for handle in own):
                engine.step()
    seconds, busy = [0.0] * len(engines), set(range(len(engines)))
    while busy:
        for number in sorted(busy):
            begin = time.process_time()
            if not engines[number].step():
                busy.remove(number)
            seconds[number] += time.process_time() - begin
    outputs = [[handle.output().token_ids for handle in own] for own in handles]
    assert all(each == outputs[0] for each in outputs), "an output is not that of plain decoding"
    return seconds


def by_table(engine: Engine, batch: int) -> float:
    use, choice = engine.stats().drafts, engine.steps.choice
    assert choice is not None
    took = np.array(use.milliseconds[batch])
    late = choice.times.catch_up(batch, KEPT) * 1e3 * (use.rounds[0] / KEPT + sum(use.rounds[1:]))
    rounds = np.array(use.rounds)
    return float((rounds * took).sum() + late) / float(rounds.sum() * took[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="tiny-gemma4-mtp", help="or tiny-gemma4-eagle3, smollm2-135m-eagle3")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{hardware(torch.device('cpu'))}, {VERSIONS}, load {os.getloadavg()[0]:.1f}")
    names = ["plain again", "wrong drafts", "each", "by the table", "rounds by draft", "of them tried"]
    print(table_head("requests", "plain, ms a step", *names))
    for batch in given.batches:
        sizes = EngineConfig(
            max_batch_size=batch, max_model_len=PROMPT + given.tokens + 16, prefix_cache=False, dtype=torch.float32
        )
        target = make_target(given.pair, sizes)
        drafter = never_right(load_any_drafter(given.pair, target))
        plain = [Engine(target, config=sizes) for _ in range(2)]
        draw = random.Random(0)
        prompts = [[draw.randrange(target.vocab_size) for _ in range(PROMPT)] for _ in range(batch)]
        with Engine(target, drafter, spec=SpecConfig(4), config=sizes) as another:
            in_turns([*plain, another], prompts, WARM)
        seconds, each, by_tables = np.zeros(3), [], []
        for repeat in range(given.repeats):
            drafting = Engine(target, drafter, spec=SpecConfig(4), config=sizes)
            order = [*plain, drafting] if repeat % 2 else [drafting, *plain[::-1]]
            spent = in_turns(order, prompts, given.tokens)[:: 1 if repeat % 2 else -1]
            seconds += spent
            each.append(f"{spent[2] / np.mean(spent[:2]):.3f}")
            by_tables.append(by_table(drafting, 1 << (batch - 1).bit_length()))
            use = drafting.stats().drafts
            drafting.close()
        step = f"{1e3 * seconds[0] / given.repeats / (given.tokens - 1):.2f}"
        ratios = [f"{seconds[1] / seconds[0]:.3f}", f"{seconds[2] / seconds[:2].mean():.3f}", ", ".join(each)]
        rounds = ["/".join(map(str, counts)) for counts in (use.rounds, use.tried)]
        print(table_row([batch, step, *ratios, f"{np.mean(by_tables):.3f}", *rounds]), flush=True)
        for engine in plain:
            engine.close()


if __name__ == "__main__":
    main()
