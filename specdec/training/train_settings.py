"""What a training run is told; each field is an option of `specdec train`. Nothing heavy is imported for it."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

shape_option = partial(typer.Option, rich_help_panel="Shape of the drafter")
optimiser_option = partial(typer.Option, rich_help_panel="Optimiser")
Kind = Literal["eagle3", "mtp", "block"]
Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Times are minutes; widths and counts are of the drafter. None: a default that follows from the target."""

    target: Annotated[str, typer.Option(help="Hub id, folder or bundled name.")]
    prompts: Annotated[
        list[Path], typer.Option(help="JSONL with 'question', 'prompt', 'turns' or 'messages'; again for each file.")
    ]
    out: Annotated[Path, typer.Option(file_okay=False, help="The drafter's folder.")]
    kind: Annotated[Kind, typer.Option(help="An EAGLE-3 head, a frozen-KV assistant, or a block drafter.")] = "eagle3"
    tokenizer: Annotated[str | None, typer.Option(help="Default: the target's.")] = None
    answers: Annotated[int, typer.Option(min=1, help="Most answers to collect from the target.")] = 4000
    answer_minutes: Annotated[float, typer.Option(help="Most time to spend on them.")] = 10.0
    minutes: Annotated[float, typer.Option(help="Time to train.")] = 10.0
    steps: Annotated[int, typer.Option(min=0, help="Also stop after this many optimiser steps; 0: by time alone.")] = 0
    batch: Annotated[int, typer.Option(min=1, help="Answers generated at a time.")] = 64
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256
    temperature: Annotated[float, typer.Option(help="Of every eighth answer; the others are greedy.")] = 1.0
    length: Annotated[int, typer.Option(min=1, help="Longest prompt with answer; length of a packed row.")] = 512
    rows: Annotated[int, typer.Option(min=1, help="Packed rows a step and process.")] = 16
    draft_steps: Annotated[int, typer.Option(min=1, help="Draft steps learnt at once; block: its drafts.")] = 5
    report_count: Annotated[int, typer.Option(min=1, help="Prompts kept aside to report on.")] = 64
    cache_gb: Annotated[float, typer.Option(help="Memory for the target's states.")] = 8.0
    log_every: Annotated[float, typer.Option(help="Seconds between lines, where there is no terminal.")] = 15.0
    seed: int = 1
    dtype: Annotated[Dtype, typer.Option(help="Of the target; the drafter is trained in bfloat16.")] = "bfloat16"
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: the GPU, else the CPU.")] = None
    draft_vocab: Annotated[int, shape_option(help="EAGLE-3: most frequent tokens that it can draft.")] = 8192
    hidden: Annotated[int | None, shape_option(help="Default: the target's, as block has; mtp: half of it.")] = None
    intermediate: Annotated[int | None, shape_option(help="Default: 3 times hidden; mtp: 4 times.")] = None
    layers: Annotated[int | None, shape_option(help="Default: 1; mtp and block: 2.")] = None
    heads: Annotated[int | None, shape_option(help="Query heads; default: the target's.")] = None
    kv_heads: Annotated[int | None, shape_option(help="EAGLE-3 and block; default: the target's.")] = None
    head_dim: Annotated[int | None, shape_option(help="EAGLE-3 and block; default: hidden / heads.")] = None
    causal: Annotated[bool, shape_option(help="Block: rows see those up to themselves only (JetSpec).")] = False
    mask_token: Annotated[int | None, shape_option(help="Block: id of MASK; default: the padding token's.")] = None
    optimizer: Annotated[Literal["muon", "adamw"], optimiser_option()] = "muon"
    lr: Annotated[float, optimiser_option(help="Peak rate of AdamW.")] = 1e-3
    muon_lr: Annotated[float, optimiser_option(help="Peak rate of Muon.")] = 1e-2
