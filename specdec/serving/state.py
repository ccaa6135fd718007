"""State for all routes: the engine, the settings, and the model's names."""

import hashlib
import time
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import Depends, Request

from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http.api_keys import bearer_token
from specdec.serving.http.faults import ApiError
from specdec.serving.openai.response_store import ResponseStore
from specdec.serving.server_settings import ServeSettings
from specdec.serving.tools.answer_parser import AnswerParser


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


def _state(request: Request) -> ServeState:
    state: ServeState = request.app.state.serve
    return replace(state, client=bearer_token(request.headers))


StateDep = Annotated[ServeState, Depends(_state)]
