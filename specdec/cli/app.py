"""The command line: the names of its commands, and one line of help for each.

commands.py declares their options; it is loaded when a command runs or prints its help. torch and the engine are loaded
only when a command runs, so help, the version and misspelt options import nothing heavy. Exit codes: 2 for a mistake,
with one sentence on standard error; 130 for Ctrl-C; 1 if the reader of a pipe has closed it.
"""

import os
import sys
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from specdec import __version__
from specdec.cli.command import MakeCommand
from specdec.lazy import load

COMMANDS = {  # lines of help
    "generate": "Answer one prompt with speculation.",
    "chat": "Talk with a model: history is kept, and text from accepted drafts is coloured.",
    "bench": "Measure tokens/s with and without the drafter; refuses to print figures if any output differs.",
    "eval": "Evaluate a pair on a data set: accuracy, acceptance and speed.",
    "doctor": "Find out why few drafts are accepted: names the cause, and what to change.",
    "serve": "Serve a pair over HTTP with OpenAI's API. Needs the extra specdec-runtime\\[serve].",
    "train": "Train a drafter for a target on the target's own answers to your prompts.",
    "recipe": "Print the command for a published model: drafter, memory on GPUs of 24 to 141 GB, time of a step.",
    "models": "List the bundled models and the known pairs of target and drafter.",
}


@cache
def load_command(name: str) -> TyperCommand:
    """A command with its options."""
    make: MakeCommand = load("specdec.cli.commands", "MAKE")[name]
    return make(name, COMMANDS[name])


class Commands(TyperGroup):
    """The group holds each command's name and line of help, which is enough to list the commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else command, rest


def _print_version(asked: bool) -> None:
    if asked:
        print(f"specdec {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    help="Speculative decoding for transformers models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _line in COMMANDS.items():
    app.command(_name, help=_line)(lambda: None)


@app.callback()
def specdec(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding for transformers models."""


def main() -> None:
    """The program. Output is flushed when the program ends, so a closed pipe is noticed here."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
