"""Makes a command from a dataclass: each field is a shell option, and the command's body receives the dataclass.

A field that is itself a dataclass adds one option per field. Nothing heavy is imported here. Errors and interruptions
in a body become one sentence and an exit code.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer
from typer.core import TyperCommand

from specdec.errors import SpecDecError

MakeCommand: TypeAlias = Callable[[str, str], TyperCommand]
"""Called with a command's name and its first line of help."""


def command(options: type[Any], body: Callable[[Any], None], help: str = "", **settings: Any) -> MakeCommand:
    """body: receives the options. help: text after the first line. settings: typer's, such as no_args_is_help."""

    def run(**given: Any) -> None:
        with shell_errors():
            body(gathered(options, given))

    run.__signature__ = inspect.Signature([*spread(options)])  # type: ignore[attr-defined]  # typer reads it

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


def spread(options: type[Any]) -> Iterator[inspect.Parameter]:
    """A parameter for each option; nested dataclasses are expanded in place."""
    hints = get_type_hints(options, include_extras=True)
    for each in fields(options):
        if is_dataclass(hints[each.name]):
            yield from spread(hints[each.name])
        else:
            hint = hints[each.name]
            if "option" in each.metadata:
                flags, settings = each.metadata["option"]
                hint = Annotated[hint, typer.Option(*flags, **settings)]
            made = each.default if each.default_factory is MISSING else each.default_factory()
            default = inspect.Parameter.empty if made is MISSING else made
            yield inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def gathered(options: type[Any], given: Mapping[str, Any]) -> Any:
    """The dataclass with the shell's values, including nested ones."""
    hints = get_type_hints(options)
    return options(
        **{
            each.name: gathered(hints[each.name], given) if is_dataclass(hints[each.name]) else given[each.name]
            for each in fields(options)
        }
    )
