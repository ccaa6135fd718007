"""Settings of a training run; each field is an option of `specdec train`. Nothing heavy is imported for it."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from specdec.errors import ConfigError, shown
from specdec.settings.declared_fields import (
    ABOVE_ZERO,
    FROM_ONE,
    FROM_ZERO,
    Number,
    optimiser_option,
    option,
    shape_option,
)

DrafterKind = Literal["eagle3", "mtp", "assistant", "block"]
Dtype = Literal["bfloat16", "float32"]

WITH_HEADS: tuple[DrafterKind, ...] = ("eagle3", "block")
WITH_WIDTHS: tuple[DrafterKind, ...] = (*WITH_HEADS, "assistant")
KINDS_OF: dict[str, tuple[DrafterKind, ...]] = {
    "draft_vocab": ("eagle3",),
    **dict.fromkeys(("kv_heads", "head_dim"), WITH_HEADS),
    **dict.fromkeys(("hidden", "intermediate", "layers", "heads"), WITH_WIDTHS),
    **dict.fromkeys(("causal", "mask_token"), ("block",)),
    **dict.fromkeys(("finetune", "conventions"), ("mtp",)),
}
"""Kinds of drafters to which a shape option applies; other kinds refuse it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Times are in minutes; widths and counts concern the drafter. None: a default derived from the target."""

    target: str = option(help="Hub id, folder or bundled name.")
    prompts: list[Path] = option(help="JSONL with 'question', 'prompt', 'turns' or 'messages'; may be repeated.")
    out: Path = option(help="Folder for the drafter: new, empty, or that of an earlier run.", file_okay=False)
    overwrite: bool = option(False, "Replace the model or the run in the folder of --out.")
    kind: DrafterKind = option("eagle3", "An EAGLE-3 head, an MTP module, a frozen-KV assistant, or a block drafter.")
    tokenizer: str | None = option(None, "A tokenizer; default: that of the target.")
    answers: int = option(4000, "Maximum number of answers that the target writes.", number=FROM_ONE)
    answer_minutes: float = option(10.0, "Maximum minutes for these answers.", number=ABOVE_ZERO)
    minutes: float = option(10.0, "Minutes of training.", number=ABOVE_ZERO)
    steps: int = option(0, "Also stop after this many optimiser steps; 0: by time alone.", min=0)
    batch: int = option(64, "Answers generated at a time.", number=FROM_ONE)
    max_new_tokens: int = option(256, "Longest answer in tokens.", number=FROM_ONE)
    temperature: float = option(1.0, "Temperature of every eighth answer; the others are greedy.", number=FROM_ZERO)
    length: int = option(512, "Tokens of a packed row; longest prompt with answer.", number=FROM_ONE)
    rows: int = option(16, "Packed rows per step and process.", number=FROM_ONE)
    draft_steps: int = option(5, "Steps of a training draft; block: drafts per block.", number=FROM_ONE)
    report_count: int = option(64, "Held-out prompts for the report.", number=FROM_ONE)
    cache_gb: float = option(8.0, "Gigabytes for cached states of the target.", number=FROM_ZERO)
    log_every: float = option(15.0, "Seconds between progress lines if there is no terminal.", number=FROM_ZERO)
    seed: int = option(1, "Seed of prompt order, new weights and sampled answers.", number=Number(int, 0, 1 << 62))
    dtype: Dtype = option("bfloat16", "The target's dtype; the drafter is trained in bfloat16.")
    device: str | None = option(None, "cpu, cuda, ...; default: the GPU, else the CPU.")
    draft_vocab: int = shape_option(8192, "EAGLE-3: size of the vocabulary that it drafts from.", number=FROM_ONE)
    hidden: int | None = shape_option(
        None, "Width; default: the target's (block: always); assistant: half.", number=FROM_ONE
    )
    intermediate: int | None = shape_option(
        None, "MLP width; default: 3 times hidden; assistant: 4 times.", number=FROM_ONE
    )
    layers: int | None = shape_option(None, "Number of layers; default: 1; assistant and block: 2.", number=FROM_ONE)
    heads: int | None = shape_option(None, "Query heads; default: the target's.", number=FROM_ONE)
    kv_heads: int | None = shape_option(None, "EAGLE-3 and block: K/V heads; default: the target's.", number=FROM_ONE)
    head_dim: int | None = shape_option(
        None, "EAGLE-3 and block: size of a head; default: hidden / heads.", number=FROM_ONE
    )
    causal: bool = shape_option(False, "Block: a row sees only rows up to itself (JetSpec).")
    mask_token: int | None = shape_option(None, "Block: id of MASK; default: the padding token's.")
    finetune: Path | None = shape_option(
        None, "MTP: folder of the module to continue from; default: the target's own, else a new one."
    )
    conventions: Path | None = shape_option(
        None, "MTP: JSON as in mtp_conventions.json; default: those of the module or family.", dir_okay=False
    )
    optimizer: Literal["muon", "adamw"] = optimiser_option("muon")
    lr: float = optimiser_option(1e-3, "Peak learning rate of AdamW.", number=ABOVE_ZERO)
    muon_lr: float = optimiser_option(1e-2, "Peak learning rate of Muon.", number=ABOVE_ZERO)


def require_own_options(settings: TrainSettings) -> None:
    """Raise ConfigError for an option of another kind of drafter."""
    for each in fields(settings):
        kinds, value = KINDS_OF.get(each.name, (settings.kind,)), getattr(settings, each.name)
        if settings.kind not in kinds and value != each.default:
            given = f"--{each.name.replace('_', '-')} {shown(value)}"
            raise ConfigError(
                f"{given} is an option of --kind {' and '.join(kinds)}, not of {settings.kind}; leave it out"
            )
