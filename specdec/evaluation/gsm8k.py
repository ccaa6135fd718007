"""GSM8K: where its problems come from, and the prompts made of them.

A tokenizer with a chat template gets the bare question as a user turn; without one, worked examples in plain text. The
examples are of our own making, in the style of the data: a line a step, then `#### n`.
"""

from pathlib import Path
from typing import Any

from specdec.errors import ConfigError
from specdec.evaluation.bench import BenchPrompt, read_prompts
from specdec.evaluation.scoring import final_number
from specdec.models.bundled import BUNDLED_DIR, HELD_OUT_PROBLEMS
from specdec.text.prompts import chat_ids

EXEMPLARS = read_prompts(BUNDLED_DIR / "gsm8k_exemplars.jsonl")
NEXT_PROBLEM = "Question:"
"""Ends an answer behind worked examples: without it a model goes on to make up the next problem."""


def prompt_ids(tokenizer: Any, question: str, chat: bool, shots: int, instruction: str) -> list[int]:
    """One problem behind `shots` worked examples, with `instruction` on a line behind it; `chat`: as a user's turn."""
    text = f"{question}\n{instruction}" if instruction else question
    if shots or not chat:
        solved = [f"Question: {p.text}\nAnswer: {p.answer}\n\n" for p in EXEMPLARS[:shots]]
        text = f"{''.join(solved)}Question: {text}\nAnswer:"
    return chat_ids(tokenizer, [{"role": "user", "content": text}]) if chat else list(tokenizer(text)["input_ids"])


def load_problems(data: str, limit: int = 0) -> tuple[str, list[BenchPrompt]]:
    """Where they are from, in words, and the problems. data: "bundled", "hub" or a JSONL file; limit 0: all."""
    if data == "hub":
        source, problems = "openai/gsm8k, test split, from the hub", _from_hub(limit)
    elif data == "bundled":
        source, problems = "bundled generated problems, held out", read_prompts(HELD_OUT_PROBLEMS, limit)
    else:
        source, problems = f"file {Path(data).name}", read_prompts(Path(data), limit)
    for number, problem in enumerate(problems, start=1):
        if final_number(problem.answer or "") is None:
            raise ConfigError(f"{source}: problem {number} has no 'answer' with '#### n'; GSM8K's fields are wanted")
    return source, problems


def _from_hub(limit: int) -> list[BenchPrompt]:
    try:
        import datasets

        rows = list(datasets.load_dataset("openai/gsm8k", "main", split="test"))
    except ImportError as error:
        wanted = "needs the package datasets: pip install 'specdec-runtime[datasets]'"
        raise ConfigError(f"data='hub' {wanted}, or give a JSONL file") from error
    except Exception as error:  # no network, a broken cache, ...: they have no common base
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        raise ConfigError(f"data='hub': openai/gsm8k did not load ({reason}); give a JSONL file") from error
    return [BenchPrompt(row["question"], row["answer"]) for row in rows[: limit or None]]
