"""What the host does in a step: `python tools/bench_host.py`, on any CPU.

A target of one tiny layer, requests that all decode: processor time of a step, of it the round's own operations (on a
GPU they would be one launch), and the rest: scheduling, seats, slots, settling of tokens. One thread; the least of
several passes, since others on the processor only add.
"""

import argparse
import time
from typing import Any

import torch
from result_table import table_head, table_row
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.config import EngineConfig, SamplingParams
from specdec.engine import Engine
from specdec.evaluation.conditions import VERSIONS, hardware
from specdec.models.target import TargetModel
from specdec.runtime import steps

WIDTH, STEPS, PASSES = 32, 40, 5


class InRounds:
    """Seconds of processor time that rounds take, from when it is made."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._run = steps.run_programs
        steps.run_programs = self._timed  # type: ignore[assignment]

    def _timed(self, *args: Any) -> torch.Tensor:
        begin = time.process_time()
        out = self._run(*args)
        self.seconds += time.process_time() - begin
        return out


def milliseconds(target: TargetModel, count: int, in_rounds: InRounds) -> tuple[float, float]:
    """Milliseconds of a step of `count` requests, and of its round."""
    config = EngineConfig(max_batch_size=count, max_model_len=1024)
    params = SamplingParams(max_new_tokens=900, ignore_eos=True)
    passes = []
    with Engine(target, None, config=config) as engine:
        handles = engine.submit_many([[3 + number % 100] * 16 for number in range(count)], [params] * count)
        while any(handle.num_output < 3 for handle in handles):
            engine.step()
        for _ in range(PASSES):
            in_rounds.seconds, begin = 0.0, time.process_time()
            for _ in range(STEPS):
                engine.step()
            spent = time.process_time() - begin
            passes.append((spent - in_rounds.seconds, spent))
    host, spent = min(passes)
    return spent / STEPS * 1e3, (spent - host) / STEPS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 128, 256])
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "vocab_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096}
    target, in_rounds = TargetModel(LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()), InRounds()
    print(f"{hardware(torch.device('cpu'))}, {VERSIONS}")
    print(table_head("requests", "step, ms", "its round, ms", "the rest, ms"))
    for count in given.requests:
        step, round_ms = milliseconds(target, count, in_rounds)
        print(table_row([str(count), f"{step:.3f}", f"{round_ms:.3f}", f"{step - round_ms:.3f}"]), flush=True)


if __name__ == "__main__":
    main()
