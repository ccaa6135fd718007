"""Declares the allowed values of a dataclass field and its command-line option once, at the field. Imports nothing
heavy."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any

from specdec.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class Number:
    """Allowed values of a field: finite numbers of its kind, from low to high; with open_low, low itself is excluded.

    filters: does it remove tokens from the distribution? Its default removes none.
    """

    kind: type[int] | type[float]
    low: float
    high: float = math.inf
    open_low: bool = False
    filters: bool = False


FROM_ONE = Number(int, 1, 1 << 40)
FROM_ZERO = Number(float, 0)
ABOVE_ZERO = Number(float, 0, open_low=True)


def require_fields(
    settings: Any, spans: Mapping[str, tuple[int, int]] = {}, name_of: Callable[[str], str] = str
) -> None:
    """Raise ConfigError if a number field of a dataclass is out of its bounds, or a bool field holds no bool.

    None is allowed if it is the default. spans: bounds of integer fields that declare none. name_of: gives a field's
    name in the message.
    """
    for each in fields(settings):
        value, number = getattr(settings, each.name), each.metadata.get("number")
        if each.name in spans:
            number = Number(int, *spans[each.name])
        if each.type is bool:
            require(name_of(each.name), value, isinstance(value, bool), "True or False is expected")
        if number is None or (value is None and each.default is None):
            continue
        if number.kind is int:
            require_int(name_of(each.name), value, int(number.low), int(number.high))
        else:
            require_number(name_of(each.name), value, number.low, number.high, open_low=number.open_low)


def require_int(name: str, value: object, low: int, high: int) -> None:
    """Raise ConfigError unless it is an integer from `low` to `high`."""
    fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    require(name, value, fits, f"an integer from {low} to {high} is expected")


def require_number(name: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Raise ConfigError unless it is a finite number from `low`, or above it, to `high`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and low <= value <= min(high, sys.float_info.max) and not (open_low and value == low):  # type: ignore[operator]
        return
    span = f"above {low:g}" if open_low else f"from {low:g}"
    if math.isfinite(high):
        span += f" to {high:g}"
    require(name, value, False, f"a finite number {span} is expected")


def require(name: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise ConfigError(f"{name}={shown(value)}: {expected}")


def option(default: Any = MISSING, help: str = "", *flags: str, number: Number | None = None, **settings: Any) -> Any:
    """A field that is a command-line option. flags: as typed, if they differ from the field's name; number: bounds
    (typer checks an integer's lower bound itself); settings: typer's. A list is copied."""
    made: dict[str, Any] = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    if number is not None and number.kind is int:
        settings["min"] = int(number.low)
    return field(**made, metadata={"number": number, "option": (flags, {"help": help, **settings})})


http_option = partial(option, rich_help_panel="HTTP")
client_option = partial(option, rich_help_panel="Clients")
operation_option = partial(option, rich_help_panel="Operation")
loading_option = partial(option, rich_help_panel="Loading")
phase_option = partial(option, rich_help_panel="Phases of a round")
shape_option = partial(option, rich_help_panel="Shape of the drafter")
optimiser_option = partial(option, rich_help_panel="Optimiser")
