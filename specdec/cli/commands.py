"""What the commands take, one dataclass and one function each; the files of bodies/ are what they do.

Nothing heavy is imported here: a body is loaded when its command is run.
"""

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec.cli.command import command
from specdec.cli.config_file import PREFIX, read_config
from specdec.cli.options import BatchSize, JsonFile, Limit, MaxNewTokens, PairOptions, Raw, Temperature, output_file
from specdec.errors import ConfigError
from specdec.lazy import load
from specdec.models.bundled import HELD_OUT_PROBLEMS
from specdec.progress import Interrupted
from specdec.sampling_numbers import SamplingNumbers
from specdec.serving.http_options import HttpOptions, client_option, http_option, operation_option
from specdec.training.train_settings import TrainSettings

phase_option = partial(typer.Option, rich_help_panel="Phases of a round")


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
        load("specdec.cli.bodies.bench_rounds", "bench_pair")(options)


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
    instruction: Annotated[str, typer.Option(help="A line to put after every question.")] = ""
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
    load("specdec.cli.bodies.bench_rounds", "evaluate_task")(options)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """A field that `EngineConfig` has too is handed to it by its name."""

    pair: PairOptions
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True, callback=read_config, help="A YAML or TOML file of any of these options.", metavar="FILE"
        ),
    ] = None
    http: HttpOptions
    api_key_file: Annotated[
        Path | None, client_option(help="More keys: lines of a name and a key; # begins a comment.")
    ] = None
    timeout_intake: Annotated[float, http_option(help="Seconds to read a prompt or compile a grammar.")] = 30.0
    log_format: Annotated[Literal["text", "json"], operation_option(help="Lines of the log.")] = "text"
    otlp_traces_endpoint: Annotated[
        str | None, operation_option(help="Where OpenTelemetry traces go, by OTLP over HTTP.")
    ] = None
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of IPv4.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one and prints it.")] = 8000
    served_model_name: Annotated[
        list[str], typer.Option(help="What requests may call the model, again for each; default: the target.")
    ] = field(default_factory=list)
    api_key: Annotated[
        list[str], typer.Option(help="Let in who sends this as bearer token, again for each; also SPECDEC_API_KEY.")
    ] = field(default_factory=list)
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 8
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are refused with 429.")] = 256
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt and output in tokens; default: the model's own.")
    ] = None
    max_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompt tokens between two rounds of running requests; fewer: steadier. None: by what is measured.",
        ),
    ] = None
    page_size: Annotated[int, typer.Option(min=1, help="KV slots of a page.")] = 1
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits whatever the batch and the drafts.")
    ] = False
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A Jinja file in place of the tokenizer's own.")
    ] = None
    cors_origin: Annotated[
        list[str], typer.Option(help="Whose pages may ask from a browser, again for each; '*': everybody's.")
    ] = field(default_factory=list)
    cached_tokens: Annotated[
        bool, typer.Option("--cached-tokens/--no-cached-tokens", help="Say in usage how much of a prompt was cached.")
    ] = True


@command(context_settings={"auto_envvar_prefix": PREFIX})
def serve(options: ServeOptions) -> None:
    load("specdec.cli.bodies.run_server", "run_server")(options)


@command(no_args_is_help=True)
def train(settings: TrainSettings) -> None:
    """The same command goes on where it was stopped. Several GPUs: accelerate launch -m specdec.cli train ..."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    load("specdec.cli.bodies.settings", "quiet_libraries")()
    try:
        load("specdec.training.train_drafter", "train_drafter")(settings)
    except KeyboardInterrupt:
        kept = settings.out / "training"
        raise Interrupted(f"what is done is kept in {kept}, the same command goes on") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class ListOptions:
    json_file: JsonFile = None


@command()
def list_models(options: ListOptions) -> None:
    load("specdec.cli.bodies.list_pairs", "list_pairs")(options.json_file)
