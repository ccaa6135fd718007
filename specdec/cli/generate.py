"""What `specdec generate` takes; bodies/answer.py is what it does."""

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


@command()
def generate(options: GenerateOptions) -> None:
    load("specdec.cli.bodies.answer", "answer")(options)
