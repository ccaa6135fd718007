"""State for all routes: the engine, the settings, the model's names, and stored responses.

A stored response can be read and continued with the API key that made it and no other; without keys, by any client that
knows its random id. The least recently used are dropped first. Each is kept in memory as the bytes of its JSON, so that
the limit on bytes limits memory: as objects, responses would take up to seven times as much.
"""

import hashlib
import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Request

from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http.clients import bearer_token
from specdec.serving.http.faults import ApiError
from specdec.serving.server_settings import ServeSettings
from specdec.serving.tools.answer_parser import AnswerParser

MAX_KEY_BYTES = 16 << 20
"""Most bytes of responses kept for one API key."""
MAX_BYTES = 64 << 20
"""Most bytes of responses kept for all keys together."""


class StoredResponse(NamedTuple):
    """A stored response.

    response: the answer that was sent. inputs: the request's input items. messages: the whole chat with the answer.
    """

    response: dict[str, Any]
    inputs: list[dict[str, Any]]
    messages: list[dict[str, Any]]


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
        return StoredResponse(*json.loads(found))

    def put(self, key: str, stored: StoredResponse) -> None:
        """Store a response, unless it alone exceeds the limit of a key."""
        # lone surrogates, which models may write, are preserved; `json.loads` reads them too
        kept = json.dumps(stored, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
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


@dataclass(frozen=True, slots=True)
class ServeState:
    """State of one server. tool_parser: parser for the model's format of calls. started: Unix time."""

    engine: AsyncEngine
    settings: ServeSettings
    tool_parser: type[AnswerParser] | None
    started: int = field(default_factory=lambda: int(time.time()))
    responses: ResponseStore = field(default_factory=ResponseStore)
    client: str = ""  # set per request: its API key

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer; a server always has one."""
        return self.engine.tokenizer

    @property
    def owner(self) -> str:
        """The owner of a request's responses: a digest of its API key; the key itself is not kept."""
        return hashlib.sha256(self.client.encode()).hexdigest()

    def model_name(self, asked: str | None) -> str:
        """The model's name for the answer. Raises ApiError (404) if `asked` is not one of its names."""
        names = self.settings.model_names
        if asked is not None and asked not in names:
            known = ", ".join(names)
            message = f"the model {asked!r:.200} is not served here; this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return asked or names[0]


async def _state(request: Request) -> ServeState:  # FastAPI would run a plain function on a thread
    state: ServeState = request.app.state.serve
    return replace(state, client=bearer_token(request.headers))


StateDep = Annotated[ServeState, Depends(_state)]
