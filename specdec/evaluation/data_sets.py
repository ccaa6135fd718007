"""The tasks that can be evaluated, one per published data set: where their problems are, and how a model is asked.

    gsm8k        word problems, whose answers end in `#### n`
    mt-bench     two-turn dialogues in eight categories
    humaneval    Python functions to complete
    spec-bench   six groups of tasks; MT-bench's eight categories are one
    speed-bench  SPEED-Bench's qualitative split, eleven categories; another split is read from its own file

Only GSM8K's answers are graded. HumanEval's programs are not executed and MT-bench's answers are not judged: those
tasks, Spec-Bench and SPEED-Bench are prompts on which speed and acceptance are measured. SPEED-Bench was read by its
published schema and has not been run with the published data. With a chat template, GSM8K's question is the user's
turn. Without one it follows worked examples of our own: one line per step, then `#### n`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, first_line, require_one_of, shown
from specdec.evaluation.accuracy_report import final_number
from specdec.models.published import BUNDLED_DIR, HELD_OUT_PROBLEMS
from specdec.text.prompt_files import Problem, json_lines, parse_problem, read_prompts
from specdec.text.prompts import chat_ids

MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH_CATEGORIES = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Categories of Spec-Bench besides those of MT-bench."""
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""Prefix of SPEED-Bench's placeholder turns, which its own prepare script fills in."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """Places of a published data set.

    files: names of its file in a folder, or in a subfolder named like the data set. hub: arguments of
    `datasets.load_dataset`, and the split; None: it is not on the hub. note: a limit of what is measured. graded: has
    reference answers, whose numbers are compared.
    """

    files: Sequence[str]
    hub: tuple[tuple[str, ...], str] | None
    note: str = ""
    graded: bool = False


DATA_SETS = {
    "gsm8k": DataSet(
        ("test.jsonl", "gsm8k_test.jsonl", "test_first660.jsonl"),
        (("openai/gsm8k", "main"), "test"),
        graded=True,
    ),
    "mt-bench": DataSet(
        ("question.jsonl", "mt_bench.jsonl"),
        (("HuggingFaceH4/mt_bench_prompts",), "train"),
        "answers are not judged: speed and acceptance only",
    ),
    "humaneval": DataSet(
        ("HumanEval.jsonl", "humaneval.jsonl"),
        (("openai/openai_humaneval",), "test"),
        "programs are not executed: speed and acceptance only",
    ),
    "spec-bench": DataSet(
        ("question.jsonl", "spec_bench.jsonl"),
        None,
        "answers are not graded: speed and acceptance only",
    ),
    "speed-bench": DataSet(
        ("qualitative.jsonl", "speed_bench.jsonl"),
        (("nvidia/SPEED-Bench", "qualitative"), "test"),
        "answers are not graded: speed and acceptance only; read by its schema, not run with the published data",
    ),
}


def load_data(name: str, data: str) -> tuple[str, list[Problem]]:
    """Source of the problems, in words, and the problems. data: "hub", "bundled" (gsm8k), a JSONL file, or a folder."""
    require_one_of("data", name, DATA_SETS)
    if data == "auto":
        raise ConfigError(f"{name} needs its prompts: give data, a JSONL file or a folder with it, or 'hub'")
    if data == "hub":
        source, rows = _from_hub(name)
    else:
        path = _file_in(name, Path(data)) if Path(data).is_dir() else Path(data)
        source = f"file {path.name}"
        if data == "bundled" and name == "gsm8k":
            source, path = "bundled generated problems, held out", HELD_OUT_PROBLEMS
        rows = [(f"{path}:{line}", row) for line, row in json_lines(path)]
    problems = [_problem(name, row, where) for where, row in rows]
    if not problems:
        raise ConfigError(f"data={data!r} holds no prompt of {name}; a line of JSON for each is expected")
    _require_own_categories(name, data, {problem.category for problem in problems})
    for (where, _), problem in zip(rows, problems, strict=True):
        if DATA_SETS[name].graded and final_number(problem.answer or "") is None:
            raise ConfigError(f"{where}: no 'answer' with '#### n'; GSM8K's fields are expected")
    return source, problems


def _require_own_categories(name: str, data: str, categories: set[str | None]) -> None:
    """MT-bench and Spec-Bench are published in files of one name, `question.jsonl`. Raises ConfigError."""
    others = categories.intersection(SPEC_BENCH_CATEGORIES) if name == "mt-bench" else set()
    if others:
        is_of, meant = f"has Spec-Bench's category {min(map(str, others))!r}", "spec-bench"
    elif name == "spec-bench" and categories == {"mt_bench"}:
        is_of, meant = "has MT-bench's categories alone", "mt-bench"
    else:
        return
    raise ConfigError(f"data={data!r} {is_of}; name {meant} in place of {name}, or give another file")


def _file_in(name: str, folder: Path) -> Path:
    subs = dict.fromkeys((name.replace("-", "_"), name, ""))
    known = [folder / sub / file for sub in subs for file in DATA_SETS[name].files]
    found = next((path for path in known if path.is_file()), None)
    if found is None:
        names = ", ".join(str(path.relative_to(folder)) for path in known)
        raise ConfigError(f"data={str(folder)!r} holds no file of {name}; one of {names} is expected, or give the file")
    return found


def _from_hub(name: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    place, instead = DATA_SETS[name].hub, "give its JSONL file, or a folder with it"
    if place is None:
        raise ConfigError(f"{name} is not on the hub; {instead}")
    arguments, split = place
    try:
        import datasets

        rows = list(datasets.load_dataset(*arguments, split=split))
    except ImportError as error:
        needed = "needs the package datasets: pip install 'specdec-runtime[datasets]'"
        raise ConfigError(f"{name} from the hub {needed}; or {instead}") from error
    except Exception as error:  # no network, a broken cache, ...: no common base class
        why = f"{arguments[0]} did not load ({first_line(error)})"
        raise ConfigError(f"{name} from the hub: {why}; {instead}") from error
    return f"{arguments[0]}, {split} split, from the hub", [(f"row {at}", row) for at, row in enumerate(rows)]


def _problem(name: str, row: Mapping[str, Any], where: str) -> Problem:
    """The problem in a row of the published file or of the hub's data."""
    fields = dict(row)
    if name == "mt-bench" and isinstance(fields.get("prompt"), list):  # as the hub has it
        fields["turns"] = fields.pop("prompt")
    if name == "speed-bench" and fields.get("messages") is not None:  # as its prepare script writes it
        fields["turns"] = _user_turns(fields["messages"], where)
    problem = parse_problem(fields, where)
    if name == "speed-bench" and any(turn.startswith(PLACEHOLDER) for turn in problem.turns):
        raise ConfigError(f"{where}: the turns are placeholders; run SPEED-Bench's prepare script, and give its file")
    if name == "gsm8k":
        return Problem(problem.turns[:1], problem.answer)
    joined = name == "spec-bench" and problem.category in MT_BENCH_CATEGORIES
    return replace(problem, category="mt_bench") if joined else problem


def _user_turns(messages: Any, where: str) -> list[str]:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: 'messages' is {shown(messages)}; a list of a user's turns is expected")
    users = [message for message in messages if isinstance(message, dict) and message.get("role") == "user"]
    texts = [message["content"] for message in users if isinstance(message.get("content"), str)]
    if len(texts) != len(messages):
        raise ConfigError(f"{where}: 'messages' holds one that is not a user's text; only user turns are read")
    return texts


EXEMPLARS = read_prompts(BUNDLED_DIR / "gsm8k_exemplars.jsonl")
NEXT_PROBLEM = "Question:"
"""Stop string after worked examples: without it a model continues with an invented problem."""


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
