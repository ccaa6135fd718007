"""`specdec generate`: streams the answer to one prompt, and reports on its drafts."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec.cli.actions.settings import load_engine, prepare_output, request_params
from specdec.cli.commands import GenerateOptions
from specdec.cli.output_files import STDOUT, write_report
from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.errors import ConfigError, counted, shown
from specdec.models.weight_storage import is_quantised, weights_in_words
from specdec.progress import working
from specdec.runtime.drafts.draft_reports import acceptance_in_words
from specdec.runtime.request_output import GenerationOutput, StreamDelta
from specdec.text.detokenize import DraftColours

DRAFTED_STYLE = "bold green"
LEGEND = (("from accepted drafts", True),)


def answer(options: GenerateOptions) -> None:
    prompt, json_file = options.prompt, options.json_file
    if not prompt.strip():
        raise ConfigError(f"the prompt is {shown(prompt)}, with nothing to continue; give some text")
    prepare_output(options)
    params = request_params(options)
    with load_engine(options, batch_size=1) as engine:
        ids = engine.encode(prompt) if options.raw else engine.chat_prompt(prompt)
        if options.show_drafts or json_file == STDOUT:
            with working("generating"):
                [out] = engine.generate([ids], params)
        else:
            out = print_stream(engine, ids, params)
        write_report({"prompt": prompt, **as_record(out)}, None, json_file, indent=None)
        if json_file == STDOUT:
            return
        legend = None
        if options.show_drafts:
            console = Console(highlight=False, soft_wrap=True)
            mark = in_brackets if console.color_system is None else in_colour
            console.print(mark(pieces_of(out, engine.tokenizer)))
            legend = mark(LEGEND) if engine.drafter is not None else None
        print_summary(out, engine, legend)


def pieces_of(out: GenerationOutput, tokenizer: Any) -> Iterable[tuple[str, bool]]:
    """Pieces of an answer's text, and whether each came from accepted drafts."""
    return DraftColours(tokenizer).read(StreamDelta(out.text, out.token_ids, out.drafted, out))


def in_colour(pieces: Iterable[tuple[str, bool]]) -> Text:
    """Pieces of `DraftColours` as a text for a terminal."""
    return Text.assemble(*((piece, DRAFTED_STYLE if drafted else "") for piece, drafted in pieces))


def in_brackets(pieces: Iterable[tuple[str, bool]]) -> Text:
    """Pieces of `DraftColours` as a text for a pipe or a file: [accepted drafts] stand in brackets."""
    return Text("".join(f"[{piece}]" if drafted else piece for piece, drafted in pieces))


def print_stream(engine: Engine, ids: list[int], params: SamplingParams) -> GenerationOutput:
    """Print the answer as it is generated. An interruption ends its last line, and what follows on standard error
    comes after it."""
    out: GenerationOutput | None = None
    try:
        for delta in engine.stream(ids, params):
            print(delta.text, end="", flush=True)
            out = delta.output or out
    finally:
        print(flush=True)
    assert out is not None, "a stream ends with its output"
    return out


def print_summary(out: GenerationOutput, engine: Engine, legend: Text | None) -> None:
    stats = out.stats
    line = Text(style="dim")
    tokens, forwards = counted(len(out.token_ids), "token"), counted(stats.rounds, "target forward")
    line.append(f"{tokens}, finished by {out.finish_reason}; {forwards}")
    if engine.drafter is None:
        line.append("; no drafter (give --drafter)")
    elif stats.rounds:  # a single token comes from the prompt's own forward
        line.append(f", {acceptance_in_words(stats, engine.drafts_off)}")
    if is_quantised(engine.target.model):
        line.append(f"; weights in {weights_in_words(engine.target.model)}")
    if legend is not None:
        line.append("; ")
        line.append_text(legend)
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def as_record(out: GenerationOutput) -> dict[str, Any]:
    """The output as plain JSON values, with figures derived from its statistics."""
    record = asdict(out)
    record["stats"] |= {
        "acceptance_length": out.stats.acceptance_length,
        "accepted_per_position": out.stats.accepted_per_position,
    }
    return record
