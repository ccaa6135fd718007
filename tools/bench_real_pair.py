"""A real pair on three data sets, and what other ways of decoding make of the same target: one table, one run.

    python tools/bench_real_pair.py --target DIR --drafter HEAD --data-folder DATA --out OUT

DATA holds gsm8k.jsonl, humaneval.jsonl and mt_bench.jsonl. Greedy, with the chat template, batch sizes 1, 8 and 32: a
batch is that many requests in flight, the next one starting when one ends. Tokens per second count the whole run,
prompts included. A round's acceptance length counts its bonus token.

    equal       share of the outputs that are those of the engine without a drafter in the same batch size. In bfloat16
                rounding depends on the width of a forward, so close logits may be decided otherwise; with
                `deterministic=True` all are equal, which is one of the checks
    accuracy    GSM8K: the last number of the answer; HumanEval: its program passes (`run_programs.py`)
    checks      speculation (adaptive) is faster than plain decoding at batch 1 and 8 on GSM8K and HumanEval;
                deterministic outputs are equal

transformers runs last, on a few of the prompts and at most `--peer-seconds` a call: plain, prompt lookup, and with a
static cache, which it compiles. What would not fit in `--seconds` is left out, and the table says so.
"""

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_setup import DEVICE, ON_CPU, device_option, require_device  # isort: skip - before triton
import torch
from result_table import table_head, table_row
from run_programs import grade, read_problems
from transformers.utils import logging as transformers_logging

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.drafter_loading import load_any_drafter
from specdec.evaluation.conditions import conditions
from specdec.evaluation.gsm8k_report import is_correct, wilson_interval
from specdec.text.prompt_files import Problem, read_prompts

PLAIN, ADAPTIVE, TREE = "plain", "EAGLE-3, adaptive", "EAGLE-3, tree of 16"
CASES: dict[str, tuple[str | None, SpecConfig]] = {  # "head": the pair's own drafter
    PLAIN: (None, SpecConfig()),
    ADAPTIVE: ("head", SpecConfig(5, 4, 16)),
    "EAGLE-3, chain of 4": ("head", SpecConfig(4, adaptive=False)),
    TREE: ("head", SpecConfig(5, 4, 16, adaptive=False)),
    "n-gram, adaptive": ("ngram", SpecConfig(4)),
    "suffix, adaptive": ("suffix", SpecConfig(8)),
}
BATCHES = (1, 8, 32)
PER_BATCH = {1: 8, 8: 32, 32: 256}
"""Prompts at most of each data set, spread over it evenly."""
PROMPT_ROOM = 1024  # tokens of the longest prompt that is asked
MIN_COMPILE = 75.0  # seconds that must be left before transformers compiles anything
HEADS = ("data", "batch", "run", "requests", "acceptance length", "tokens/s", "to plain", "equal")


@dataclass(frozen=True, slots=True)
class Task:
    """One data set. ids: token ids of each prompt."""

    name: str
    problems: list[Problem]
    ids: list[list[int]]
    max_new_tokens: int

    def spread(self, count: int) -> list[int]:
        """The numbers of at most `count` prompts, evenly over the file."""
        return list(range(len(self.ids)))[:: max(1, -(-len(self.ids) // count))][:count]


@dataclass(slots=True)
class Run:
    """One way of decoding on some prompts. equal: share of outputs, None where there is nothing to compare with."""

    task: str
    batch: int
    name: str
    seconds: float
    outputs: list[list[int]] = field(repr=False)
    numbers: list[int] = field(repr=False)
    acceptance: float | None = None
    equal: float | None = None

    @property
    def speed(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


def decode(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], batch: int) -> list[Any]:
    """The handles of all prompts, `batch` of them in flight."""
    waiting, active, handles = deque(zip(prompts, params, strict=True)), [], []
    while waiting or active:
        while waiting and len(active) < batch:
            active.append(engine.submit(*waiting.popleft()))
            handles.append(active[-1])
        engine.step()
        active = [handle for handle in active if not handle.finished]
    return handles


def timed(engine: Engine, name: str, task: Task, batch: int, numbers: list[int]) -> Run:
    before = engine.stats()
    params = SamplingParams(task.max_new_tokens)
    begin = time.perf_counter()
    handles = decode(engine, [task.ids[i] for i in numbers], [params] * len(numbers), batch)
    seconds = time.perf_counter() - begin
    stats = engine.stats()
    stats.add(before, sign=-1)
    outputs = [handle.output().token_ids for handle in handles]
    return Run(task.name, batch, name, seconds, outputs, numbers, stats.acceptance_length)


def warm_up(engine: Engine, tasks: Sequence[Task], batch: int) -> None:
    """Every batch size up to `batch` and every length of text: rounds are captured, kernels compiled."""
    ids = [ids for task in tasks for ids in task.ids][:batch]
    longest = max(task.max_new_tokens for task in tasks)
    params = [SamplingParams(max(2, longest * (i + 1) // len(ids)), ignore_eos=True) for i in range(len(ids))]
    decode(engine, ids, params, batch)


class Table:
    """Prints rows as they come, with the ratio to plain decoding of the same data and batch size."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        print(table_head(*HEADS, numbers=HEADS[3:]), flush=True)

    def add(self, run: Run, plain: Run | None) -> None:
        self.runs.append(run)
        if plain is not None and plain is not run:
            reference = dict(zip(plain.numbers, plain.outputs, strict=True))
            pairs = [(out, reference[i]) for i, out in zip(run.numbers, run.outputs, strict=True) if i in reference]
            if not run.name.startswith("transformers"):
                run.equal = sum(ours == theirs for ours, theirs in pairs) / len(pairs)
        cells = [run.task, run.batch, run.name, len(run.outputs)]
        cells += ["" if run.acceptance is None else f"{run.acceptance:.2f}", f"{run.speed:.0f}"]
        cells += ["" if plain is None else f"{run.speed / plain.speed:.2f}x"]
        cells += ["" if run.equal is None else f"{run.equal:.1%}"]
        print(table_row(cells), flush=True)

    def find(self, task: str, batch: int, name: str) -> Run | None:
        found = [run for run in self.runs if (run.task, run.batch, run.name) == (task, batch, name)]
        return found[0] if found else None


def transformers_run(
    engine: Engine, name: str, task: Task, batch: int, numbers: list[int], width: int, seconds: float, **options: Any
) -> Run:
    """transformers' own generate on groups of `batch`, padded on the left to `width`; cut off after `seconds` each."""
    model, ends = engine.target.model, engine.end_tokens
    outputs: list[list[int]] = []
    begin = time.perf_counter()
    for first in range(0, len(numbers), batch):
        group = [task.ids[i] for i in numbers[first : first + batch]]
        padding = [max(width, *map(len, group)) - len(ids) for ids in group]
        ids = torch.tensor([[0] * pad + ids for pad, ids in zip(padding, group, strict=True)], device=model.device)
        mask = torch.tensor(
            [[0] * pad + [1] * len(ids) for pad, ids in zip(padding, group, strict=True)], device=model.device
        )
        out = model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, do_sample=False, max_new_tokens=task.max_new_tokens, max_time=seconds,
            eos_token_id=sorted(ends), pad_token_id=0, **options,
        )  # fmt: skip
        for row in out[:, ids.shape[1] :].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            outputs.append(row[:end])
    return Run(task.name, batch, name, time.perf_counter() - begin, outputs, numbers)


def read_tasks(folder: Path, engine: Engine, given: argparse.Namespace) -> list[Task]:
    sizes = {"gsm8k": given.max_new_tokens * 3 // 4, "humaneval": given.max_new_tokens}
    tasks = []
    for name in ("gsm8k", "humaneval", "mt_bench"):
        problems = read_prompts(folder / f"{name}.jsonl")
        ids = [engine.chat_prompt(problem.text) for problem in problems]
        assert max(map(len, ids)) <= PROMPT_ROOM, f"{name}: a prompt of {max(map(len, ids))} tokens"
        tasks.append(Task(name, problems, ids, sizes.get(name, given.max_new_tokens * 3 // 4)))
    return tasks


def accuracy(engine: Engine, task: Task, run: Run, folder: Path) -> tuple[int, int]:
    """(right, asked)"""
    texts = [engine.decode(out) for out in run.outputs]
    if task.name == "humaneval":
        problems = read_problems(folder / "humaneval.jsonl")
        return sum(grade([problems[i] for i in run.numbers], texts)), len(texts)
    answers = [task.problems[i].answer or "" for i in run.numbers]
    return sum(map(is_correct, texts, answers, ["last_number"] * len(texts))), len(texts)


def deterministic_runs(
    plain: Engine, head: str, tasks: Sequence[Task], table: Table, config: EngineConfig, limit: int
) -> None:
    target = plain.target.as_deterministic()
    batch = min(8, config.max_batch_size)
    exact = EngineConfig(
        max_batch_size=batch, max_model_len=config.max_model_len, prefix_cache=False, deterministic=True
    )
    for name in (PLAIN, ADAPTIVE, TREE):
        source, spec = CASES[name]
        drafter = None if source is None else load_any_drafter(head, target)
        with Engine(target, drafter, tokenizer=plain.tokenizer, spec=spec, config=exact) as engine:
            warm_up(engine, tasks, min(batch, limit))
            for task in tasks[:2]:
                run = timed(engine, f"deterministic: {name}", task, batch, task.spread(min(limit, 2 * batch)))
                table.add(run, table.find(task.name, batch, f"deterministic: {PLAIN}"))


def peers(plain: Engine, tasks: Sequence[Task], table: Table, ends_at: float, seconds: float) -> list[str]:
    """transformers on GSM8K and HumanEval -> what was left out."""
    width = max(len(task.ids[i]) for task in tasks for i in task.spread(8))
    kinds: list[tuple[str, int, dict[str, Any]]] = [
        ("transformers, plain", 1, {}),
        ("transformers, prompt lookup", 1, {"prompt_lookup_num_tokens": 4}),
        ("transformers, static cache, compiled", 1, {"cache_implementation": "static"}),
        ("transformers, plain", 8, {}),
        ("transformers, static cache, compiled", 8, {"cache_implementation": "static"}),
    ]
    left_out = []
    for name, batch, options in kinds:
        static = "cache_implementation" in options
        needed = MIN_COMPILE if static and not ON_CPU else 5 * seconds
        if time.perf_counter() + needed > ends_at:
            left_out.append(f"{name}, batch {batch}")
            continue
        common = width if static else 0  # another length would be compiled again
        longest = max(tasks, key=lambda task: task.max_new_tokens)
        if static:
            transformers_run(plain, name, longest, batch, longest.spread(8)[:batch], common, 4 * seconds, **options)
        for task in tasks:
            numbers = task.spread(8)[: max(2, batch)]
            run = transformers_run(plain, name, task, batch, numbers, common, seconds, **options)
            table.add(run, table.find(task.name, batch, PLAIN))
    return left_out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True, help="an EAGLE-3 head of that target")
    parser.add_argument("--data-folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="a folder for runs.json")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of HumanEval; three quarters of the others")
    parser.add_argument("--limit", type=int, default=256, help="prompts of each data set at most")
    parser.add_argument("--batches", type=int, nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--seconds", type=float, default=380, help="nothing is begun that would end later")
    parser.add_argument("--peer-seconds", type=float, default=6.0, help="one call of transformers at most")
    given = parser.parse_args()
    require_device()
    transformers_logging.set_verbosity_error()
    ends_at = time.perf_counter() + given.seconds
    room = PROMPT_ROOM + given.max_new_tokens
    config = EngineConfig(max_batch_size=max(given.batches), max_model_len=room, prefix_cache=False, device=DEVICE)
    plain = Engine.from_pretrained(given.target, config=config)
    tasks = read_tasks(given.data_folder, plain, given)
    engines = {PLAIN: plain}
    for name, (source, spec) in CASES.items():
        if source is not None:
            drafter = load_any_drafter(given.drafter if source == "head" else source, plain.target)
            engines[name] = Engine(plain.target, drafter, tokenizer=plain.tokenizer, spec=spec, config=config)
    for engine in engines.values():
        warm_up(engine, tasks, min(max(given.batches), given.limit))
    facts = conditions(plain.target.device, " ".join(["python", *sys.argv]))
    print(", ".join(f"{name} {value}" for name, value in facts.items() if name not in ("command", "date")))
    print(f"engines made and warm after {given.seconds - ends_at + time.perf_counter():.0f} s\n")
    table, left_out, longest = Table(), [], 0.0
    for batch in given.batches:
        for task in tasks:
            begin = time.perf_counter()
            if begin + longest > ends_at:
                left_out.append(f"{task.name}, batch {batch}")
                continue
            numbers = task.spread(min(given.limit, PER_BATCH[batch]))
            for name, engine in engines.items():
                run = timed(engine, name, task, batch, numbers)
                table.add(run, run if name == PLAIN else table.find(task.name, batch, PLAIN))
            longest = time.perf_counter() - begin
    for name, engine in engines.items():
        if name != PLAIN:
            engine.close()
    deterministic_runs(plain, given.drafter, tasks, table, config, given.limit)
    lines = [f"\n{table_head('data', 'run', 'right', 'of', 'share', '95 %', numbers=('right', 'of', 'share'))}"]
    for task in tasks[:2]:
        for name in (PLAIN, ADAPTIVE, TREE):
            run = table.find(task.name, max(given.batches), name)
            if run is not None:
                right, asked = accuracy(plain, task, run, given.data_folder)
                low, high = wilson_interval(right, asked)
                interval = f"{100 * low:.1f} to {100 * high:.1f}"
                lines.append(table_row([task.name, name, right, asked, f"{100 * right / asked:.1f} %", interval]))
    print("\n".join(lines) + "\n", flush=True)
    print(table_head(*HEADS, numbers=HEADS[3:]), flush=True)
    left_out += peers(plain, tasks[:2], table, ends_at, given.peer_seconds)
    failed = [f"left out: {name}" for name in left_out]
    for task in tasks[:2]:
        for batch in {1, 8} & set(given.batches):
            ours, base = table.find(task.name, batch, ADAPTIVE), table.find(task.name, batch, PLAIN)
            if not ON_CPU and (ours is None or base is None or ours.speed <= base.speed):
                failed.append(f"{task.name}, batch {batch}: speculation is not ahead of plain decoding")
    failed += [
        f"{run.task}: {run.name} is equal in {run.equal:.1%}"
        for run in table.runs
        if run.name.startswith("deterministic") and run.equal not in (None, 1.0)
    ]
    print(f"\n{given.seconds - ends_at + time.perf_counter():.0f} s; " + ("; ".join(failed) or "all checks hold"))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        record = {"conditions": facts, "runs": [asdict(run) | {"tokens_per_second": run.speed} for run in table.runs]}
        (given.out / "runs.json").write_text(json.dumps(record), "utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
