"""Keeps responses in memory, so that clients can read and continue them. The least recently used are dropped first.

Responses of one API key cannot be read, continued or deleted with another. Each response is kept as the bytes of its
JSON, so that the limit on bytes limits memory: as objects, responses would take up to seven times as much.
"""

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_KEY_BYTES = 16 << 20
"""Most bytes of responses kept for one API key."""
MAX_BYTES = 64 << 20
"""Most bytes of responses kept for all keys together."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response.

    response: the answer that was sent. inputs: the request's input items. messages: the whole chat with the answer.
    """

    response: dict[str, Any]
    inputs: list[dict[str, Any]]
    messages: list[dict[str, Any]]

    def to_bytes(self) -> bytes:
        parts = [self.response, self.inputs, self.messages]
        # lone surrogates, which models may write, are preserved
        return json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")

    @classmethod
    def from_bytes(cls, kept: bytes) -> "StoredResponse":
        return cls(*json.loads(kept.decode("utf-8", "surrogatepass")))


class ResponseStore:
    """The store. Used by the event loop, and by threads that build whole answers."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()  # by key and id, least recently used first
        self._lock = threading.Lock()

    def get(self, key: str, response_id: str) -> StoredResponse | None:
        with self._lock:
            found = self._kept.get((key, response_id))
            if found is None:
                return None
            self._kept.move_to_end((key, response_id))
        return StoredResponse.from_bytes(found)

    def put(self, key: str, stored: StoredResponse) -> None:
        """Store a response, unless it alone exceeds the limit of a key."""
        kept = stored.to_bytes()
        if len(kept) > min(MAX_KEY_BYTES, MAX_BYTES):
            return
        with self._lock:
            self._kept[key, stored.response["id"]] = kept
            self._make_room([place for place in self._kept if place[0] == key], MAX_KEY_BYTES)
            self._make_room(list(self._kept), MAX_BYTES)

    def delete(self, key: str, response_id: str) -> bool:
        """Delete a response. Returns whether it existed."""
        with self._lock:
            return self._kept.pop((key, response_id), None) is not None

    def _make_room(self, places: list[tuple[str, str]], max_bytes: int) -> None:
        """Drop the first of these responses until the others have at most `max_bytes` bytes."""
        left = sum(len(self._kept[place]) for place in places)
        for place in places:
            if left <= max_bytes:
                return
            left -= len(self._kept.pop(place))
