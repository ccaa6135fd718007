"""The program, and how a dataclass becomes one of its commands: each field is an option, the docstring is the help.

Nothing heavy is imported here. Errors and interruptions in an action become one sentence and an exit code.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from specdec.errors import SpecDecError

Options = TypeVar("Options", bound=type)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def command(
    name: str, action: Callable[[Any], None], program: typer.Typer = app, **settings: Any
) -> Callable[[Options], Options]:
    """Decorates the dataclass of a command's options. action: receives them. settings: typer's."""

    def add(options: Options) -> Options:
        def run(**given: Any) -> None:
            with shell_errors():
                action(options(**given))

        run.__signature__ = inspect.Signature([*parameters(options)])  # type: ignore[attr-defined]  # typer reads it
        paragraphs = (inspect.getdoc(options) or "").split("\n\n")
        text = "\n\n".join(" ".join(each.split()) for each in paragraphs).replace("[", "\\[")  # no markup of rich
        program.command(name, help=text, **settings)(run)
        return options

    return add


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
    except (KeyboardInterrupt, RuntimeError) as error:
        # up to Python 3.11, Ctrl-C while an import makes a class may come out as the cause of a RuntimeError
        stop = error if isinstance(error, KeyboardInterrupt) else error.__cause__
        if not isinstance(stop, KeyboardInterrupt):
            raise
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
