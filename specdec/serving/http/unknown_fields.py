"""What becomes of fields that no part of a body knows: refused, left out with a line in the log, or left out."""

import logging
from typing import Any

from pydantic import BaseModel

from specdec.errors import shown

HANDLING = ("refuse", "warn", "ignore")

logger = logging.getLogger(__name__)


def known_fields(model: type[BaseModel]) -> set[str]:
    """Names of a body's fields as requests write them."""
    return {field.alias or name for name, field in model.model_fields.items()}


def dropped(data: Any, model: type[BaseModel], handling: str) -> Any:
    """The body without fields that the model does not know, where they are not refused."""
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
