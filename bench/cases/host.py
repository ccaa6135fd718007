"""On any CPU, by processor time of one thread, so that what else runs counts less; `functions` on a GPU, too.

functions  requests that all decode: what a step takes of the host, and which functions take it. On a GPU of captured
        rounds of a shape, without the wait for the device; on a CPU of rounds that count as captured and take no time
gap     steps of streams while parts of a long prompt run. The prompt is not read up to there: what lies in the pool
        stands for its K/V, which changes no time. Forwards from which the engine learns what such a prefix costs are
        not counted
wrong   a drafter that is never right. Three engines have the same requests and take turns step by step: plain, plain
        again (how far its ratio is from 1 says what the noise is), and with drafts, which are made wrong. By the
        table: the engine's rounds at what its cost table says of them, reading of the lag included
"""

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.device import ON_CPU  # isort: skip - before triton
from bench.plants import change_drafts, never_right  # isort: skip - before triton
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import specdec.engine
from bench.report import Row
from bench.subjects import pair_of, prompts_of
from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.gpu.operations import choose_operations
from specdec.loading.drafter_loading import load_any_drafter
from specdec.models.published import BUNDLED_DIR
from specdec.models.target import TargetModel
from specdec.runtime.rounds import captured_rounds
from specdec.runtime.rounds.captured_prompts import PromptForwards, eager_forward
from specdec.runtime.rounds.decode_round import DECODE_STAGES
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.result import RoundShape, empty_result

WIDTH = 32
PASSES = 5
ONE_LAYER = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
"""Published shape of SmolLM2-135M, for random weights."""
ENDLESS = {"ignore_eos": True}


def functions_rows(requests: Sequence[int], steps: int, shape: str, shown: int) -> Iterator[Row]:
    if not ON_CPU and torch.cuda.is_available():
        target = pair_of(shape).target
        for count in requests:
            yield from _function_rows(target, count, steps, shown, time.perf_counter)
        return
    torch.set_num_threads(1)
    target = TargetModel(LlamaForCausalLM(LlamaConfig(**ONE_LAYER)).eval())
    with (
        patch.object(captured_rounds, "decode_programs", stand_in_programs),
        patch.object(PromptForwards, "begin_forward", lambda self, *args, **how: eager_forward(self._state, *args)),
        patch.object(specdec.engine, "capture_for", lambda *_: _record),
    ):
        for count in requests:
            yield from _function_rows(target, count, steps, shown, time.process_time)


def _record(program: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """A capture whose replays do nothing: every round has the result of the first."""
    return lambda: None, program()


def stand_in_programs(state: DeviceState, shape: RoundShape) -> list[Callable[[], torch.Tensor]]:
    """Programs of a plain round that takes no time: every row gains token 0."""

    def program() -> torch.Tensor:
        numbers, rows, _ = empty_result(shape, len(DECODE_STAGES) + 1, state.device)
        numbers.zero_()
        rows[:, 0] = 1
        return numbers

    return [program]


def _function_rows(
    target: TargetModel, count: int, steps: int, shown: int, clock: Callable[[], float]
) -> Iterator[Row]:
    """Milliseconds a step without the wait for the device, and the functions that take most: their shares are those
    under the profiler, of the milliseconds without it."""
    params = SamplingParams(max_new_tokens=900, **ENDLESS)
    config = EngineConfig(max_batch_size=count, max_model_len=1024, prefix_cache=False)
    with Engine(target, None, config=config) as engine, cProfile.Profile(clock) as profile:
        profile.disable()
        handles = engine.submit_many([[3 + number % 100] * 16 for number in range(count)], [params] * count)
        while any(handle.num_output < 8 for handle in handles):
            engine.step()
        passes, launches = [], engine.steps.launches
        for _ in range(PASSES):
            begin = clock() - launches.waited_seconds
            for _ in range(steps):
                engine.step()
            passes.append((clock() - launches.waited_seconds - begin) / steps * 1e3)
        profile.enable()
        for _ in range(steps):
            engine.step()
        profile.disable()
        for handle in handles:
            handle.abort()
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    found = [(own, whole, calls, *place) for place, (_, calls, own, whole, _) in stats.items()]
    found = sorted((each for each in found if "synchronize" not in each[-1]), reverse=True)
    scale = min(passes) / sum(own for own, *_ in found)
    heads = ("ms a step", "with what it calls", "calls a step")
    yield Row(f"{count} requests", figures=dict(zip(heads, (f"{min(passes):.3f}", "", ""), strict=True)))
    for own, whole, calls, file, line, name in found[:shown]:
        cells = f"{own * scale:.4f}", f"{whole * scale:.4f}", f"{calls / steps:g}"
        where = f"{'/'.join(Path(file).parts[-2:])}:{line} " if line else ""
        yield Row(f"{where}{name}", figures=dict(zip(heads, cells, strict=True)))


class GapRig:
    """An engine whose streams decode, and prompts of `longest` tokens for it."""

    CONTEXT, NEW = 64, 1900  # tokens of the prompts that decode, and of their answers
    LEARNED = 6
    """Forwards over the prompt after which its cost is known."""

    def __init__(self, name: str, longest: int, streams: int, whole: bool) -> None:
        model = AutoModelForCausalLM.from_pretrained(BUNDLED_DIR / name, dtype=torch.float32).eval()
        most = max(longest, self.CONTEXT + self.NEW) + 64
        model.config.max_position_embeddings = most
        self.longest, target = longest, TargetModel(model)
        slots = {"full_slots": longest + streams * 2048, "swa_slots": longest + streams * 256}
        sizes: dict[str, Any] = {"max_batch_size": streams + 1, "max_model_len": most, "prefix_cache": False, **slots}
        self.engine = Engine(target, None, config=EngineConfig(device="cpu", **sizes))
        if whole:
            self.engine.scheduler.prompt_gap.division = None
        begun = self.engine.submit_many(
            prompts_of([self.CONTEXT] * streams, target.vocab_size, 0),
            [SamplingParams(max_new_tokens=self.NEW, **ENDLESS)] * streams,
        )
        while not all(stream.num_output for stream in begun):
            self.engine.step()

    def step(self) -> float:
        """Milliseconds."""
        begin = time.process_time()
        self.engine.step()
        return (time.process_time() - begin) * 1e3

    def with_prompt(self, prefix: int, count: int) -> list[float]:
        """Steps in which `count` forwards over a prompt are run, after `prefix` tokens of it."""
        scheduler, table = self.engine.scheduler, self.engine.table
        [prompt] = prompts_of([self.longest], self.engine.target.vocab_size, prefix)
        long = self.engine.submit(prompt, SamplingParams(max_new_tokens=1))
        self._forwards(1)
        [request] = [request for request in scheduler.running if request.id == long.id]
        while table.committed_len.host[request.row] < prefix:
            requests, chunk_len = scheduler.next_prefill()
            scheduler.commit_chunks(requests, chunk_len)
        self._forwards(self.LEARNED)
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


def gap_rows(
    target: str, contexts: Sequence[int], streams: int, forwards: int, rounds: int, whole: bool
) -> Iterator[Row]:
    """whole: forwards are not divided among steps."""
    torch.set_num_threads(1)
    rig = GapRig(target, max(contexts) + 768, streams, whole)
    for length in contexts:
        alone = [rig.step() for _ in range(rounds)]
        during = sorted(rig.with_prompt(length, forwards))
        alone += [rig.step() for _ in range(rounds)]
        usual, middle, rare = statistics.median(alone), statistics.median(during), during[int(0.95 * len(during))]
        figures: dict[str, object] = {"steps": len(during), "alone, ms": f"{usual:.1f}, at most {max(alone):.1f}"}
        figures |= {"with": f"{middle:.1f} ({middle / usual:.2f}x)", "95th percentile": f"{rare / usual:.2f}x"}
        at_most = f"{during[-1]:.1f} ({during[-1] / max(alone):.2f}x)"
        yield Row(f"after {length:,}", figures=figures | {"at most": at_most})


WARM = 24
"""Tokens of each request before anything is timed: what torch makes at the first product of a size is the process's, a
plain engine's as well as a drafting one's. Enough for a draft and for reading a lag."""
PROMPT = 16


def in_turns(engines: Sequence[Engine], prompts: Sequence[Sequence[int]], tokens: int) -> list[float]:
    """Processor seconds of each engine's steps, from its last first token on."""
    params = SamplingParams(max_new_tokens=tokens, **ENDLESS)
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
    """Rounds by their believed times, to plain ones; the drafter's reading before plain rounds is not in it."""
    use = engine.stats().drafts
    took, rounds = np.array(use.milliseconds[batch]), np.array(use.rounds)
    return float((rounds * took).sum()) / float(rounds.sum() * took[0])


def wrong_rows(drafter: str, batches: Sequence[int], tokens: int, repeats: int) -> Iterator[Row]:
    """drafter: a bundled one; of smollm2-135m-eagle3 the target has the published shape and random weights."""
    torch.set_num_threads(1)
    for batch in batches:
        sizes = EngineConfig(
            max_batch_size=batch, max_model_len=PROMPT + tokens + 16, prefix_cache=False, dtype=torch.float32
        )
        if drafter.startswith("smollm2"):
            torch.manual_seed(0)
            operations = choose_operations("auto", "auto", torch.device("cpu"), torch.float32)
            target = TargetModel(LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval(), operations)
        else:
            target = Engine.from_pretrained("tiny-gemma4", None, config=sizes).target
        wrong = change_drafts(load_any_drafter(drafter, target), never_right)
        plain = [Engine(target, config=sizes) for _ in range(2)]
        prompts = prompts_of([PROMPT] * batch, target.vocab_size, 0)
        with Engine(target, wrong, spec=SpecConfig(4), config=sizes) as another:
            in_turns([*plain, another], prompts, min(WARM, tokens))
        seconds, each, tables = np.zeros(3), [], []
        for repeat in range(repeats):
            with Engine(target, wrong, spec=SpecConfig(4), config=sizes) as drafting:
                order = [*plain, drafting] if repeat % 2 else [drafting, *plain[::-1]]
                spent = in_turns(order, prompts, tokens)[:: 1 if repeat % 2 else -1]
                tables.append(by_table(drafting, 1 << (batch - 1).bit_length()))
                use = drafting.stats().drafts
            seconds += spent
            each.append(f"{spent[2] / np.mean(spent[:2]):.3f}")
        figures: dict[str, object] = {"plain, ms a step": f"{1e3 * seconds[0] / repeats / (tokens - 1):.2f}"}
        figures |= {"plain again": f"{seconds[1] / seconds[0]:.3f}", "each": ", ".join(each)}
        figures["wrong drafts"] = f"{seconds[2] / seconds[:2].mean():.3f}"
        figures["by the table"] = f"{np.mean(tables):.3f}"
        figures["rounds by draft, tried"] = ", ".join("/".join(map(str, c)) for c in (use.rounds, use.tried))
        yield Row(f"{batch} requests", figures=figures)
        for engine in plain:
            engine.close()
