"""Small engines on every backend against transformers: the text must be that of the target alone, token for token.

Where two tokens' logits are closer than `TIE`, the order of a sum may decide, and the rest is skipped.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.device import DEVICE, ON_CPU  # isort: skip - before triton
import torch
from transformers import PreTrainedModel

from bench.report import Row
from bench.subjects import prompts_of
from bench.tiny_targets import CHAIN, FAMILIES, TREE, VOCAB, Setting, greedy, tiny_engine, tiny_target
from bench.verify import attempt
from specdec.config import SamplingParams
from specdec.gpu.operations import Operations, choose_operations
from specdec.models.target import TargetModel

TIE = 1e-3
EVERY_BACKEND = ("gemma4-e2b", "gemma2", "gpt_oss", "llama")
"""Families that run on all of them; the others are only compared where their layers are fused."""
DRAFTS = [("none", CHAIN), ("n-gram", CHAIN), ("MTP", CHAIN), ("MTP", TREE), ("EAGLE-3", CHAIN), ("EAGLE-3", TREE)]
SETTINGS = [Setting(*draft, page_size) for draft in DRAFTS[-1 if ON_CPU else 0 :] for page_size in (1, 16)]
SIZES: dict[str, Any] = {"max_batch_size": 2, "prefill_chunk": 32, "prefix_cache": False}

Wanted = Sequence[tuple[list[int], list[float]]]


def check_rows(families: Sequence[str], head_dim: int, lengths: Sequence[int], new: int) -> Iterator[Row]:
    """One row a family, backend, drafter and page size."""
    prompts = prompts_of(lengths, VOCAB, 0)
    for family in families or FAMILIES:
        model = tiny_target(family, head_dim)
        wanted = [greedy(model, prompt, new) for prompt in prompts]
        for attention, fused in (("torch", False), ("triton", False), ("triton", True)):
            ops = choose_operations(fused, attention, DEVICE, torch.float32)
            if not fused and family not in EVERY_BACKEND:
                continue
            if fused and (reason := TargetModel(model, ops).unfused) is not None:
                if family not in EVERY_BACKEND:
                    yield Row(f"fused, {family}", reason, ok=False)
                continue  # a family without
            for setting in filter(lambda each: each.fits(family), SETTINGS):
                name = f"{'fused' if fused else attention}, {family}, {setting.summary}"
                yield attempt(name, _row, name, model, setting, attention, ops, prompts, wanted)


def _row(
    name: str, model: PreTrainedModel, setting: Setting, attention: str, ops: Operations, prompts: Any, wanted: Wanted
) -> Row:
    new = len(wanted[0][0])
    engine = tiny_engine(TargetModel(model, ops), setting, attention=attention, **SIZES)
    for _ in range(1 if ON_CPU else 2):  # the first time kernels are compiled
        begin = time.perf_counter()
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=new), progress=False)
        ms = (time.perf_counter() - begin) * 1e3 / sum(len(out.token_ids) for out in outputs)
    engine.table.check()
    wrong, ties = differences([out.token_ids for out in outputs], wanted)
    accepted = sum(sum(out.stats.accepted_counts) for out in outputs)
    found = f"{wrong} of {new * len(prompts)} tokens differ"
    found += f", {ties} after a tie" if ties else ""
    found += f"; {accepted} drafts accepted" if accepted else ""
    return Row(name, found, f"{ms:.1f} ms a token", not wrong)


def differences(got: Sequence[list[int]], wanted: Wanted) -> tuple[int, int]:
    """(tokens that differ, those of them after a token that had won by less than TIE)."""
    wrong = ties = 0
    for mine, (tokens, margins) in zip(got, wanted, strict=True):
        apart = [i for i, (a, b) in enumerate(zip(mine, tokens, strict=True)) if a != b]
        if apart and margins[apart[0]] < TIE:
            ties += len(apart)
        else:
            wrong += len(apart)
    return wrong, ties
