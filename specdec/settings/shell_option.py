"""A field of a dataclass that is an option of the command line, where it is declared. Imports nothing heavy."""

from dataclasses import MISSING, field
from functools import partial
from typing import Any

from specdec.settings.numbers import Number


def option(default: Any = MISSING, help: str = "", *flags: str, number: Number | None = None, **settings: Any) -> Any:
    """flags: as they are typed, where they are not the field's name; number: bounds, of which the shell checks the
    least integer itself; settings: typer's. A list is copied."""
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
