"""Times ways of generating against each other on the same prompts: what `specdec bench` and `specdec eval` share.

The ways take turns batch by batch, so that a slow moment of a shared machine affects all of them; processor time shows
how much of the machine others took. It does not know what is compared, or how figures are reported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from time import perf_counter, process_time
from typing import Any

from specdec.runtime.request_output import GenerationOutput

TokenPrompts = list[list[int]]
"""Token ids of some prompts, or of the outputs to them."""

Way = Callable[[TokenPrompts], Sequence[GenerationOutput]]
"""One way of generating: prompts -> their outputs, in order."""

Runs = dict[str, dict[str, Any]]
"""Plain values of each way's output to one prompt: text, token_ids, finish_reason, stats (`RequestStats`), and its
share of the batch's seconds and processor_seconds, those of all threads of this process."""


def run_interleaved(ways: Mapping[str, Way], prompts: Mapping[str, TokenPrompts]) -> list[Runs]:
    """Run every way once, on its own prompts of one batch. Returns the runs of each prompt."""
    runs: list[Runs] = [{} for _ in next(iter(prompts.values()))]
    for name, generate in ways.items():
        start, processor = perf_counter(), process_time()
        outputs = generate(prompts[name])
        seconds, processor_seconds = perf_counter() - start, process_time() - processor
        for run, out in zip(runs, outputs, strict=True):
            run[name] = {
                "token_ids": out.token_ids,
                "text": out.text,
                "finish_reason": out.finish_reason,
                "stats": asdict(out.stats),
                "seconds": seconds / len(runs),
                "processor_seconds": processor_seconds / len(runs),
            }
    return runs


def tokens_per_second(runs: Sequence[Runs], name: str) -> float:
    """Output tokens of one way per second of its own batches."""
    own = [run[name] for run in runs]
    seconds: float = sum(run["seconds"] for run in own)
    return sum(len(run["token_ids"]) for run in own) / seconds


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Position of the first token that differs; None if the outputs are equal."""
    if ours == reference:
        return None
    shorter = min(len(ours), len(reference))
    return next((i for i in range(shorter) if ours[i] != reference[i]), shorter)
