"""Documents of prompt and answer, packed into rows of one length, and the masks that keep them apart.

Invariant: a document never spans two rows, and position 0 starts a new document.
"""

from typing import NamedTuple

import numpy as np
import torch

from specdec.attention.dense import bias_of
from specdec.attention.draft_attention import same_document

# kind of each token; 0 is padding
QUESTION = 1
ANSWER = 2
MIN_ROOM = 40  # tokens; a row with less room takes no further document
Document = tuple[np.ndarray, int]  # token ids, number of those that belong to the prompt


class PackedRows(NamedTuple):
    """Packed rows, [B, T] each: token ids, position in the document, kind (0 padding, QUESTION or ANSWER)."""

    ids: torch.Tensor
    pos: torch.Tensor
    kind: torch.Tensor


def pack_documents(documents: list[Document], length: int) -> list[list[Document]]:
    """First fit, longest first: rows of whole documents."""
    rows: list[list[Document]] = []
    room: list[int] = []
    first = 0  # rows before this one have less than MIN_ROOM
    for doc in sorted(documents, key=lambda d: -len(d[0])):
        row = next((i for i in range(first, len(rows)) if room[i] >= len(doc[0])), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(length)
        rows[row].append(doc)
        room[row] -= len(doc[0])
        while first < len(rows) and room[first] < MIN_ROOM:
            first += 1
    return rows


def to_arrays(
    rows: list[list[Document]], length: int, dtype: type[np.signedinteger] = np.int32
) -> dict[str, np.ndarray]:
    """ids, positions inside the document, and kind; padding after the last document counts as another document."""
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
    arrays = to_arrays(pack_documents(documents, length), length)
    return PackedRows(*(torch.from_numpy(arrays[name]) for name in PackedRows._fields))


def predicted_rows(batch: PackedRows, steps: int, ahead: int) -> list[torch.Tensor]:
    """[B, T] for each draft step t: is token i + ahead + t, which row i predicts, of an answer in its own document?"""
    return [
        (batch.pos.roll(-shift, 1) == batch.pos + shift) & (batch.kind.roll(-shift, 1) == ANSWER)
        for shift in range(ahead, ahead + steps)
    ]


def causal_mask(pos: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [B, 1, T, T] of packed rows for a layer that sees `window` keys, itself included; None: all
    keys."""
    same, distance = same_document(pos)
    seen = same & (distance >= 0)
    return bias_of(seen if window is None else seen & (distance < window)).to(dtype)
