"""The tasks that can be evaluated, by name: where their problems come from and how they are put to a model.

Only GSM8K's answers are graded. HumanEval's programs are not executed and MT-bench's answers are not judged: those
tasks, and Spec-Bench, are prompts on which speed and acceptance are measured. GSM8K's question is the user's turn under
a chat template; without one it follows worked examples of our own making: a line a step, then `#### n`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, first_line, require_one_of
from specdec.evaluation.gsm8k_report import final_number
from specdec.models.bundled import BUNDLED_DIR, HELD_OUT_PROBLEMS
from specdec.text.prompt_files import Problem, read_prompts
from specdec.text.prompts import chat_ids

EXEMPLARS = read_prompts(BUNDLED_DIR / "gsm8k_exemplars.jsonl")
NEXT_PROBLEM = "Question:"
"""Ends an answer after worked examples: without it a model goes on to make up the next problem."""


def question_text(question: str, chat: bool, shots: int, instruction: str) -> str:
    """One problem after `shots` worked examples, with `instruction` on a line after it; `chat`: as a user's turn."""
    text = f"{question}\n{instruction}" if instruction else question
    if chat and not shots:
        return text
    solved = [f"Question: {problem.text}\nAnswer: {problem.answer}\n\n" for problem in EXEMPLARS[:shots]]
    return f"{''.join(solved)}Question: {text}\nAnswer:"


def load_problems(data: str) -> tuple[str, list[Problem]]:
    """Source of the problems, in words, and the problems. data: "bundled", "hub" or a JSONL file."""
    if data == "hub":
        source, problems = "openai/gsm8k, test split, from the hub", _from_hub()
    elif data == "bundled":
        source, problems = "bundled generated problems, held out", read_prompts(HELD_OUT_PROBLEMS)
    else:
        source, problems = f"file {Path(data).name}", read_prompts(data)
    for number, problem in enumerate(problems, start=1):
        if final_number(problem.answer or "") is None:
            raise ConfigError(f"{source}: problem {number} has no 'answer' with '#### n'; GSM8K's fields are expected")
    return source, [Problem(problem.turns[:1], problem.answer) for problem in problems]


def _from_hub() -> list[Problem]:
    try:
        import datasets

        rows = list(datasets.load_dataset("openai/gsm8k", "main", split="test"))
    except ImportError as error:
        raise ConfigError(
            "data='hub' needs the package datasets: pip install 'specdec-runtime[datasets]', or give a JSONL file"
        ) from error
    except Exception as error:  # no network, a broken cache, ...: they have no common base
        raise ConfigError(f"data='hub': openai/gsm8k did not load ({first_line(error)}); give a JSONL file") from error
    return [Problem((row["question"],), row["answer"]) for row in rows]


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
