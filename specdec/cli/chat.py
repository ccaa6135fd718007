"""What `specdec chat` takes; bodies/conversation.py is what it does."""

from dataclasses import dataclass
from typing import Annotated

import typer

from specdec.cli.command import command
from specdec.cli.options import PairOptions
from specdec.lazy import load
from specdec.sampling_numbers import SamplingNumbers


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    pair: PairOptions
    sampling: SamplingNumbers
    system: Annotated[str | None, typer.Option(help="What the model is told before the first turn.")] = None


@command()
def chat(options: ChatOptions) -> None:
    """/reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C ends an answer. Without a terminal each line of
    standard input is a turn.
    """
    load("specdec.cli.bodies.conversation", "converse")(options)
