"""The commands, one dataclass each: its fields are the options, its docstring is the help, and a function of actions/
receives it.

Nothing heavy is imported here: an action is loaded when its command runs.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specdec.cli.command import command
from specdec.cli.config_file import PREFIX, read_config
from specdec.cli.options import JsonFile, PairOptions, Raw, output_file
from specdec.errors import ConfigError
from specdec.lazy import load
from specdec.models.published import HELD_OUT_PROBLEMS
from specdec.progress import Interrupted
from specdec.serving.http_options import HttpOptions
from specdec.settings.declared_fields import client_option, http_option, operation_option, option, phase_option
from specdec.settings.sampling_numbers import SamplingNumbers
from specdec.training.train_settings import TrainSettings


def action(module: str, name: str) -> Callable[[Any], None]:
    """A function of actions/, loaded when its command runs."""
    return lambda options: load(f"specdec.cli.actions.{module}", name)(options)


@command("generate", action("answer", "answer"))
@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingNumbers, PairOptions):
    """Answer one prompt with speculation."""

    prompt: Annotated[str, typer.Argument(help="The user's message, or with --raw the text to continue.")]
    raw: Raw = False
    show_drafts: bool = option(False, "Colour text from accepted drafts; in a pipe: brackets.", "--show-drafts")
    json_file: JsonFile = None


@command("chat", action("conversation", "converse"))
@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingNumbers, PairOptions):
    """Talk with a model: history is kept, and text from accepted drafts is coloured.

    /reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C ends an answer. Without a terminal each line of
    standard input is a turn.
    """

    system: str | None = option(None, "System message.")


@dataclass(frozen=True, kw_only=True)
class PhaseOptions:
    """Options for timing each phase of a round: the model, the batches and the contexts."""

    shape: str | None = phase_option(
        None,
        "Time rounds of random weights at a published shape, such as gemma4-e4b or llama-8b (an unknown name lists "
        "all), next to their memory floor. Takes no target.",
    )
    weights: str | None = phase_option(
        None,
        "How a shape's layers are stored: bf16, int4-g32, int4-g128, fp8, or mxfp4 (experts); default: in the dtype.",
        metavar="FORM",
    )
    phases: bool = phase_option(False, "Time rounds of --target and --drafter on the prompts of --data.", "--phases")
    batches: str = phase_option("1,8,32", "Batch sizes to time.")
    contexts: str = phase_option("1k", "Context lengths to time, in tokens; 1k is 1024.")
    rounds: int = phase_option(50, "Timed rounds of each batch size, context and draft.", min=2)
    drafts: str | None = phase_option(
        None,
        "Drafts to time: plain, chain, tree, chain7, tree60; for MTP modules mtp1, mtp, tree; for block drafters "
        "block, tree. Default: all but chain7 and tree60.",
    )
    suppose_acceptance: str | None = phase_option(
        None,
        "Acceptance lengths for which tokens/s are computed from the measured rounds: an assumption, not measured. "
        "Default: 2,3 for random weights, else none.",
    )
    layers: int | None = phase_option(None, "Number of the shape's layers to keep; the report says so.")
    shrink: int = phase_option(1, "Divide all widths of the shape by this, up to 16.")
    profile: bool = phase_option(False, "On a GPU, also measure the time in which no kernel runs.", "--profile")
    plot_file: Path | None = phase_option(
        None, "Plot times over batch and context, as PNG.", "--plot", metavar="FILE", callback=output_file
    )

    def require_unused(self) -> None:
        """Raises ConfigError if an option that needs --shape or --phases is given."""
        changed = [each.name for each in fields(PhaseOptions) if getattr(self, each.name) != each.default]
        if changed:
            given = ", ".join(f"--{name.removesuffix('_file').replace('_', '-')}" for name in changed)
            raise ConfigError(f"{given} belongs to --shape or --phases; give one of these, or leave it out")


@command("bench", action("benchmarks", "bench"))
@dataclass(frozen=True, kw_only=True)
class BenchOptions(PhaseOptions, PairOptions):
    """Measure tokens/s with and without the drafter; refuses to print figures if any output differs.

    With --shape or --phases: the time of each phase of a round, and the round as a multiple of its memory floor.
    """

    data: str = option(
        str(HELD_OUT_PROBLEMS),
        "gsm8k, mt-bench, humaneval, spec-bench or speed-bench; or a JSONL file with 'question', 'prompt' or 'turns'; "
        "'answer' ('#### n') adds accuracy.",
    )
    data_folder: Path | None = option(None, "Folder with the files of a named data set; default: the hub.")
    limit: int = option(0, "Number of prompts, taken from each category in turn; 0: all.", min=0)
    max_new_tokens: int = option(256, "Maximum number of tokens to generate.")
    temperature: float = option(0.0, "0 is greedy.")
    seed: int = option(0, "Seed of every prompt, for temperatures above 0.")
    batch_size: int = option(1, "Prompts at a time.", min=1)
    peer: bool = option(False, "Also run transformers, plain and assisted (batch 1).", "--peer")
    raw: Raw = False
    json_file: JsonFile = None


@command("eval", action("benchmarks", "evaluate_task"), no_args_is_help=True)
@dataclass(frozen=True, kw_only=True)
class EvalOptions(SamplingNumbers, PairOptions):
    """Evaluate a pair on a data set: accuracy, acceptance and speed.

    gsm8k: accuracy, strict (`#### n`) and by the last number. mt-bench, humaneval, spec-bench, speed-bench: speed and
    acceptance only, by category; answers are not judged and programs are not executed.

    Several GPUs or machines: accelerate launch -m specdec eval gsm8k ...
    """

    task: Annotated[
        Literal["gsm8k", "mt-bench", "humaneval", "spec-bench", "speed-bench"],
        typer.Argument(help="What to evaluate on."),
    ]
    data: str = option(
        "auto",
        "JSONL file, a folder with it, or 'hub'; gsm8k: also 'bundled' and 'auto' (bundled for tiny-gemma4, else hub).",
    )
    limit: int = option(0, "Number of problems, taken from each category in turn; 0: all.", min=0)
    compare: bool | None = option(
        None, "Also decode without the drafter; default: for all tasks but gsm8k.", "--compare/--no-compare"
    )
    shots: int | None = option(None, "Worked examples before a gsm8k problem; default: 0 with a chat template, else 8.")
    instruction: str = option("", "A line after every question.")
    max_new_tokens: int = option(512, "Maximum number of tokens to generate.")
    seed: int | None = option(0, "Seed of the run, from which each problem gets its own.")
    batch_size: int | None = option(None, "Prompts at a time; default: 8 for gsm8k, else 1.", min=1)
    transcripts: Path | None = option(None, "Folder for finished problems; the same command resumes from it.")
    json_file: JsonFile = None
    markdown_file: Path | None = option(
        None, "Also write the report as a table.", "--markdown", metavar="FILE", callback=output_file
    )
    png_file: Path | None = option(None, "Also plot the report.", "--png", metavar="FILE", callback=output_file)


@command("doctor", action("examine_pair", "examine_pair"))
@dataclass(frozen=True, kw_only=True)
class DoctorOptions(PairOptions):
    """Find out why few drafts are accepted: names the cause, and what to change.

    Reads the pair, measures how far drafts are accepted, tries the known causes one by one, and names those that cost
    acceptance, with what to change.

    Exit status: 0 if nothing is wrong, 1 if a cause is named.
    """

    prompts: Path | None = option(
        None, "JSONL with 'question', 'prompt' or 'turns'; default: 8 word problems.", metavar="FILE"
    )
    limit: int = option(8, "Number of prompts, at least 4.", min=4)
    max_new_tokens: int | None = option(None, "Tokens of each answer; default: 48, for MTP modules 96.", min=8)
    write_conventions: bool = option(
        False, "Write conventions found for MTP modules to mtp_conventions.json next to them.", "--write-conventions"
    )
    raw: Raw = False
    json_file: JsonFile = None


@command("serve", action("run_server", "run_server"), context_settings={"auto_envvar_prefix": PREFIX})
@dataclass(frozen=True, kw_only=True)
class ServeOptions(HttpOptions, PairOptions):
    """Serve a pair over HTTP with OpenAI's API. Needs the extra specdec-runtime[serve]."""

    config: Path | None = option(
        None, "YAML or TOML file with any of these options.", is_eager=True, callback=read_config, metavar="FILE"
    )
    api_key_file: Path | None = client_option(None, "File of keys: a name and a key per line; # begins a comment.")
    timeout_intake: float = http_option(30.0, "Seconds to tokenise a prompt or compile a grammar.")
    log_format: Literal["text", "json"] = operation_option("text", "Format of the log.")
    otlp_traces_endpoint: str | None = operation_option(None, "Endpoint for OpenTelemetry traces (OTLP over HTTP).")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is all of IPv4.")
    port: int = option(8000, "Port; 0 picks a free one and prints it.", min=0, max=65535)
    served_model_name: list[str] = option([], "Name of the model in requests; may be repeated. Default: the target.")
    api_key: list[str] = option([], "Accepted bearer token; may be repeated. Also SPECDEC_API_KEY.")
    batch_size: int = option(8, "Requests that run at a time.", min=1)
    max_waiting: int = option(256, "Requests that may wait; more are refused with 429.", min=0)
    max_model_len: int | None = option(
        None, "Longest prompt and output in tokens; default: the model's own, or less if memory is short.", min=1
    )
    max_prefill_tokens: int | None = option(
        None, "Prompt tokens per step; fewer: steadier streams. Default: by measured times.", min=1
    )
    page_size: int = option(1, "K/V slots per page.", min=1)
    deterministic: bool = option(False, "Logits with the same bits in any batch, with any drafts.", "--deterministic")
    chat_template: Path | None = option(
        None, "Jinja file of a chat template, in place of the tokenizer's.", exists=True, dir_okay=False
    )
    cors_origin: list[str] = option([], "Origin whose pages may call from a browser; may be repeated; '*': any.")
    cached_tokens: bool = option(
        True, "Report in usage how much of a prompt was cached.", "--cached-tokens/--no-cached-tokens"
    )


def train(settings: TrainSettings) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    load("specdec.cli.actions.settings", "quiet_libraries")()
    try:
        load("specdec.training.train_drafter", "train_drafter")(settings)
    except KeyboardInterrupt:
        kept = settings.out / "training"
        raise Interrupted(f"finished work is kept in {kept}; the same command continues") from None


@command("train", train, no_args_is_help=True)
class TrainOptions(TrainSettings):
    """Train a drafter for a target on the target's own answers to your prompts.

    The same command resumes a stopped training. Several GPUs: accelerate launch -m specdec train ...
    """


@command("recipe", action("list_pairs", "show_recipe"))
@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Print the command for a published model: drafter, memory on GPUs of 24 to 141 GB, time of a step.

    Nothing is downloaded.
    """

    model: Annotated[str | None, typer.Argument(help="Published target or its short name; default: all of them.")] = (
        None
    )
    json_file: JsonFile = None


def show_models(options: "ListOptions") -> None:
    if not options.memory and options != ListOptions(json_file=options.json_file):
        raise ConfigError("specdec models takes --json alone, or --memory with a pair and its sizes; add --memory")
    (action("memory_pages", "show_memory") if options.memory else action("list_pairs", "list_pairs"))(options)


@command("models", show_models)
@dataclass(frozen=True, kw_only=True)
class ListOptions(PairOptions):
    """List the bundled models and the known pairs of target and drafter.

    With --memory: the memory of a pair, whose weights are not needed.
    """

    memory: bool = option(False, "Print the memory of K/V and weights, from config.json alone.", "--memory")
    batch_size: int = option(8, "Requests at a time.", min=1)
    max_model_len: int | None = option(None, "Longest prompt and output in tokens; default: the model's own.", min=1)
    page_size: int = option(1, "K/V slots per page.", min=1)
    json_file: JsonFile = None
