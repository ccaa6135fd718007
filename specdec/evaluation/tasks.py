"""The tasks that can be evaluated, by name: where their problems come from and what is asked of them.

Only GSM8K's answers are graded. HumanEval's programs are not executed and MT-bench's answers are not judged: those
tasks, and Spec-Bench, are prompts on which speed and acceptance are measured.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, require_one_of
from specdec.evaluation.gsm8k import load_problems
from specdec.text.prompt_files import Problem, read_prompts
from specdec.text.prompts import chat_ids

MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True, slots=True)
class Task:
    """load: data in words, and the problems. graded: there are reference answers to compare numbers with."""

    name: str
    load: Callable[[str], tuple[str, list[Problem]]]
    graded: bool = False
    note: str = ""


def _from_file(name: str, data: str) -> tuple[str, list[Problem]]:
    """Spec-Bench has six groups, as it reports them: MT-bench's eight categories are one."""
    if data == "auto":
        raise ConfigError(f"{name} needs its prompts: give data, a JSONL file with 'turns', 'prompt' or 'question'")
    joined = MT_BENCH_CATEGORIES if name == "spec-bench" else ()
    problems = [replace(p, category="mt_bench") if p.category in joined else p for p in read_prompts(data)]
    return f"file {Path(data).name}", problems


UNGRADED = {
    "mt-bench": "answers are not judged",
    "humaneval": "programs are not executed",
    "spec-bench": "answers are not graded",
}
TASKS = {"gsm8k": Task("gsm8k", load_problems, graded=True)} | {
    name: Task(name, partial(_from_file, name), note=f"{reason}: speed and acceptance only")
    for name, reason in UNGRADED.items()
}


def find_task(name: str) -> Task:
    """The task of a name. Raises ConfigError with the names there are."""
    require_one_of("task", name, TASKS)
    return TASKS[name]


def choose(problems: list[Problem], count: int) -> list[int]:
    """Which problems an evaluation of `count` takes: the first of each category in turn, in the order of the data.

    So a small evaluation has something of every category, and a larger one has all that a smaller one had.
    """
    seen: Counter[str | None] = Counter()
    places: list[tuple[int, int]] = []
    for index, problem in enumerate(problems):
        seen[problem.category] += 1
        places.append((seen[problem.category], index))
    return sorted(index for _, index in sorted(places)[:count])


def cut(problems: list[Problem], chosen: list[int], size: int) -> list[tuple[int, ...]]:
    """The chosen problems in batches of at most `size`, none over two categories: each category has its own time."""
    members: dict[str | None, list[int]] = {}
    for index in chosen:
        members.setdefault(problems[index].category, []).append(index)
    return [tuple(part[i : i + size]) for part in members.values() for i in range(0, len(part), size)]


def dialogue_ids(tokenizer: Any, turns: list[str], answers: list[str], chat: bool) -> list[int]:
    """Token ids of a dialogue up to where the next answer begins; without a chat template, its texts line by line."""
    if not chat:
        texts = [text for pair in zip(turns, [*answers, ""], strict=True) for text in pair][:-1]
        return list(tokenizer("\n\n".join(texts))["input_ids"])
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return chat_ids(tokenizer, messages)
