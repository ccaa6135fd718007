"""The program as it starts and ends.

torch and the engine are loaded only when a command runs, so help, the version and misspelt options import nothing
heavy. Exit codes: 2 for a mistake, with one sentence on standard error; 130 for Ctrl-C; 1 if the reader of a pipe has
closed it.
"""

import os
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import TextIOWrapper
from typing import Annotated

import typer

import specdec.cli.commands  # noqa: F401  # declares the commands
from specdec import __version__
from specdec.cli.command import app


def _print_version(asked: bool) -> None:
    if asked:
        print(f"specdec {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding for transformers models."""


program = typer.main.get_group(app)


def main() -> None:
    """The program. Streams that the shell closed, as with `>&-`, lead nowhere. Characters that the encoding of standard
    output lacks, as in a Latin-1 locale, are written as escapes, as on standard error."""
    with ExitStack() as streams:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:
                streams.enter_context(redirect(streams.enter_context(open(os.devnull, "w"))))
            elif isinstance(stream, TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")
        _run()


def _run() -> None:
    """Output is flushed when the program ends, so a closed pipe or a full disk is noticed here."""
    try:
        try:
            program()
        finally:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left unwritten goes there
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        print(f"specdec: {error}", file=sys.stderr)
        sys.exit(2)
