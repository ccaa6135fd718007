"""The command line: `specdec generate | bench | eval`. Errors are one sentence on standard error, exit code 2."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import PartialState
from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecDecError
from specdec.evaluation.bench import markdown_table, read_prompts, run_bench
from specdec.evaluation.evaluate import evaluate_gsm8k
from specdec.evaluation.report import markdown, require_matplotlib, save_plot
from specdec.models.bundled import HELD_OUT_PROBLEMS
from specdec.request import GenerationOutput
from specdec.text.detokenize import Detokenizer

app = typer.Typer(
    help="Speculative decoding for transformers models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
eval_app = typer.Typer(help="Accuracy on a benchmark, with speculation, without, or both.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")
console = Console(highlight=False, soft_wrap=True)
DRAFTED_STYLE = "bold green"

Target = Annotated[str, typer.Option(help="Hub id, folder or bundled name.")]
DrafterName = Annotated[
    str,
    typer.Option(help="Hub id, folder, bundled name, 'ngram' or 'none'; 'auto' is the bundled target's own drafter."),
]
Limit = Annotated[int, typer.Option(min=0, help="Only the first so many; 0: all.")]
BatchSize = Annotated[int, typer.Option(help="Prompts at a time.")]
NumSteps = Annotated[int, typer.Option(help="Levels of the draft; of a chain, its tokens.")]
TopK = Annotated[int, typer.Option("--topk", help="Branches a node of the draft; 1: a chain.")]
NumDraftTokens = Annotated[
    int | None, typer.Option(help="Verified nodes, the root included; default: 1 + topk * num_steps, at most 64.")
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
KeepK = Annotated[int, typer.Option("--top-k", help="Keep the k most likely tokens; 0: all.")]
KeepP = Annotated[float, typer.Option("--top-p", help="Keep the smallest set of this mass; 1: all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the most likely; 0: none.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
DtypeName = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: float32 on the CPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: the first GPU, else the CPU.")]
TextFile = typer.FileTextWrite | None
BinaryFile = typer.FileBinaryWrite | None
JsonOut = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.callback()
def main() -> None:
    """Speculative decoding for transformers models."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message, or with --raw the text to continue.")],
    target: Target = "tiny-gemma4",
    drafter: DrafterName = "auto",
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: KeepK = 0,
    top_p: KeepP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages repetition.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled output repeatable.")] = None,
    num_steps: NumSteps = 4,
    topk: TopK = 1,
    num_draft_tokens: NumDraftTokens = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")] = False,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour tokens from accepted drafts.")] = False,
    json_out: JsonOut = False,
    dtype: DtypeName = None,
    device: Device = None,
) -> None:
    """Answer one prompt with speculation."""
    with _one_sentence_errors():
        penalty = repetition_penalty
        params = SamplingParams(max_new_tokens, temperature, top_k, top_p, min_p, seed, repetition_penalty=penalty)
        spec = SpecConfig(num_steps, topk, num_draft_tokens)
        config = EngineConfig(max_batch_size=1, dtype=_dtype(dtype), device=device)
        with Engine.from_pretrained(target, _drafter_name(target, drafter), spec=spec, config=config) as engine:
            ids = engine.encode(prompt) if raw else engine.chat_prompt(prompt)
            if json_out or show_drafts:
                [out] = engine.generate([ids], params)
            else:
                out = _print_stream(engine, ids, params)
            if json_out:
                print(json.dumps({"prompt": prompt, **_as_json(out)}))
                return
            if show_drafts:
                console.print(coloured(out, engine.tokenizer))
            _print_summary(out, engine.drafter is not None, show_drafts)


@app.command()
def bench(
    target: Target = "tiny-gemma4",
    drafter: DrafterName = "auto",
    data: Annotated[
        Path, typer.Option(help="JSONL with 'question', 'prompt' or 'turns'; 'answer' ('#### n') adds accuracy.")
    ] = HELD_OUT_PROBLEMS,
    limit: Limit = 0,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Seeds every prompt of a temperature above 0.")] = 0,
    batch_size: BatchSize = 1,
    num_steps: NumSteps = 4,
    topk: TopK = 1,
    num_draft_tokens: NumDraftTokens = None,
    peer: Annotated[bool, typer.Option("--peer", help="Also run transformers, plain and assisted (batch 1).")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")] = False,
    json_out: JsonOut = False,
    dtype: DtypeName = None,
    device: Device = None,
) -> None:
    """Measure tokens/s with and without the drafter; refuses to print figures if any output differs."""
    with _one_sentence_errors():
        prompts = read_prompts(data, limit)
        report = run_bench(
            target=target,
            drafter=_drafter_name(target, drafter),
            prompts=prompts,
            spec=SpecConfig(num_steps, topk, num_draft_tokens),
            config=EngineConfig(max_batch_size=batch_size, dtype=_dtype(dtype), device=device),
            params=SamplingParams(max_new_tokens, temperature, seed=seed),
            raw=raw,
            peer=peer,
        )
        print(json.dumps(asdict(report)) if json_out else markdown_table(report))


@eval_app.command("gsm8k")
def eval_gsm8k(
    target: Target = "tiny-gemma4",
    drafter: DrafterName = "auto",
    data: Annotated[
        str, typer.Option(help="JSONL file, 'hub' or 'bundled'; auto: bundled for tiny-gemma4, else hub.")
    ] = "auto",
    limit: Limit = 0,
    compare: Annotated[bool, typer.Option("--compare", help="Also decode without the drafter, and compare.")] = False,
    shots: Annotated[int | None, typer.Option(help="Worked examples; default: 0 with a template, else 8.")] = None,
    instruction: Annotated[str, typer.Option(help="A line to put behind every question.")] = "",
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: KeepK = 0,
    top_p: KeepP = 1.0,
    min_p: MinP = 0.0,
    seed: Annotated[int, typer.Option(help="Seeds every problem, by its number.")] = 0,
    batch_size: BatchSize = 8,
    num_steps: NumSteps = 4,
    topk: TopK = 1,
    num_draft_tokens: NumDraftTokens = None,
    transcripts: Annotated[Path | None, typer.Option(help="Keep finished problems here, and go on from them.")] = None,
    json_file: Annotated[
        TextFile, typer.Option("--json", lazy=False, metavar="FILE", help="The report as JSON; '-' prints that alone.")
    ] = None,
    markdown_file: Annotated[
        TextFile, typer.Option("--markdown", lazy=False, metavar="FILE", help="The report as a table.")
    ] = None,
    png_file: Annotated[BinaryFile, typer.Option("--png", lazy=False, metavar="FILE", help="The report drawn.")] = None,
    dtype: DtypeName = None,
    device: Device = None,
) -> None:
    """GSM8K accuracy, strict (`#### n`) and by the last number; with --compare, with and without the drafter.

    Several GPUs or machines: accelerate launch -m specdec.cli eval gsm8k ...
    """
    with _one_sentence_errors():
        if png_file is not None:
            require_matplotlib()
        report = evaluate_gsm8k(
            target,
            _drafter_name(target, drafter),
            data=data,
            limit=limit,
            shots=shots,
            instruction=instruction,
            compare=compare,
            params=SamplingParams(max_new_tokens, temperature, top_k, top_p, min_p, seed),
            spec=SpecConfig(num_steps, topk, num_draft_tokens),
            config=EngineConfig(max_batch_size=batch_size, dtype=_dtype(dtype), device=device),
            folder=transcripts,
        )
        if PartialState().is_main_process:
            if json_file is not None:
                print(json.dumps(report, indent=2), file=json_file)
            if markdown_file is not None or json_file is None or json_file.name != "<stdout>":
                print(markdown(report), file=markdown_file)
            if png_file is not None:
                save_plot(report, png_file)


def coloured(out: GenerationOutput, tokenizer: Any) -> Text:
    """The output's text with accepted drafts in colour."""
    reader, text = Detokenizer(tokenizer), Text()
    for count, drafted in enumerate(out.drafted, start=1):
        before = len(reader.text)
        reader.update(out.token_ids[:count])
        text.append(reader.text[before:], style=DRAFTED_STYLE if drafted else None)
    return text


def _print_stream(engine: Engine, ids: list[int], params: SamplingParams) -> GenerationOutput:
    out: GenerationOutput | None = None
    for delta in engine.stream(ids, params):
        print(delta.text, end="", flush=True)
        out = delta.output or out
    print()
    assert out is not None, "a stream ends with its output"
    return out


def _print_summary(out: GenerationOutput, drafter: bool, show_drafts: bool) -> None:
    stats = out.stats
    line = Text(style="dim")
    line.append(f"{len(out.token_ids)} tokens, finished by {out.finish_reason}; {stats.rounds} target forwards")
    line.append(f", acceptance length {stats.acceptance_length:.2f}" if drafter else "; no drafter (give --drafter)")
    if show_drafts:
        line.append("; ")
        line.append("from accepted drafts", style=DRAFTED_STYLE)
    Console(stderr=True, highlight=False).print(line)


def _as_json(out: GenerationOutput) -> dict[str, Any]:
    record = asdict(out)
    record["stats"] |= {
        "acceptance_length": out.stats.acceptance_length,
        "accepted_per_position": out.stats.accepted_per_position,
    }
    return record


def _drafter_name(target: str, drafter: str) -> str | None:
    if drafter == "auto":
        return "tiny-gemma4-mtp" if target == "tiny-gemma4" else None
    return None if drafter == "none" else drafter


def _dtype(name: str | None) -> torch.dtype | None:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is not None and name not in known:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint="--dtype")
    return known[name] if name else None


@contextmanager
def _one_sentence_errors() -> Iterator[None]:
    try:
        yield
    except (SpecDecError, OSError) as error:  # OSError: a folder that cannot be made, a full disk
        print(f"specdec: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


if __name__ == "__main__":  # what `accelerate launch -m specdec.cli` runs
    app()
