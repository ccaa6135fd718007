"""The tasks that can be evaluated, one per data set, and how their problems are given to a model.

Only GSM8K's answers are graded. HumanEval's programs are not executed and MT-bench's answers are not judged: those
tasks, Spec-Bench and SPEED-Bench are prompts on which speed and acceptance are measured. With a chat template, GSM8K's
question is the user's turn. Without one it follows worked examples of our own: one line per step, then `#### n`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from specdec.models.published import BUNDLED_DIR
from specdec.text.prompt_files import Problem, read_prompts
from specdec.text.prompts import chat_ids

EXEMPLARS = read_prompts(BUNDLED_DIR / "gsm8k_exemplars.jsonl")
NEXT_PROBLEM = "Question:"
"""Stop string after worked examples: without it a model goes on to invent the next problem."""


def question_text(question: str, chat: bool, shots: int, instruction: str) -> str:
    """One problem after `shots` worked examples, with `instruction` on a line after it; `chat`: as a user's turn."""
    text = f"{question}\n{instruction}" if instruction else question
    if chat and not shots:
        return text
    solved = [f"Question: {problem.text}\nAnswer: {problem.answer}\n\n" for problem in EXEMPLARS[:shots]]
    return f"{''.join(solved)}Question: {text}\nAnswer:"


def choose(problems: list[Problem], count: int) -> list[int]:
    """Choose `count` problems: the first of each category in turn, in the order of the data.

    So a small evaluation covers every category, and a larger one contains it.
    """
    seen: Counter[str | None] = Counter()
    places: list[tuple[int, int]] = []
    for index, problem in enumerate(problems):
        seen[problem.category] += 1
        places.append((seen[problem.category], index))
    return sorted(index for _, index in sorted(places)[:count])


def batches_of(problems: Sequence[Problem], chosen: Iterable[int], size: int) -> list[tuple[int, ...]]:
    """The chosen problems in batches of at most `size`, no batch spanning two categories, since times are per
    category."""
    members: dict[str | None, list[int]] = {}
    for index in chosen:
        members.setdefault(problems[index].category, []).append(index)
    return [tuple(part[i : i + size]) for part in members.values() for i in range(0, len(part), size)]


def dialogue_ids(tokenizer: Any, turns: list[str], answers: list[str], chat: bool) -> list[int]:
    """Token ids of a dialogue up to the next answer; without a chat template, its texts line by line."""
    if not chat:
        texts = [text for pair in zip(turns, [*answers, ""], strict=True) for text in pair][:-1]
        return list(tokenizer("\n\n".join(texts))["input_ids"])
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return chat_ids(tokenizer, messages)
