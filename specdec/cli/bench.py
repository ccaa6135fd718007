"""What `specdec bench` takes. It has two measurements: of a pair (bodies/measure_pair.py), and of the phases of a round
(bodies/bench_rounds.py).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.command import command
from specdec.cli.options import BatchSize, JsonFile, Limit, MaxNewTokens, PairOptions, Raw, Temperature, output_file
from specdec.errors import ConfigError
from specdec.lazy import load
from specdec.models.bundled import HELD_OUT_PROBLEMS

phase_option = partial(typer.Option, rich_help_panel="Phases of a round")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseOptions:
    """Milliseconds of each phase of a round: of which model, over which batches and contexts."""

    shape: Annotated[
        str | None,
        phase_option(
            help="Random weights at the shape of gemma4-e2b, -e4b, -12b, -26b-a4b, -31b, gpt-oss-20b, -120b, llama-8b, "
            "-70b, qwen3-8b or -30b-a3b, instead of a target: milliseconds of each phase beside the memory floor."
        ),
    ] = None
    weights: Annotated[
        str | None,
        phase_option(
            metavar="FORM",
            help="How a shape's layers are stored: bf16, int4-g32, int4-g128, fp8, or mxfp4 (experts); default: in the "
            "dtype.",
        ),
    ] = None
    phases: Annotated[bool, phase_option("--phases", help="The same of the target, on its prompts.")] = False
    batches: Annotated[str, phase_option(help="Requests at a time, each in turn.")] = "1,8,32"
    contexts: Annotated[str, phase_option(help="Tokens before the first round, each in turn; 1k is 1024.")] = "1k"
    rounds: Annotated[int, phase_option(min=2, help="Rounds timed in each cell.")] = 50
    drafts: Annotated[
        str | None, phase_option(help="Of plain, chain, tree, chain7, tree60; default: the first three.")
    ] = None
    acceptance: Annotated[str, phase_option(help="Acceptance lengths that tokens/s of random weights suppose.")] = "2,3"
    layers: Annotated[int | None, phase_option(help="A shape with fewer layers; its figures say so.")] = None
    shrink: Annotated[int, phase_option(help="A shape with all widths divided by this, up to 16.")] = 1
    profile: Annotated[bool, phase_option("--profile", help="On a GPU, also the time without a kernel.")] = False
    plot_file: Annotated[
        Path | None, phase_option("--plot", metavar="FILE", callback=output_file, help="Over batch and context as PNG.")
    ] = None

    def require_unused(self) -> None:
        """Raises ConfigError for an option that belongs to --shape and --phases."""
        used = {"drafts": self.drafts, "layers": self.layers, "plot": self.plot_file, "profile": self.profile or None}
        used["weights"] = self.weights
        given = [f"--{name}" for name, value in used.items() if value is not None]
        if given:
            raise ConfigError(f"{', '.join(given)} belongs to --shape or --phases; give one of these, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    pair: PairOptions
    data: Annotated[
        Path, typer.Option(help="JSONL with 'question', 'prompt' or 'turns'; 'answer' ('#### n') adds accuracy.")
    ] = HELD_OUT_PROBLEMS
    limit: Limit = 0
    max_new_tokens: MaxNewTokens = 256
    temperature: Temperature = 0.0
    seed: Annotated[int, typer.Option(help="Seeds every prompt of a temperature above 0.")] = 0
    batch_size: BatchSize = 1
    peer: Annotated[bool, typer.Option("--peer", help="Also run transformers, plain and assisted (batch 1).")] = False
    raw: Raw = False
    json_file: JsonFile = None
    timing: PhaseOptions


@command()
def bench(options: BenchOptions) -> None:
    """With --shape or --phases: milliseconds of each phase of a round, and how many times the memory floor that is."""
    if options.timing.shape is not None or options.timing.phases:
        load("specdec.cli.bodies.bench_rounds", "bench_rounds")(options)
    else:
        load("specdec.cli.bodies.measure_pair", "bench_pair")(options)
