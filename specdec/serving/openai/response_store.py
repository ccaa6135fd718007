"""Responses that were answered, in memory, for `previous_response_id` and to be read again.

    one API key     at most MAX_PER_KEY responses and MAX_KEY_BYTES; its oldest make room
    all together    at most MAX_RESPONSES and MAX_BYTES; the oldest of all make room

What one key has stored no other key can read, continue or delete. Nothing outlives the process.
"""

import json
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_PER_KEY, MAX_KEY_BYTES = 512, 16 << 20
MAX_RESPONSES, MAX_BYTES = 4096, 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """response: as it was answered. inputs: its own items. messages: the whole chat, its answer included."""

    response: dict[str, Any]
    inputs: list[dict[str, Any]]
    messages: list[dict[str, Any]]

    def num_bytes(self) -> int:
        return len(json.dumps([self.response, self.inputs, self.messages]))


class ResponseStore:
    """Used on one event loop, so without a lock."""

    def __init__(
        self,
        max_per_key: int = MAX_PER_KEY,
        max_key_bytes: int = MAX_KEY_BYTES,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._limits = max_per_key, max_key_bytes, max_responses, max_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[Stored, int]] = OrderedDict()  # by key and id, oldest first
        self._count: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def get(self, key: str, response_id: str) -> Stored | None:
        found = self._kept.get((key, response_id))
        if found is None:
            return None
        self._kept.move_to_end((key, response_id))
        return found[0]

    def put(self, key: str, stored: Stored) -> None:
        """Keep it, unless it alone is larger than a key may have."""
        size = stored.num_bytes()
        per_key, key_bytes, most, most_bytes = self._limits
        if size > min(key_bytes, most_bytes):
            return
        self._kept[key, stored.response["id"]] = stored, size
        self._count[key] += 1
        self._bytes[key] += size
        while self._count[key] > per_key or self._bytes[key] > key_bytes:
            self._drop(next(place for place in self._kept if place[0] == key))
        while len(self._kept) > most or self.num_bytes > most_bytes:
            self._drop(next(iter(self._kept)))

    def delete(self, key: str, response_id: str) -> bool:
        """-> was it there?"""
        there = (key, response_id) in self._kept
        if there:
            self._drop((key, response_id))
        return there

    def _drop(self, place: tuple[str, str]) -> None:
        _, size = self._kept.pop(place)
        key = place[0]
        self._count[key] -= 1
        self._bytes[key] -= size
        if not self._count[key]:
            del self._count[key], self._bytes[key]
