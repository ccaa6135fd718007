"""What `specdec doctor` takes; bodies/examine_pair.py is what it does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.command import command
from specdec.cli.options import JsonFile, PairOptions, Raw
from specdec.lazy import load


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    pair: PairOptions
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL with 'question', 'prompt' or 'turns'; default: 8 word problems."),
    ] = None
    limit: Annotated[int, typer.Option(min=4, help="Only the first N prompts, at least 4.")] = 8
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer.")] = 48
    raw: Raw = False
    json_file: JsonFile = None


@command()
def doctor(options: DoctorOptions) -> None:
    """Reads the pair, measures how far drafts are accepted, tries the known causes one by one, and names those that
    cost acceptance, with what to change.

    Exit status: 0 if nothing is wrong, 1 if a cause is named.
    """
    load("specdec.cli.bodies.examine_pair", "examine_pair")(options)
