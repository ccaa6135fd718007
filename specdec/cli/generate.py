"""What `specdec generate` and `specdec chat` take; bodies/answer.py and bodies/conversation.py are what they do."""

from dataclasses import dataclass
from typing import Annotated

import typer

from specdec.cli.command import command
from specdec.cli.options import JsonFile, PairOptions, Raw
from specdec.lazy import load
from specdec.sampling_numbers import SamplingNumbers


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    prompt: Annotated[str, typer.Argument(help="The user's message, or with --raw the text to continue.")]
    pair: PairOptions
    sampling: SamplingNumbers
    raw: Raw = False
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour tokens from accepted drafts.")] = False
    json_file: JsonFile = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    pair: PairOptions
    sampling: SamplingNumbers
    system: Annotated[str | None, typer.Option(help="What the model is told before the first turn.")] = None


@command()
def generate(options: GenerateOptions) -> None:
    load("specdec.cli.bodies.answer", "answer")(options)


@command()
def chat(options: ChatOptions) -> None:
    """/reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C ends an answer. Without a terminal each line of
    standard input is a turn.
    """
    load("specdec.cli.bodies.conversation", "converse")(options)
