"""Responses that were answered, in memory, for `previous_response_id` and to be read again.

    one API key     at most MAX_PER_KEY responses and MAX_KEY_BYTES; its oldest make room
    all together    at most MAX_RESPONSES and MAX_BYTES; the oldest of all make room

What one key has stored no other key can read, continue or delete. Nothing outlives the process.
"""

import json
from collections import OrderedDict
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

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[Stored, int]] = OrderedDict()  # by key and id, oldest first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self._kept.values())

    def get(self, key: str, response_id: str) -> Stored | None:
        found = self._kept.get((key, response_id))
        if found is None:
            return None
        self._kept.move_to_end((key, response_id))
        return found[0]

    def put(self, key: str, stored: Stored) -> None:
        """Keep it, unless it alone is larger than a key may have."""
        size = stored.num_bytes()
        if size > min(MAX_KEY_BYTES, MAX_BYTES):
            return
        self._kept[key, stored.response["id"]] = stored, size
        self._make_room([place for place in self._kept if place[0] == key], MAX_PER_KEY, MAX_KEY_BYTES)
        self._make_room(list(self._kept), MAX_RESPONSES, MAX_BYTES)

    def delete(self, key: str, response_id: str) -> bool:
        """-> was it there?"""
        return self._kept.pop((key, response_id), None) is not None

    def _make_room(self, places: list[tuple[str, str]], most: int, most_bytes: int) -> None:
        """Drop the first of these until that many, and that many bytes, are left."""
        count, left = len(places), sum(self._kept[place][1] for place in places)
        for place in places:
            if count <= most and left <= most_bytes:
                return
            count, left = count - 1, left - self._kept.pop(place)[1]
