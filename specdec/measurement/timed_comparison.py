"""Times functions that generate (`Runner`) against each other on the same prompts, and computes their figures, for
`specdec bench` and `specdec eval`.

Runners take turns batch by batch, so that a slow moment of a shared machine affects all of them; processor time shows
how much of the machine others took. This file does not know what is compared or reported.

TTFT is the time from a request's submission to its first token. TPOT is the time per token after the first; its mean is
over requests, like `vllm bench serve` (TPOT) and AIPerf (ITL).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise, zip_longest
from time import perf_counter, process_time
from typing import Any

import numpy as np

from specdec.runtime.drafts.draft_reports import vllm_figures
from specdec.runtime.request_output import GenerationOutput, RequestStats

TokenPrompts = list[list[int]]
"""Token ids of some prompts, or of the outputs to them."""

Runner = Callable[[TokenPrompts], Sequence[GenerationOutput]]
"""One way of generating: prompts -> their outputs, in order."""

Runs = dict[str, dict[str, Any]]
"""Plain values of each runner's output to one prompt: text, token_ids, finish_reason, stats (`RequestStats`), and its
share of the batch's seconds and processor_seconds, those of all threads of this process."""

Record = dict[str, Any]
"""One turn of one problem: its index and runs (`Runs`). Records of `specdec eval` also have turn, batch (hash of its
problems) and parting (position and logit_margin of the first difference, or None)."""


RUN_FIGURES = (
    *("output_tokens", "acceptance_length", "accepted_per_position", "drafted_counts"),
    *("rounds", "round_tokens", "drafted_rounds"),
)
"""Figures of `RequestStats` that reports of runs have."""
UNNAMED = "other"
"""Category of problems without one, if others have one."""
WORDS = ("run", "category", "by position")
"""Headings of columns whose cells are not single figures."""


def run_interleaved(runners: Mapping[str, Runner], prompts: Mapping[str, TokenPrompts]) -> list[Runs]:
    """Run every runner once, on its own prompts of one batch. Returns the runs of each prompt."""
    runs: list[Runs] = [{} for _ in next(iter(prompts.values()))]
    for name, generate in runners.items():
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


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Position of the first token that differs, or that only one output has; None if the outputs are equal."""
    return next((at for at, (our, their) in enumerate(zip_longest(ours, reference)) if our != their), None)


def stats_of(records: Sequence[Record], name: str) -> list[RequestStats]:
    return [RequestStats(**record["runs"][name]["stats"]) for record in records]


def run_figures(records: Sequence[Record], comparable: bool) -> dict[str, Any]:
    """Tokens, acceptance and speed of each run over some records."""
    runs: dict[str, Any] = {}
    timing: dict[str, Any] = {}
    for name in records[0]["runs"]:
        made = [record["runs"][name] for record in records]
        stats = RequestStats.total(stats_of(records, name))
        seconds = sum(one["seconds"] for one in made)
        timing[name] = {"seconds": seconds, "tokens_per_second": stats.output_tokens / seconds}
        runs[name] = {figure: getattr(stats, figure) for figure in RUN_FIGURES}
        runs[name]["cut_off"] = sum(one["finish_reason"] == "length" for one in made)
    if comparable:
        first, second = (each["tokens_per_second"] for each in timing.values())
        timing["speed_up"] = first / second
    return {"problems": len({record["index"] for record in records}), "runs": runs, "timing": timing}


def grouped_figures(records: Sequence[Record], comparable: bool, names: Sequence[str | None]) -> dict[str, Any]:
    """Figures by group. names: of each record's group; if none has a name, there are no groups."""
    groups: dict[str, list[Record]] = {}
    for record, name in zip(records, names, strict=True):
        groups.setdefault(name or UNNAMED, []).append(record)
    return {name: run_figures(members, comparable) for name, members in groups.items()} if any(names) else {}


def time_figures(requests: Sequence[RequestStats], seconds: float) -> dict[str, Any]:
    """Times in milliseconds over requests; tokens/s in total and per user. seconds: total time."""
    tpots = [one.decode_seconds / (one.output_tokens - 1) for one in requests if one.output_tokens > 1]
    return {
        "output_tokens": sum(one.output_tokens for one in requests),
        "tokens_per_second": sum(one.output_tokens for one in requests) / seconds,
        "tokens_per_second_per_user": float(np.mean([1 / tpot for tpot in tpots])) if tpots else None,
        "tpot_ms": _spread(tpots),
        "ttft_ms": _spread([one.first_token_seconds for one in requests]),
    }


def acceptance_figures(requests: Sequence[RequestStats], max_drafts: int) -> dict[str, Any]:
    """vLLM's figures over all rounds with drafts, which weight requests by tokens, and further figures.

    acceptance_length_per_request: mean over the requests that drafted. per_position: share of the rounds with drafts
    that accepted draft 1, 2, ...; conditional_per_position: the share among rounds that accepted the draft before and
    drafted this deep, exact if all drafts have the same depth. accepted_per_node: accepted drafts per verified node,
    roots excluded.
    """
    total = RequestStats.total(requests)
    lengths = [1 + sum(one.accepted_counts) / one.drafted_rounds for one in requests if one.drafted_rounds]
    shares = total.accepted_per_position
    accepted = sum(total.accepted_counts)
    return vllm_figures(total, max_drafts) | {
        "acceptance_length_per_request": sum(lengths) / len(lengths) if lengths else 1.0,
        "per_position": [count / total.drafted_rounds for count in total.accepted_counts if total.drafted_rounds],
        "conditional_per_position": [later / share if share else 0.0 for share, later in pairwise([1.0, *shares])],
        "accepted_per_node": accepted / total.draft_nodes if total.draft_nodes else 0.0,
        "verified_nodes": total.draft_nodes,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    p50, p99 = np.percentile(seconds, (50, 99))
    return {"mean": 1e3 * float(np.mean(seconds)), "p50": 1e3 * float(p50), "p99": 1e3 * float(p99)}


def rounded(figure: float | None, digits: int) -> str:
    """A cell of a table; empty if there is no such figure."""
    return "" if figure is None else f"{figure:.{digits}f}"


def table_lines(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Rows, by heading, as lines of a Markdown table; figures are right-aligned."""
    rule = ["---" if head in WORDS else "---:" for head in rows[0]]
    return [f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *(row.values() for row in rows))]


def group_lines(groups: Mapping[str, Any], drafting: str, with_speed: bool = True) -> list[str]:
    """A table of `grouped_figures`, after an empty line; empty without groups. drafting: the run that has drafts."""
    rows: list[dict[str, str]] = []
    for name, group in groups.items():
        row = {"category": name, "problems": str(group["problems"])}
        row[f"{drafting}: acceptance length"] = length_in_words(group["runs"][drafting])
        if with_speed:
            row |= {f"{run}: tokens/s": f"{group['timing'][run]['tokens_per_second']:.1f}" for run in group["runs"]}
        if "speed_up" in group["timing"]:  # the ratio of two plain runs is noise
            drafted = group["runs"][drafting]["drafted_rounds"]
            row["speed-up"] = f"{group['timing']['speed_up']:.2f}x" if drafted else "no drafts"
        rows.append(row)
    return ["", *table_lines(rows)] if rows else []


def length_in_words(run: Mapping[str, Any]) -> str:
    """Acceptance length of a run of `run_figures`, and the share of rounds with drafts if below 90 %."""
    if not run["drafted_rounds"]:
        return "no drafts"
    share = run["drafted_rounds"] / run["rounds"]
    return f"{run['acceptance_length']:.2f}" + (f" in {100 * share:.0f} % of rounds" if share < 0.9 else "")
