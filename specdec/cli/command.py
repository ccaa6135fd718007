"""Makes a command from a dataclass: each field is a shell option, and the command's action receives the dataclass.

Nothing heavy is imported here. Errors and interruptions in an action become one sentence and an exit code.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer
from typer.core import TyperCommand

from specdec.errors import SpecDecError

MakeCommand: TypeAlias = Callable[[str, str], TyperCommand]
"""Called with a command's name and its first line of help."""


def command(options: type[Any], action: Callable[[Any], None], help: str = "", **settings: Any) -> MakeCommand:
    """action: receives the options. help: text after the first line. settings: typer's, such as no_args_is_help."""

    def run(**given: Any) -> None:
        with shell_errors():
            action(options(**given))

    run.__signature__ = inspect.Signature([*parameters(options)])  # type: ignore[attr-defined]  # typer reads it

    def make(name: str, line: str) -> TyperCommand:
        single = typer.Typer(add_completion=False)
        single.command(name, help=f"{line}\n\n{help}".rstrip(), **settings)(run)
        made = typer.main.get_command(single)
        assert isinstance(made, TyperCommand), made
        return made

    return make


@contextmanager
def shell_errors() -> Iterator[None]:
    """One sentence on standard error and an exit code, instead of a traceback."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # a closed pipe: typer exits quietly
    except (SpecDecError, OSError) as error:  # OSError: a folder cannot be made, or the disk is full
        print(f"specdec: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as stop:
        print(f"specdec: interrupted{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        raise typer.Exit(130) from stop


def parameters(options: type[Any]) -> Iterator[inspect.Parameter]:
    """A parameter for each option, inherited ones first."""
    hints = get_type_hints(options, include_extras=True)
    for each in fields(options):
        hint = hints[each.name]
        if "option" in each.metadata:
            flags, settings = each.metadata["option"]
            hint = Annotated[hint, typer.Option(*flags, **settings)]
        made = each.default if each.default_factory is MISSING else each.default_factory()
        default = inspect.Parameter.empty if made is MISSING else made
        yield inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
