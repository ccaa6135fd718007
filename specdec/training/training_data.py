"""Training data for drafters of any target: prompts, the target's own answers to them, packed rows.

A prompt file holds one JSON object a line with "messages" (a chat), or "question", "prompt" or "turns" (its first one).
Answers are kept a line each, a batch at a time, so a run that was stopped goes on where it was. It knows nothing of
drafters.

Invariant: a document never spans two rows, and position 0 starts a new document.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.text.prompt_files import json_lines
from specdec.training.training_progress import Stage

QUESTION, ANSWER = 1, 2  # kind of each token; 0 is padding
PROMPT_KEYS = ("question", "prompt", "turns", "messages")
ROOM = 16  # tokens of an answer that must fit behind a prompt
MOST_SKIPPED = 1000  # prompts in a row without ROOM: no more are looked at
SAMPLED_EVERY = 8  # one answer in so many is sampled, the others are greedy
Document = tuple[np.ndarray, int]  # token ids, number of those that belong to the prompt


class PackedRows(NamedTuple):
    """Packed rows, [B, T] each: token ids, position in the document, kind (0 padding, QUESTION or ANSWER)."""

    ids: torch.Tensor
    pos: torch.Tensor
    kind: torch.Tensor


def prompt_source(files: Sequence[Path], seed: int) -> tuple[Iterator[dict[str, Any]], list[dict[str, Any]]]:
    """(training prompts, taking turns between the sources for ever; prompts that are kept for the report)."""
    sources: list[Iterator[dict[str, Any]]] = []
    kept: list[list[dict[str, Any]]] = []
    for turn, file in enumerate(files):  # a file given twice counts twice, in another order
        lines = read_prompt_file(file)
        cut = max(1, min(200, len(lines) // 10))
        train = lines[:-cut]
        random.Random(seed + turn).shuffle(train)
        sources.append(itertools.cycle(train))
        kept.append(lines[-cut:])
    turns = itertools.chain.from_iterable(zip(*sources, strict=False))
    return turns, [p for group in itertools.zip_longest(*kept) for p in group if p is not None]


def read_prompt_file(path: Path) -> list[dict[str, Any]]:
    """The objects of a prompt file, at least two. Raises ConfigError with the line that is none."""
    if not path.is_file():
        raise ConfigError(f"--prompts {path}: no such file")
    prompts: list[dict[str, Any]] = []
    for number, record in json_lines(path):
        if not any(record.get(key) for key in PROMPT_KEYS):
            wanted = f"an object with one of {', '.join(PROMPT_KEYS)} is wanted"
            raise ConfigError(f"{path}:{number}: {wanted}; keys are {sorted(record)}")
        prompts.append(record)
    if len(prompts) < 2:
        raise ConfigError(f"{path} holds {len(prompts)} prompts; one is kept aside for the report, so 2 are the least")
    return prompts


def encode(engine: Engine, prompt: dict[str, Any]) -> list[int]:
    """Token ids of a prompt as the engine's user would give it."""
    if "messages" in prompt and getattr(engine.tokenizer, "chat_template", None):
        return engine.chat_prompt(prompt["messages"])
    text = prompt.get("question") or prompt.get("prompt") or (prompt.get("turns") or [None])[0]
    return engine.chat_prompt((text or prompt["messages"][-1]["content"]).strip())


def collect_answers(
    engine: Engine,
    prompts: Iterator[dict[str, Any]],
    path: Path,
    *,
    count: int,
    seconds: float,
    length: int,
    max_new: int,
    temperature: float,
    seed: int,
    stage: Stage,
) -> None:
    """Append the target's answers to `path` until it holds `count` or they took `seconds`, earlier calls included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = _whole_lines(path)
    done, spent = len(lines), json.loads(lines[-1])["seconds"] if lines else 0.0
    # the prompts come in one order, so the first ones have their answers
    waiting = itertools.islice(_fitting(engine, prompts, length), done, None)
    began = time.perf_counter() - spent
    chunk = engine.config.max_batch_size
    stage.update(max(done / count, spent / seconds), f"{done} answers")
    with path.open("a", encoding="utf-8") as file:
        while done < count and time.perf_counter() - began < seconds:
            ids = list(itertools.islice(waiting, min(chunk, count - done)))
            if not ids:
                break
            sampled = [(done + i) % SAMPLED_EVERY == SAMPLED_EVERY - 1 for i in range(len(ids))]
            params = [
                SamplingParams(
                    max_new_tokens=min(max_new, length - len(p)),
                    temperature=temperature if hot else 0.0,
                    seed=seed + done + i,
                )
                for i, (p, hot) in enumerate(zip(ids, sampled, strict=True))
            ]
            for out in engine.generate(ids, params, progress=False):
                took = round(time.perf_counter() - began, 1)
                record = {"prompt": out.prompt_token_ids, "answer": out.token_ids, "seconds": took}
                file.write(json.dumps(record) + "\n")
            file.flush()
            done += len(ids)
            stage.update(max(done / count, (time.perf_counter() - began) / seconds), f"{done} answers")


def _fitting(engine: Engine, prompts: Iterator[dict[str, Any]], length: int) -> Iterator[list[int]]:
    """Token ids of the prompts that leave room for an answer. Raises ConfigError when none does."""
    skipped, shortest = 0, 0
    for prompt in prompts:
        ids = encode(engine, prompt)
        if len(ids) + ROOM <= length:
            skipped = 0
            yield ids
            continue
        skipped, shortest = skipped + 1, min(shortest, len(ids)) if skipped else len(ids)
        if skipped == MOST_SKIPPED:
            raise ConfigError(
                f"--length {length}: {skipped} prompts in a row leave less than {ROOM} tokens for an answer; the "
                f"shortest has {shortest} with its chat template; give --length {shortest + 4 * ROOM} or more"
            )


def _whole_lines(path: Path) -> list[str]:
    """The complete lines of a file that may have been cut off while writing; the torn rest is removed."""
    text = path.read_text("utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, "utf-8")
    return whole.splitlines()


def read_answers(folder: Path, length: int) -> list[Document]:
    """All answers under a folder, whoever collected them, that fit a row."""
    records = [json.loads(line) for path in sorted(folder.glob("answers*.jsonl")) for line in _whole_lines(path)]
    pairs = [(r["prompt"], r["answer"]) for r in records]
    return [(np.array(p + a, np.int32), len(p)) for p, a in pairs if len(p) + len(a) <= length]


def pack(documents: list[Document], length: int) -> list[list[Document]]:
    """First fit, longest first: rows of whole documents."""
    rows: list[list[Document]] = []
    room: list[int] = []
    first = 0  # rows before it are too full for even a short document
    for doc in sorted(documents, key=lambda d: -len(d[0])):
        row = next((i for i in range(first, len(rows)) if room[i] >= len(doc[0])), None)
        if row is None:
            rows.append([])
            room.append(length)
            row = len(rows) - 1
        rows[row].append(doc)
        room[row] -= len(doc[0])
        while first < len(rows) and room[first] < 40:
            first += 1
    return rows


def to_arrays(
    rows: list[list[Document]], length: int, dtype: type[np.signedinteger] = np.int32
) -> dict[str, np.ndarray]:
    """ids, positions inside the document, and kind; the padding behind the last document is one more document."""
    shape = (len(rows), length)
    ids, pos, kind = np.zeros(shape, dtype), np.zeros(shape, dtype), np.zeros(shape, np.uint8)
    for r, row in enumerate(rows):
        at = 0
        for tokens, prompt_len in row:
            end = at + len(tokens)
            ids[r, at:end], pos[r, at:end] = tokens, np.arange(len(tokens))
            kind[r, at : at + prompt_len], kind[r, at + prompt_len : end] = QUESTION, ANSWER
            at = end
        pos[r, at:] = np.arange(length - at)
    return {"ids": ids, "pos": pos, "kind": kind}


def pack_rows(documents: list[Document], length: int) -> PackedRows:
    """Whole documents packed into rows, on the host."""
    arrays = to_arrays(pack(documents, length), length)
    return PackedRows(*(torch.from_numpy(arrays[name]) for name in PackedRows._fields))


def predicted_rows(batch: PackedRows, steps: int, ahead: int) -> list[torch.Tensor]:
    """[B, T] for each step t: does row i predict, as token i + ahead + t, one of an answer in its own document?"""
    found = []
    for shift in range(ahead, ahead + steps):
        inside = batch.pos.roll(-shift, 1) == batch.pos + shift
        found.append(inside & (batch.kind.roll(-shift, 1) == ANSWER))
    return found


def causal_masks(pos: torch.Tensor, window: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Additive masks [B, 1, T, T] of packed rows; a sliding layer sees `window` keys including itself."""
    same, behind = same_document(pos)
    full = same & (behind >= 0)
    return {
        "full_attention": additive(full, dtype),
        "sliding_attention": additive(full & (behind < window), dtype),
    }


def same_document(pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([B, T, T] do query and key share a document, [T, T] how far the key lies behind)."""
    doc = (pos == 0).cumsum(1)
    place = torch.arange(pos.shape[1], device=pos.device)
    return doc[:, :, None] == doc[:, None, :], place[:, None] - place[None, :]


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, T, T] bool -> [B, 1, T, T] of 0 and -inf."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill_(~allowed, float("-inf")).unsqueeze(1)
