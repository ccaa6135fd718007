"""State that every route needs: the engine, the settings, and the names of the model."""

import time
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import Depends, Request

from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http.api_keys import bearer_token
from specdec.serving.http.faults import ApiError
from specdec.serving.server_settings import ServeSettings
from specdec.serving.tools.answer_parser import AnswerParser


@dataclass(frozen=True, slots=True)
class ServeState:
    """One server's. tool_parser: of how the model writes calls. started: when, in seconds since 1970."""

    engine: AsyncEngine
    settings: ServeSettings
    tool_parser: type[AnswerParser] | None
    started: int = field(default_factory=lambda: int(time.time()))
    client: str = ""  # of a request: the API key that it came with

    @property
    def tokenizer(self) -> Any:
        """The engine's; a server is not made without one."""
        return self.engine.tokenizer

    def model_name(self, asked: str | None) -> str:
        """Name of the model in the answer. Raises ApiError (404) for a name that is not among the model's."""
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
