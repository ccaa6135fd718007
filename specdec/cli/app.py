"""The command line: what its commands are called and take. Their bodies are the other modules of this folder.

A body is imported when its command is run (`runs`), so that help, versions and misspelt options import nothing heavy.
Exit codes: 2 for a mistake, in one sentence on standard error; 130 for Ctrl-C; 1 where the reader of a pipe has gone.
"""

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from specdec import __version__
from specdec.cli.options import (
    BatchSize,
    JsonFile,
    KeepK,
    KeepP,
    Limit,
    MaxNewTokens,
    MinP,
    PairOptions,
    Raw,
    SamplingOptions,
    Temperature,
    gathered,
    output_file,
    shell_errors,
    spread,
)
from specdec.cli.serve_options import PREFIX, ServerOptions
from specdec.errors import SpecDecError
from specdec.lazy import load
from specdec.models.bundled import HELD_OUT_PROBLEMS
from specdec.training.train_settings import TrainSettings


def runs(module: str, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The declared command calls `name` of `specdec.cli.<module>` with its options, and imports it only then."""

    def with_body(declared: Callable[..., None]) -> Callable[..., None]:
        signature, groups = spread(declared)

        @wraps(declared)
        def command(**given: Any) -> None:
            with shell_errors():
                load(f"specdec.cli.{module}", name)(**gathered(groups, given))

        command.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
        command.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
        return command

    return with_body


class Command(TyperCommand):
    """A command that knows what its options were once called."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = args[: args.index("--")] if "--" in args else args
        with shell_errors():
            if any(word.partition("=")[0] == "--topk" for word in options):
                raise SpecDecError(
                    "--topk is now --draft-topk, the branches of a draft tree; --top-k keeps the k most likely tokens"
                )
        return super().parse_args(ctx, args)


def _version(asked: bool) -> None:
    if asked:
        print(f"specdec {__version__}")
        raise typer.Exit


PHASES = "Phases of a round"
Task = Literal["gsm8k", "mt-bench", "humaneval", "spec-bench"]
app = typer.Typer(
    help="Speculative decoding for transformers models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def specdec(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="Print it.")] = False,
) -> None:
    """Speculative decoding for transformers models."""


@app.command(cls=Command)
@runs("generate", "generate")
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message, or with --raw the text to continue.")],
    pair: PairOptions,
    sampling: SamplingOptions,
    raw: Raw = False,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour tokens from accepted drafts.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Answer one prompt with speculation."""


@app.command(cls=Command)
@runs("chat", "chat")
def chat(
    pair: PairOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first turn.")] = None,
) -> None:
    """Talk with a model: history is kept, and text from accepted drafts is coloured.

    /reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C ends an answer. Without a terminal each line of
    standard input is a turn.
    """


@app.command(cls=Command)
@runs("bench", "bench")
def bench(
    pair: PairOptions,
    data: Annotated[
        Path, typer.Option(help="JSONL with 'question', 'prompt' or 'turns'; 'answer' ('#### n') adds accuracy.")
    ] = HELD_OUT_PROBLEMS,
    limit: Limit = 0,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Seeds every prompt of a temperature above 0.")] = 0,
    batch_size: BatchSize = 1,
    peer: Annotated[bool, typer.Option("--peer", help="Also run transformers, plain and assisted (batch 1).")] = False,
    raw: Raw = False,
    json_file: JsonFile = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Random weights at the shape of gemma4-e4b, gemma4-26b-a4b, gemma4-31b, gpt-oss-20b or llama-8b, "
            "instead of a target: milliseconds of each phase beside the memory floor.",
            rich_help_panel=PHASES,
        ),
    ] = None,
    phases: Annotated[
        bool, typer.Option("--phases", help="The same of the target, on its prompts.", rich_help_panel=PHASES)
    ] = False,
    batches: Annotated[str, typer.Option(help="Requests at a time, each in turn.", rich_help_panel=PHASES)] = "1,8,32",
    contexts: Annotated[
        str, typer.Option(help="Tokens before the first round, each in turn; 1k is 1024.", rich_help_panel=PHASES)
    ] = "1k",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds timed in each cell.", rich_help_panel=PHASES)] = 50,
    drafts: Annotated[
        str | None,
        typer.Option(help="Of plain, chain, tree, chain7; default: all but the last.", rich_help_panel=PHASES),
    ] = None,
    acceptance: Annotated[
        str,
        typer.Option(help="Acceptance lengths that tokens/s of random weights suppose.", rich_help_panel=PHASES),
    ] = "2,3",
    layers: Annotated[
        int | None, typer.Option(help="A shape with fewer layers; its figures say so.", rich_help_panel=PHASES)
    ] = None,
    shrink: Annotated[
        int, typer.Option(help="A shape with all widths divided by this, up to 16.", rich_help_panel=PHASES)
    ] = 1,
    profile: Annotated[
        bool, typer.Option("--profile", help="On a GPU, also the time without a kernel.", rich_help_panel=PHASES)
    ] = False,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            callback=output_file,
            help="Over batch and context as PNG.",
            rich_help_panel=PHASES,
        ),
    ] = None,
) -> None:
    """Measure tokens/s with and without the drafter; refuses to print figures if any output differs.

    With --shape or --phases: milliseconds of each phase of a round, and how many times the memory floor that is.
    """


@app.command("eval", cls=Command, no_args_is_help=True)
@runs("evaluate", "evaluate")
def evaluate(
    task: Annotated[Task, typer.Argument(help="What to evaluate on.")],
    pair: PairOptions,
    data: Annotated[
        str,
        typer.Option(help="JSONL file; gsm8k: also 'hub' or 'bundled'; auto: bundled for tiny-gemma4, else hub."),
    ] = "auto",
    limit: Annotated[int, typer.Option(min=0, help="So many problems, the first of each category; 0: all.")] = 0,
    compare: Annotated[
        bool | None,
        typer.Option("--compare/--no-compare", help="Also decode without the drafter; default: unless it is gsm8k."),
    ] = None,
    shots: Annotated[
        int | None, typer.Option(help="Worked examples of gsm8k; default: 0 with a chat template, else 8.")
    ] = None,
    instruction: Annotated[str, typer.Option(help="A line to put behind every question.")] = "",
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: KeepK = 0,
    top_p: KeepP = 1.0,
    min_p: MinP = 0.0,
    seed: Annotated[int, typer.Option(help="Seeds every problem, by its number.")] = 0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Prompts at a time; default: 8 for gsm8k, 1.")] = None,
    transcripts: Annotated[Path | None, typer.Option(help="Keep finished problems here, and go on from them.")] = None,
    json_file: JsonFile = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", callback=output_file, help="The report as a table.")
    ] = None,
    png_file: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", callback=output_file, help="The report drawn.")
    ] = None,
) -> None:
    """Is it right, and how much faster?

    gsm8k: accuracy, strict (`#### n`) and by the last number. mt-bench, humaneval and spec-bench: speed and acceptance
    only, by category; answers are not judged and programs are not executed.

    Several GPUs or machines: accelerate launch -m specdec.cli eval gsm8k ...
    """


@app.command(cls=Command, context_settings={"auto_envvar_prefix": PREFIX})
@runs("serve", "serve")
def serve(
    pair: PairOptions,
    server: ServerOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of IPv4.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one and prints it.")] = 8000,
    served_model_name: Annotated[
        list[str], typer.Option(help="What requests may call the model, again for each; default: the target.")
    ] = [],  # noqa: B006
    api_key: Annotated[
        list[str], typer.Option(help="Let in who sends this as bearer token, again for each; also SPECDEC_API_KEY.")
    ] = [],  # noqa: B006
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 8,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are refused with 429.")] = 256,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt and output in tokens; default: the model's own.")
    ] = None,
    max_prefill_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens between two rounds of running requests; fewer: steadier streams.")
    ] = 2048,
    page_size: Annotated[int, typer.Option(min=1, help="KV slots of a page.")] = 1,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits whatever the batch and the drafts.")
    ] = False,
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A Jinja file in place of the tokenizer's own.")
    ] = None,
    tool_parser: Annotated[
        str, typer.Option(help="How the model writes tool calls: hermes, llama, ...; auto: as its template teaches.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="How the model writes what it thinks: none, deepseek_r1, qwen3 or gemma4.")
    ] = "none",
    unknown_fields: Annotated[
        str, typer.Option(help="Fields that no request has: refuse, warn (a line in the log) or ignore.")
    ] = "refuse",
    special_tokens_in_content: Annotated[
        str, typer.Option(help="Control tokens in messages: escape (they are text) or allow, as transformers.")
    ] = "escape",
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest request; larger ones get 413.")] = 4 << 20,
    stop_seconds: Annotated[
        float, typer.Option(min=0, help="For streams to end after SIGTERM or Ctrl-C; a second one ends at once.")
    ] = 30.0,
    cors_origin: Annotated[
        list[str], typer.Option(help="Whose pages may ask from a browser, again for each; '*': everybody's.")
    ] = [],  # noqa: B006
    share_prefix_cache: Annotated[
        bool,
        typer.Option("--share-prefix-cache", help="Between API keys too: one can then find out what another sent."),
    ] = False,
    cached_tokens: Annotated[
        bool,
        typer.Option("--cached-tokens/--no-cached-tokens", help="Say in usage how much of a prompt was cached."),
    ] = True,
    allow_priority: Annotated[
        bool, typer.Option("--allow-priority", help="Let requests ask to be served first; else only 0 is taken.")
    ] = False,
) -> None:
    """Serve a pair over HTTP, as OpenAI's API and clients have it. Needs the extra: specdec-runtime\\[serve]."""


@app.command(cls=Command, no_args_is_help=True)
@runs("train", "train")
def train(settings: TrainSettings) -> None:
    """Train a drafter for a target on the target's own answers to your prompts.

    The same command goes on where it was stopped. Several GPUs: accelerate launch -m specdec.cli train ...
    """


@app.command(cls=Command)
@runs("list_models", "models")
def models(json_file: JsonFile = None) -> None:
    """List the bundled models and the pairs of target and drafter that are known by name."""


def main() -> None:
    """The program. Help is written when the program ends, so a reader who has gone is noticed here."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
