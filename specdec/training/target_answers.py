"""Prompts from files, and the target's own answers to them. A drafter learns from these answers only.

A prompt file holds one JSON object per line, with "messages" (a chat), "question", "prompt" or "turns" (only the first
turn is read). The file's own answers are not read. Every line is checked before any work begins.
"""

import itertools
import json
import logging
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from accelerate import PartialState

from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.errors import ConfigError, counted, shown
from specdec.progress import Stage
from specdec.runtime.calls.handle import Handle
from specdec.text.prompt_files import QUESTION_KEYS, json_lines, parse_problem
from specdec.text.prompts import as_messages
from specdec.text.record_files import append_record, open_records, whole_lines
from specdec.training.packed_rows import Document
from specdec.training.train_settings import TrainSettings

logger = logging.getLogger(__name__)

PROMPT_KEYS = (*QUESTION_KEYS, "messages")
MIN_ANSWER = 16  # tokens of an answer that must fit after a prompt
MAX_SKIPPED = 1000  # prompts in a row without room for an answer, after which the search ends
SAMPLED_EVERY = 8  # every eighth answer is sampled, the others are greedy
BATCHES_QUEUED = 4  # submitted at once: one long answer holds back those after it, but not their computation


Chat = Sequence[Mapping[str, Any]]
"""Messages of a prompt; a question is one message."""


class PromptSource(NamedTuple):
    """Prompts of a training run.

    prompts: training prompts, endless, from each file in turn. num_prompts: their number before they repeat. kept:
    prompts that are not trained on, for the report.
    """

    prompts: Iterator[Chat]
    num_prompts: int
    kept: list[Chat]


def prompt_source(files: Sequence[Path], seed: int) -> PromptSource:
    """Hold out the end of each file. Raises ConfigError for a file that has no other prompts."""
    read = {file.resolve(): read_prompt_file(file) for file in files}
    kept = [prompts[-max(1, min(200, len(prompts) // 10)) :] for prompts in read.values()]
    held_out = {json.dumps(chat) for group in kept for chat in group}
    trained: dict[Path, list[Chat]] = {}
    for path, prompts in read.items():
        trained[path] = [chat for chat in prompts if json.dumps(chat) not in held_out]
        if not trained[path]:
            raise ConfigError(f"{path}: all its prompts are among those held out for the report; give others")
    sources: list[Iterator[Chat]] = []
    for turn, file in enumerate(files):  # a file given twice is asked twice, in another order
        train = trained[file.resolve()].copy()
        random.Random(seed + turn).shuffle(train)
        sources.append(itertools.cycle(train))
    turns = itertools.chain.from_iterable(zip(*sources, strict=False))
    reported = [p for group in itertools.zip_longest(*kept) for p in group if p is not None]
    return PromptSource(turns, sum(map(len, trained.values())), reported)


def warn_of_repetition(answers: int, prompts: int) -> None:
    """Warn if prompts are answered again: most answers are greedy, so they are the same again."""
    if answers > prompts:
        logger.warning(
            "--answers %d of %d prompts: each is answered %.1f times, mostly with the same text, which teaches nothing "
            "new; give more prompts, or --answers %d",
            answers,
            prompts,
            answers / prompts,
            prompts,
        )


def read_prompt_file(path: Path) -> list[Chat]:
    """The prompts of a file, at least two. Raises ConfigError, which names the first bad line."""
    if not path.is_file():
        what = "a file is expected, which a resumed run reads again" if path.exists() else "no such file"
        raise ConfigError(f"--prompts {path}: {what}")
    prompts = [_chat_of(record, f"{path}:{number}") for number, record in json_lines(path)]
    if len(prompts) < 2:
        raise ConfigError(
            f"{path} holds {counted(len(prompts), 'prompt')}; at least 2 are needed, since one is kept for the report"
        )
    return prompts


def _chat_of(record: dict[str, Any], where: str) -> Chat:
    """The "messages" of an object without the answers at their end, which the target writes; else its question as a
    message. Raises ConfigError, whose text begins with `where`."""
    given = [key for key in PROMPT_KEYS if record.get(key) is not None]
    if not given:
        keys = f"{', '.join(PROMPT_KEYS)} is expected; keys are {sorted(record)}"
        raise ConfigError(f"{where}: an object with one of {keys}")
    chat: Chat = []
    if given != ["messages"]:
        question = parse_problem({key: record.get(key) for key in QUESTION_KEYS}, where)
        chat = [{"role": "user", "content": question.text.strip()}]
    if "messages" in given:
        try:
            chat = as_messages(record["messages"])
        except ConfigError as error:
            raise ConfigError(f"{where}: 'messages': {error}") from error
        asked = [at for at, message in enumerate(chat, start=1) if message["role"] != "assistant"]
        if not asked:
            raise ConfigError(f"{where}: 'messages' are all the assistant's; one that it answers is expected")
        chat = chat[: asked[-1]]
    return chat


def encode(engine: Engine, chat: Chat) -> list[int]:
    """Token ids of a prompt, like a user's prompt. Without a chat template only the last message is read."""
    if getattr(engine.tokenizer, "chat_template", None):
        return engine.chat_prompt(chat)
    content = chat[-1].get("content")
    if not isinstance(content, str):
        raise ConfigError(f"the last message is {shown(content)}; text is expected where there is no chat template")
    return engine.chat_prompt(content.strip())


def collect_answers(engine: Engine, prompts: Iterator[Chat], settings: TrainSettings, stage: Stage) -> None:
    """Let each process append the answers to its share of the prompts to a file of its own, until the file has its
    share of `settings.answers`, or `settings.answer_minutes` have passed, counting earlier calls."""
    state = PartialState()
    path = settings.out / "training" / f"answers-{state.process_index}.jsonl"
    count, seconds = -(-settings.answers // state.num_processes), 60 * settings.answer_minutes
    lines = whole_lines(path)
    done, spent = len(lines), json.loads(lines[-1])["seconds"] if lines else 0.0
    # prompts have a fixed order, so the first `done` prompts are answered
    mine = itertools.islice(prompts, state.process_index, None, state.num_processes)
    waiting = itertools.islice(fitting_prompts(engine, mine, settings.length), done, None)
    began = time.perf_counter() - spent
    handles: deque[Handle] = deque()
    stage.update(max(done / count, spent / seconds), counted(done, "answer"))
    with open_records(path) as file:
        while done < count and (not done or time.perf_counter() - began < seconds):
            queue = range(done + len(handles), min(done + BATCHES_QUEUED * settings.batch, count))
            for number, prompt in zip(queue, waiting, strict=False):
                params = SamplingParams(
                    max_new_tokens=min(settings.max_new_tokens, settings.length - len(prompt)),
                    temperature=settings.temperature if number % SAMPLED_EVERY == SAMPLED_EVERY - 1 else 0.0,
                    seed=settings.seed + state.process_index * 10**6 + number,
                )
                handles.append(engine.submit(prompt, params))
            out = handles.popleft().output()  # the others advance meanwhile
            took = time.perf_counter() - began
            append_record(file, {"prompt": out.prompt_token_ids, "answer": out.token_ids, "seconds": round(took, 1)})
            done += 1
            stage.update(max(done / count, took / seconds), counted(done, "answer"))
    for handle in handles:
        handle.abort()


def fitting_prompts(engine: Engine, prompts: Iterable[Chat], length: int) -> Iterator[list[int]]:
    """Token ids of the prompts that leave room for an answer. Raises ConfigError if none does."""
    skipped, shortest = 0, 0
    for prompt in prompts:
        ids = encode(engine, prompt)
        if len(ids) + MIN_ANSWER <= length:
            skipped = 0
            yield ids
            continue
        skipped, shortest = skipped + 1, min(shortest, len(ids)) if skipped else len(ids)
        if skipped == MAX_SKIPPED:
            raise ConfigError(
                f"--length {length}: {skipped} prompts in a row leave less than {MIN_ANSWER} tokens for an answer; the "
                f"shortest has {shortest} with its chat template; give --length {shortest + 4 * MIN_ANSWER} or more"
            )


def read_answers(folder: Path, length: int) -> list[Document]:
    """The answers of all processes under a folder, if they fit a row."""
    records = [json.loads(line) for path in sorted(folder.glob("answers*.jsonl")) for line in whole_lines(path)]
    pairs = [(r["prompt"], r["answer"]) for r in records]
    return [(np.array(p + a, np.int32), len(p)) for p, a in pairs if len(p) + len(a) <= length]
