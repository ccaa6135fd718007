"""GSM8K: where its problems come from, and how they are put to a model.

A tokenizer with a chat template gets the bare question as a user turn; without one, worked examples in plain text. The
examples are of our own making, in the style of the data: a line a step, then `#### n`.
"""

from pathlib import Path

from specdec.errors import ConfigError, first_line
from specdec.evaluation.scoring import final_number
from specdec.models.bundled import BUNDLED_DIR, HELD_OUT_PROBLEMS
from specdec.text.prompt_files import Problem, read_prompts

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
    """Where they are from, in words, and the problems. data: "bundled", "hub" or a JSONL file."""
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
        wanted = "needs the package datasets: pip install 'specdec-runtime[datasets]'"
        raise ConfigError(f"data='hub' {wanted}, or give a JSONL file") from error
    except Exception as error:  # no network, a broken cache, ...: they have no common base
        raise ConfigError(f"data='hub': openai/gsm8k did not load ({first_line(error)}); give a JSONL file") from error
    return [Problem((row["question"],), row["answer"]) for row in rows]
