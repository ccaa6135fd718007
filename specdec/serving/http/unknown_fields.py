"""What becomes of fields that no part of a body knows: refused, left out with a line in the log, or left out.

The choice belongs to an application; bodies are read in many places, so it travels with the request's context.
"""

import logging
from contextvars import ContextVar
from typing import Any, Literal, get_args

from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.errors import ConfigError, shown

Handling = Literal["refuse", "warn", "ignore"]
HANDLING: tuple[str, ...] = get_args(Handling)

logger = logging.getLogger(__name__)
_handling: ContextVar[str] = ContextVar("unknown_fields", default="refuse")


def require_handling(name: str) -> None:
    if name not in HANDLING:
        raise ConfigError(f"unknown_fields={shown(name)}: choose one of {', '.join(HANDLING)}")


def known_fields(model: type[BaseModel]) -> set[str]:
    """Names of a body's fields as requests write them."""
    return {field.alias or name for name, field in model.model_fields.items()}


def dropped(data: Any, model: type[BaseModel]) -> Any:
    """The body without fields that the model does not know, where they are not refused."""
    handling = _handling.get()
    if handling == "refuse" or not isinstance(data, dict):
        return data
    known = known_fields(model)
    unknown = [name for name in data if name not in known]
    if not unknown:
        return data
    if handling == "warn":
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        logger.warning("left out of a %s: unknown %s%s", model.__name__, ", ".join(map(shown, unknown[:8])), more)
    return {name: value for name, value in data.items() if name in known}


class UnknownFields:
    """Tells what is read within a request how it handles them."""

    def __init__(self, app: ASGIApp, handling: str) -> None:
        self.app = app
        self.handling = handling

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _handling.set(self.handling)
        await self.app(scope, receive, send)
