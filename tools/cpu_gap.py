"""How much longer a step takes that reads a prompt while 32 requests decode: `python tools/cpu_gap.py`, on any CPU.

    alone    a round of the requests that decode
    carried  the same round, whose forward reads tokens of a prompt along
    apart    the round, then a forward over those tokens: what an engine does whose layers are fused

Processor time of one thread, in turn, so that whatever else runs slows all of them alike.
"""

import argparse
import random
import statistics
import time

import torch
from result_table import table_head, table_row
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from specdec.config import EngineConfig, SamplingParams
from specdec.engine import Engine
from specdec.evaluation.conditions import VERSIONS, hardware
from specdec.evaluation.phases.random_weights import randomise
from specdec.models.bundled import BUNDLED_DIR
from specdec.models.target import TargetModel
from specdec.runtime import steps
from specdec.runtime.prompt_shares import PromptRoom
from specdec.runtime.rounds.carried_prompts import MAX_CARRYING

STREAMS, CONTEXT, CHUNK = 32, 64, 1500
SMOLLM2_135M = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)


def model_of(name: str, length: int) -> PreTrainedModel:
    """The bundled target, or random weights of the shape of SmolLM2-135M, with room for so many tokens."""
    if name == "tiny-gemma4":
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(BUNDLED_DIR / name, dtype=torch.float32).eval()
    else:
        model = AutoModelForCausalLM.from_config(SMOLLM2_135M, dtype=torch.float32).eval()
        randomise(model, 0)
    model.config.max_position_embeddings = length
    return model


class GapRig:
    """An engine whose streams decode, and a prompt of which `prefix` tokens are read."""

    def __init__(self, target: TargetModel, prefix: int, length: int) -> None:
        draw = random.Random(0)

        def prompt(count: int) -> list[int]:
            return [draw.randrange(3, target.vocab_size) for _ in range(count)]

        config = EngineConfig(
            device="cpu", max_batch_size=STREAMS + 1, max_model_len=length, prefix_cache=False, cuda_graphs=False
        )
        self.engine = engine = Engine(target, None, spec=None, config=config)
        self.committed = engine.table.committed_len.host
        self._read(CHUNK)
        engine.submit(prompt(length - 8), SamplingParams(max_new_tokens=1))
        while self.committed.max() < prefix:
            engine.step()
        self._read(STREAMS * CONTEXT, chunk=CONTEXT)
        params = SamplingParams(max_new_tokens=length - CONTEXT - 8, ignore_eos=True)
        engine.submit_many([prompt(CONTEXT) for _ in range(STREAMS)], [params] * STREAMS)
        while (self.committed > CONTEXT).sum() <= STREAMS:
            engine.step()

    def _read(self, tokens: int, chunk: int | None = None) -> None:
        """So many prompt tokens in a step from now on."""
        self.engine.scheduler.prompt_room = PromptRoom(tokens, tokens, chunk or tokens, fixed=True)

    def step_ms(self, tokens: int, *, carried: bool) -> float:
        """Milliseconds of processor time of a step that reads so many tokens; of 0, of a round alone."""
        engine, before, can_join = self.engine, int(self.committed.sum()), steps.can_join
        self._read(max(1, tokens))
        engine.steps.carried_in_a_row = 0 if tokens else MAX_CARRYING
        steps.can_join = lambda _: carried
        try:
            begin = time.process_time()
            engine.step()
            spent = time.process_time() - begin
        finally:
            steps.can_join = can_join
        read = int(self.committed.sum()) - before - STREAMS
        assert read == tokens, f"{read=} {tokens=}"
        return 1e3 * spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("tiny-gemma4", "smollm2-135m"), default="tiny-gemma4")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[500, 3000], help="of the prompt, at least")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    length = max(args.prefixes) + CHUNK + 4 * args.repeat * sum(args.tokens) + 512
    target = TargetModel(model_of(args.model, length))
    print(f"{args.model}, {STREAMS} streams of {CONTEXT} tokens; {hardware(torch.device('cpu'))}; {VERSIONS}\n")
    print(table_head("after", "tokens", "a round, ms", "carried", "apart"))
    for prefix in args.prefixes:
        rig = GapRig(target, prefix, length)
        read = int(rig.committed.max())
        spent: dict[tuple[int, bool], list[float]] = {}
        for _ in range(args.repeat):
            for tokens in (0, *args.tokens):
                for carried in (True, False)[: 1 if tokens == 0 else 2]:
                    spent.setdefault((tokens, carried), []).append(rig.step_ms(tokens, carried=carried))
        alone = statistics.median(spent[0, True])
        for tokens in args.tokens:
            both = (statistics.median(spent[tokens, carried]) for carried in (True, False))
            ratios = (f"{ms:.1f} ({ms / alone:.2f}x)" for ms in both)
            print(table_row([f"{read:,}", str(tokens), f"{alone:.1f}", *ratios]), flush=True)
        rig.engine.close()


if __name__ == "__main__":
    main()
