"""What `specdec eval` takes; bodies/measure_pair.py is what it does."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec.cli.command import command
from specdec.cli.options import JsonFile, PairOptions, output_file
from specdec.lazy import load
from specdec.sampling_numbers import SamplingNumbers


@dataclass(frozen=True, slots=True)
class EvalNumbers(SamplingNumbers):
    """Longer answers, and the same ones every time."""

    max_new_tokens: int = field(default=512, metadata={"help": "Most tokens to generate."})
    seed: int | None = field(default=0, metadata={"help": "Seeds every problem, by its number."})


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    task: Annotated[
        Literal["gsm8k", "mt-bench", "humaneval", "spec-bench"], typer.Argument(help="What to evaluate on.")
    ]
    pair: PairOptions
    data: Annotated[
        str, typer.Option(help="JSONL file; gsm8k: also 'hub' or 'bundled'; auto: bundled for tiny-gemma4, else hub.")
    ] = "auto"
    limit: Annotated[int, typer.Option(min=0, help="So many problems, the first of each category; 0: all.")] = 0
    compare: Annotated[
        bool | None,
        typer.Option("--compare/--no-compare", help="Also decode without the drafter; default: unless it is gsm8k."),
    ] = None
    shots: Annotated[
        int | None, typer.Option(help="Worked examples of gsm8k; default: 0 with a chat template, else 8.")
    ] = None
    instruction: Annotated[str, typer.Option(help="A line to put behind every question.")] = ""
    sampling: EvalNumbers
    batch_size: Annotated[int | None, typer.Option(min=1, help="Prompts at a time; default: 8 for gsm8k, 1.")] = None
    transcripts: Annotated[Path | None, typer.Option(help="Keep finished problems here, and go on from them.")] = None
    json_file: JsonFile = None
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", callback=output_file, help="The report as a table.")
    ] = None
    png_file: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", callback=output_file, help="The report drawn.")
    ] = None


@command(no_args_is_help=True)
def evaluate(options: EvalOptions) -> None:
    """
    gsm8k: accuracy, strict (`#### n`) and by the last number. mt-bench, humaneval and spec-bench: speed and acceptance
    only, by category; answers are not judged and programs are not executed.

    Several GPUs or machines: accelerate launch -m specdec.cli eval gsm8k ...
    """
    load("specdec.cli.bodies.measure_pair", "evaluate_task")(options)
