"""What a training run is told; each field is an option of `specdec train`. Nothing heavy is imported for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

SHAPE, OPTIMISER = "Shape of the drafter", "Optimiser"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Times are minutes; widths and counts are of the drafter. None: a default that follows from the target."""

    target: Annotated[str, typer.Option(help="Hub id, folder or bundled name.")]
    prompts: Annotated[
        list[Path],
        typer.Option(
            help="JSONL with 'question', 'prompt', 'turns' or 'messages'; again for each file.",
        ),
    ]
    out: Annotated[Path, typer.Option(file_okay=False, help="The drafter's folder.")]
    kind: Annotated[Literal["eagle3", "mtp"], typer.Option(help="An EAGLE-3 head, or a frozen-KV assistant.")] = (
        "eagle3"
    )
    tokenizer: Annotated[str | None, typer.Option(help="Default: the target's.")] = None
    answers: Annotated[int, typer.Option(min=1, help="Most answers to collect from the target.")] = 4000
    answer_minutes: Annotated[float, typer.Option(help="Most time to spend on them.")] = 10.0
    minutes: Annotated[float, typer.Option(help="Time to train.")] = 10.0
    steps: Annotated[int, typer.Option(min=0, help="Also stop after this many optimiser steps; 0: by time alone.")] = 0
    batch: Annotated[int, typer.Option(min=1, help="Answers generated at a time.")] = 64
    max_new: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256
    temperature: Annotated[float, typer.Option(help="Of every eighth answer; the others are greedy.")] = 1.0
    length: Annotated[int, typer.Option(min=1, help="Longest prompt and answer together; length of a packed row.")] = (
        512
    )
    rows: Annotated[int, typer.Option(min=1, help="Packed rows a step and process.")] = 16
    draft_steps: Annotated[int, typer.Option(min=1, help="Draft steps learnt at once.")] = 5
    report_count: Annotated[int, typer.Option(min=1, help="Prompts kept aside to report on.")] = 64
    cache_gb: Annotated[float, typer.Option(help="Memory for the target's states.")] = 8.0
    log_every: Annotated[float, typer.Option(help="Seconds between lines, where there is no terminal.")] = 15.0
    seed: int = 1
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Of the target; the drafter is trained in bfloat16.")
    ] = "bfloat16"
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: the GPU, else the CPU.")] = None
    draft_vocab: Annotated[
        int, typer.Option(help="EAGLE-3: most frequent tokens that it can draft.", rich_help_panel=SHAPE)
    ] = 8192
    hidden: Annotated[
        int | None, typer.Option(help="Default: the target's; mtp: half of it.", rich_help_panel=SHAPE)
    ] = None
    intermediate: Annotated[
        int | None, typer.Option(help="Default: 3 times hidden; mtp: 4 times.", rich_help_panel=SHAPE)
    ] = None
    layers: Annotated[int | None, typer.Option(help="Default: 1; mtp: 2.", rich_help_panel=SHAPE)] = None
    heads: Annotated[int | None, typer.Option(help="Query heads; default: the target's.", rich_help_panel=SHAPE)] = None
    kv_heads: Annotated[
        int | None, typer.Option(help="EAGLE-3 only; default: the target's.", rich_help_panel=SHAPE)
    ] = None
    head_dim: Annotated[
        int | None, typer.Option(help="EAGLE-3 only; default: hidden / heads.", rich_help_panel=SHAPE)
    ] = None
    optimizer: Annotated[Literal["muon", "adamw"], typer.Option(rich_help_panel=OPTIMISER)] = "muon"
    lr: Annotated[float, typer.Option(help="Peak rate of AdamW.", rich_help_panel=OPTIMISER)] = 1e-3
    muon_lr: Annotated[float, typer.Option(help="Peak rate of Muon.", rich_help_panel=OPTIMISER)] = 1e-2
