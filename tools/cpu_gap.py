"""How much longer a step takes while a long prompt arrives beside 32 streams: `python tools/cpu_gap.py`, on any CPU.

    after              so many tokens of the prompt
    alone              steps of requests that decode, and the longest of them
    with               steps of the same in which parts of the prompt run: the median, against the median alone
    95th percentile    against the median alone
    at most            the longest, against the longest alone

Processor time of one thread, so that whatever else runs counts less. A prompt is not read up to there: what lies in the
pool stands for its K/V, which changes no time. Forwards from which the engine learns what such a prefix costs are not
counted.
"""

import argparse
import random
import statistics
import sys
import time

import torch
from result_table import table_head, table_row
from transformers import AutoModelForCausalLM

from specdec.config import EngineConfig, SamplingParams
from specdec.engine import Engine
from specdec.evaluation.conditions import VERSIONS, hardware
from specdec.models.bundled import BUNDLED_DIR
from specdec.models.target import TargetModel
from specdec.runtime.settling import commit_chunks_on_host

CONTEXT, NEW = 64, 1900  # tokens of the prompts that decode, and of their answers
LEARNED = 6
"""Forwards over the prompt after which its cost is known."""


class GapRig:
    """An engine whose streams decode, and prompts of `length` tokens for it."""

    def __init__(self, name: str, length: int, streams: int, *, whole: bool) -> None:
        model = AutoModelForCausalLM.from_pretrained(BUNDLED_DIR / name, dtype=torch.float32).eval()
        model.config.max_position_embeddings = longest = max(length, CONTEXT + NEW) + 64
        self.draw, self.length, target = random.Random(0), length, TargetModel(model)
        self.vocab_size = target.vocab_size
        slots = {"full_slots": length + streams * 2048, "swa_slots": length + streams * 256}
        sizes = {"max_batch_size": streams + 1, "max_model_len": longest, **slots}
        self.engine = engine = Engine(target, None, config=EngineConfig(device="cpu", prefix_cache=False, **sizes))
        if whole:
            engine.scheduler.prompt_gap.division = None
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        begun = engine.submit_many([self._prompt(CONTEXT) for _ in range(streams)], [params] * streams)
        while not all(stream.num_output for stream in begun):
            engine.step()

    def step(self) -> float:
        """Milliseconds."""
        begin = time.process_time()
        self.engine.step()
        return (time.process_time() - begin) * 1e3

    def beside(self, prefix: int, count: int) -> list[float]:
        """Steps in which `count` forwards over a prompt are run, after `prefix` tokens of it."""
        scheduler, table = self.engine.scheduler, self.engine.table
        long = self.engine.submit(self._prompt(self.length), SamplingParams(max_new_tokens=1))
        self._forwards(1)
        [request] = [request for request in scheduler.running if request.number == long.id]
        while table.committed_len.host[request.row] < prefix:
            requests, chunk_len = scheduler.next_prefill()
            commit_chunks_on_host(table, scheduler.prefixes, requests, chunk_len)
        self._forwards(LEARNED)
        spent = self._forwards(count)
        long.abort()
        self.engine.step()
        return spent

    def _forwards(self, count: int) -> list[float]:
        spent = []
        while count:
            spent.append(self.step())
            count -= self.engine.steps.prefill.reading is None
        return spent

    def _prompt(self, count: int) -> list[int]:
        return [self.draw.randrange(3, self.vocab_size) for _ in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-gemma4", help="a bundled target")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1000, 4000, 16000, 32000])
    parser.add_argument("--streams", type=int, default=32, help="requests that decode")
    parser.add_argument("--forwards", type=int, default=3, help="over the prompt, whose steps are counted")
    parser.add_argument("--rounds", type=int, default=15, help="steps alone, before each length and after it")
    parser.add_argument("--whole", action="store_true", help="forwards are not divided among steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rig = GapRig(args.model, max(args.lengths) + 768, args.streams, whole=args.whole)
    print(f"{hardware(torch.device('cpu'))}; {VERSIONS}\n")
    print(table_head("after", "steps", "alone, ms", "with", "95th percentile", "at most"))
    for length in args.lengths:
        alone = [rig.step() for _ in range(args.rounds)]
        beside = sorted(rig.beside(length, args.forwards))
        alone += [rig.step() for _ in range(args.rounds)]
        usual, middle, rare = statistics.median(alone), statistics.median(beside), beside[int(0.95 * len(beside))]
        row = [
            f"{length:,}",
            len(beside),
            f"{usual:.1f}, at most {max(alone):.1f}",
            f"{middle:.1f} ({middle / usual:.2f}x)",
        ]
        print(
            table_row([*row, f"{rare / usual:.2f}x", f"{beside[-1]:.1f} ({beside[-1] / max(alone):.2f}x)"]), flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
