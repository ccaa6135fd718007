"""A real pair on prompt files: every way of drafting against plain decoding of the same target.

Greedy or seeded, with the chat template. A batch is that many requests in flight, the next one starting when one ends.
Tokens per second count the whole run, prompts included; a round's acceptance length counts its bonus token.

    equal      share of the outputs that are plain decoding's in the same batch size. In float32 all must be. In 16 bits
               rounding depends on the width of a forward, so close logits may be decided otherwise
    right      GSM8K: the last number of the answer; HumanEval: its program passes (`humaneval.py`); with 95 % intervals

Engines take turns on `turns` parts of each file, so that a slow moment of a shared machine hits all of them; `plain
again` is plain decoding a second time, and says what the noise is.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.device import ON_CPU  # isort: skip - before triton
import torch

from bench.humaneval import grade, read_problems
from bench.report import Row
from bench.verify import answers_row
from specdec import Engine, EngineConfig, GenerationOutput, SamplingParams, SpecConfig
from specdec.evaluation.accuracy_report import is_correct, wilson_interval
from specdec.loading.drafter_loading import load_any_drafter
from specdec.measurement.timed_comparison import run_figures, run_interleaved
from specdec.text.prompt_files import Problem, read_prompts

RUNS: dict[str, tuple[str, SpecConfig]] = {
    "plain": ("none", SpecConfig()),
    "plain again": ("none", SpecConfig()),
    "adaptive": ("own", SpecConfig(5, 4, 16)),
    "adaptive chain": ("own", SpecConfig(4)),
    "chain of 4": ("own", SpecConfig(4, adaptive=False)),
    "tree of 16": ("own", SpecConfig(5, 4, 16, adaptive=False)),
    "n-gram": ("ngram", SpecConfig(4)),
    "suffix": ("suffix", SpecConfig(8)),
}
"""Drafter and draft of each run; "own" is the pair's."""
GRADED = ("gsm8k", "humaneval")
"""Files whose answers are graded, and on which adaptive drafts must be faster than plain decoding on a GPU."""


class Task:
    """At most `limit` problems of one file, spread over it evenly, and the token ids of each."""

    def __init__(self, path: str, engine: Engine, limit: int) -> None:
        self.path, self.name = Path(path), Path(path).stem
        problems = read_prompts(self.path)
        self.numbers = list(range(len(problems)))[:: max(1, -(-len(problems) // limit))][:limit]
        self.problems: list[Problem] = [problems[i] for i in self.numbers]
        self.ids = [engine.chat_prompt(problem.text) for problem in self.problems]

    def right(self, engine: Engine, outputs: Sequence[list[int]]) -> str:
        texts = [engine.decode(out) for out in outputs]
        if self.name.startswith("humaneval"):
            programs = read_problems(self.path)
            right = sum(grade([programs[i] for i in self.numbers], texts))
        elif all(problem.answer for problem in self.problems):
            right = sum(
                is_correct(text, problem.answer or "") for text, problem in zip(texts, self.problems, strict=True)
            )
        else:
            return ""
        low, high = wilson_interval(right, len(texts))
        return f"{right} of {len(texts)} ({100 * low:.1f} to {100 * high:.1f} %)"


def decode(engine: Engine, batch: int, params: SamplingParams, prompts: Sequence[list[int]]) -> list[GenerationOutput]:
    """The outputs of all prompts, `batch` of them in flight."""
    waiting, handles = deque(prompts), []
    active: list[Any] = []
    while waiting or active:
        while waiting and len(active) < batch:
            active.append(engine.submit(waiting.popleft(), params))
            handles.append(active[-1])
        engine.step()
        active = [handle for handle in active if not handle.finished]
    return [handle.output() for handle in handles]


def engines_of(plain: Engine, drafter: str, runs: Sequence[str], **config: Any) -> dict[str, Engine]:
    """An engine for each run, over the target of `plain`, in order where `deterministic` is among the fields."""
    target, made = plain.target.as_deterministic() if "deterministic" in config else plain.target, {}
    for run in runs:
        kind, spec = RUNS[run]
        each = None if kind == "none" else load_any_drafter(drafter if kind == "own" else kind, target)
        made[run] = Engine(target, each, tokenizer=plain.tokenizer, spec=spec, config=EngineConfig(**config))
    return made


def plain_engine(
    target: str, data: Sequence[str], batch: int, tokens: int, limit: int
) -> tuple[Engine, list[Task], Any]:
    """(an engine of the target, the tasks, fields of every other engine's config)."""
    sizes: dict[str, Any] = {"max_batch_size": batch, "prefix_cache": False}
    engine = Engine.from_pretrained(target, config=EngineConfig(**sizes))
    tasks = [Task(path, engine, limit) for path in data]
    longest = max(len(ids) for task in tasks for ids in task.ids)
    return engine, tasks, {**sizes, "max_model_len": longest + tokens + 8, "dtype": engine.target.dtype}


def warm_up(engines: Sequence[Engine], tasks: Sequence[Task], batch: int, tokens: int) -> None:
    """Every batch size up to `batch` and every length of text: rounds are captured, kernels compiled."""
    ids = [ids for task in tasks for ids in task.ids][:batch]
    for engine in engines:
        params = [SamplingParams(max(2, tokens * (i + 1) // len(ids)), ignore_eos=True) for i in range(len(ids))]
        engine.generate(ids, params, progress=False)


def speed_rows(
    target: str,
    drafter: str,
    data: Sequence[str],
    runs: Sequence[str],
    batches: Sequence[int],
    temperatures: Sequence[float],
    limit: int,
    tokens: int,
    turns: int,
) -> Iterator[Row]:
    base, tasks, config = plain_engine(target, data, max(batches), tokens, limit)
    engines = engines_of(base, drafter, ("plain", *(run for run in runs if run != "plain")), **config)
    warm_up(list(engines.values()), tasks, max(batches), tokens)
    exact = base.target.dtype is torch.float32
    for batch, task, temperature in ((b, task, t) for b in batches for task in tasks for t in temperatures):
        params = SamplingParams(tokens, temperature, seed=0)
        before = {name: engine.stats() for name, engine in engines.items()}
        runners = {name: partial(decode, engine, batch, params) for name, engine in engines.items()}
        each = -(-len(task.ids) // turns)
        parts = (task.ids[i : i + each] for i in range(0, len(task.ids), each))
        runs = [run for part in parts for run in run_interleaved(runners, dict.fromkeys(runners, part))]
        timing = run_figures([{"index": at, "runs": run} for at, run in enumerate(runs)], comparable=False)["timing"]
        for name, engine in engines.items():
            stats = engine.stats()
            stats.add(before[name], sign=-1)
            outputs = [run[name]["token_ids"] for run in runs]
            equal = sum(run[name]["token_ids"] == run["plain"]["token_ids"] for run in runs) / len(runs)
            speed, plain = (timing[run]["tokens_per_second"] for run in (name, "plain"))
            must_be = not ON_CPU and torch.cuda.is_available() and name == "adaptive" and task.name in GRADED
            figures: dict[str, object] = {"batch": batch, "T": f"{temperature:g}", "run": name}
            figures["acceptance"] = f"{stats.acceptance_length:.2f}" if stats.drafted_rounds else ""
            figures["by position"] = ", ".join(f"{share:.2f}" for share in stats.accepted_per_position)
            figures |= {"tokens/s": f"{speed:.1f}", "equal": f"{equal:.1%}"}
            figures["to plain"] = f"{speed / plain:.2f}x"
            figures["right"] = task.right(base, outputs) if not temperature else ""
            ok = (equal == 1 or not exact) and (speed > plain or not must_be or batch > 8)
            yield Row(f"{task.name} ({len(task.ids)})", ok=ok, figures=figures)


def exact_rows(target: str, drafter: str, data: Sequence[str], limit: int, tokens: int) -> Iterator[Row]:
    """`deterministic=True`: all outputs are equal."""
    base, tasks, config = plain_engine(target, data[:2], 8, tokens, min(limit, 16))
    engines = engines_of(base, drafter, ("plain", "adaptive", "tree of 16"), **config, deterministic=True)
    for task in tasks:
        made = {name: decode(engine, 8, SamplingParams(tokens), task.ids) for name, engine in engines.items()}
        outputs = {name: [out.token_ids for out in made[name]] for name in made}
        for name in ("adaptive", "tree of 16"):
            yield answers_row(f"{task.name}, deterministic, {name}", outputs[name], outputs["plain"])
