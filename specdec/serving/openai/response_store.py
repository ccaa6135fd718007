"""Responses that are kept to be read and continued, in memory: the oldest make room for new ones.

What one key has stored no other key can read, continue or delete. Each is kept as the bytes of its JSON, so that the
bound on bytes is one on memory: as objects they take up to seven times as much.
"""

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_PER_KEY = 512
"""Responses that are kept for one API key."""
MAX_KEY_BYTES = 16 << 20
"""Bytes of the responses that are kept for one API key."""
MAX_RESPONSES = 4096
"""Responses that are kept for all keys together."""
MAX_BYTES = 64 << 20
"""Bytes of the responses that are kept for all keys together."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response.

    response: the answer that was sent. inputs: its own input items. messages: the whole chat, its answer included.
    """

    response: dict[str, Any]
    inputs: list[dict[str, Any]]
    messages: list[dict[str, Any]]

    def to_bytes(self) -> bytes:
        parts = [self.response, self.inputs, self.messages]
        # half a surrogate pair, which clients and models may write, stays what it is
        return json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")

    @classmethod
    def from_bytes(cls, kept: bytes) -> "StoredResponse":
        return cls(*json.loads(kept.decode("utf-8", "surrogatepass")))


class ResponseStore:
    """Used by the event loop, and by threads that put whole answers into words."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()  # by key and id, oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._kept.values()))

    def get(self, key: str, response_id: str) -> StoredResponse | None:
        with self._lock:
            found = self._kept.get((key, response_id))
            if found is None:
                return None
            self._kept.move_to_end((key, response_id))
        return StoredResponse.from_bytes(found)

    def put(self, key: str, stored: StoredResponse) -> None:
        """Keep it, unless it alone is larger than a key may have."""
        kept = stored.to_bytes()
        if len(kept) > min(MAX_KEY_BYTES, MAX_BYTES):
            return
        with self._lock:
            self._kept[key, stored.response["id"]] = kept
            self._make_room([place for place in self._kept if place[0] == key], MAX_PER_KEY, MAX_KEY_BYTES)
            self._make_room(list(self._kept), MAX_RESPONSES, MAX_BYTES)

    def delete(self, key: str, response_id: str) -> bool:
        """-> was it there?"""
        with self._lock:
            return self._kept.pop((key, response_id), None) is not None

    def _make_room(self, places: list[tuple[str, str]], max_count: int, max_bytes: int) -> None:
        """Drop the first of these until that many, and that many bytes, are left."""
        count, left = len(places), sum(len(self._kept[place]) for place in places)
        for place in places:
            if count <= max_count and left <= max_bytes:
                return
            count, left = count - 1, left - len(self._kept.pop(place))
