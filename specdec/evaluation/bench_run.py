"""Tokens per second of a pair with and without its drafter, in one run; reported only if the outputs are equal.

Compare the ratios: absolute figures depend on the machine and the moment.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from specdec.config import SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecDecError, counted
from specdec.evaluation.accuracy_report import final_number, grade
from specdec.evaluation.data_sets import batches_of
from specdec.measurement.conditions import VERSIONS, hardware
from specdec.measurement.timed_comparison import (
    Record,
    Runner,
    acceptance_figures,
    first_difference,
    group_lines,
    grouped_figures,
    rounded,
    run_figures,
    run_interleaved,
    stats_of,
    table_lines,
    time_figures,
)
from specdec.measurement.transformers_peer import assisted_peer, generate_whole
from specdec.progress import Interrupted, progress_bar, working
from specdec.runtime.drafts.draft_reports import (
    acceptance_in_words,
    busy_in_words,
    depths_in_words,
    why_no_drafts,
    why_slower,
)
from specdec.runtime.request_output import RequestStats
from specdec.text.prompt_files import Problem

PLAIN = "specdec, no drafter"
"""Name of the run whose outputs and speed the others are compared with."""

BenchReport = dict[str, Any]
"""Plain values of `specdec bench` on prompts, in the order of its JSON; missing figures are None.

tokens_per_second: by way of generating, in the order they ran. stats: statistics of the engine with the drafter over
all prompts; figures of drafts also have fields here. drafts_off: why its newest round had no draft. slower: why it was
slower than plain decoding, if it was. cut_off: number of outputs that `max_new_tokens` ended. identical_to_plain:
always True, since there is no report if an output differs (`require_parity`).

data: source of the prompts. template, thinking: how prompts were rendered, in words. times: `time_figures` of each
engine. speculative_decoding: `acceptance_figures`. categories: `run_figures` by name. processor_share: processor
seconds of this process per second of the measurement; None on a GPU. Below 1, times are longer than on an idle machine.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Every way of generating, on the same prompts.

    engine: without a prefix cache, so that every run computes every prompt. target, drafter, data: names of its models
    and of the prompts' source, for the report. params: with a seed at temperatures above 0, or no two outputs would
    agree. raw: prompts without the chat template. peer: also run transformers.
    """

    engine: Engine
    target: str
    drafter: str | None
    prompts: Sequence[Problem]
    params: SamplingParams
    raw: bool = False
    peer: bool = False
    data: str = ""

    def run(self) -> BenchReport:
        """Generate and report. Raises SpecDecError if an output differs from plain decoding. Ctrl-C raises Interrupted
        with the report of the prompts that all runners finished."""
        engine, params, prompts = self.engine, self.params, self.prompts
        bare = engine
        if self.drafter is not None:
            bare = Engine(engine.target, None, tokenizer=engine.tokenizer, config=engine.config)
        runners: dict[str, Runner] = {PLAIN: partial(bare.generate, params=params, progress=False)}
        if self.drafter is not None:
            runners[f"specdec, {self.drafter}"] = partial(engine.generate, params=params, progress=False)
        if self.peer:
            runners["transformers, plain"] = partial(generate_whole, engine, params)
            runners |= assisted_peer(engine, params, engine.spec.num_steps)
        ids = [engine.encode(problem.text) if self.raw else engine.chat_prompt(problem.text) for problem in prompts]
        with working("warming up"):  # allocations, thread pools, kernels
            for generate in runners.values():
                generate(ids[:1])
        records: list[Record] = []
        batches = batches_of(prompts, range(len(prompts)), engine.config.max_batch_size)
        try:
            with progress_bar("measuring", len(batches)) as update:
                for done, batch in enumerate(batches, start=1):
                    group = [ids[i] for i in batch]
                    runs = run_interleaved(runners, dict.fromkeys(runners, group))
                    records += [{"index": i, "turn": 0, "runs": run} for i, run in zip(batch, runs, strict=True)]
                    update(done)
        except KeyboardInterrupt as stop:
            finished = self.report(records) if records else None
            raise Interrupted(f"{len(records)} of {len(ids)} prompts were measured", finished) from stop
        return self.report(records)

    def report(self, records: Sequence[Record]) -> BenchReport:
        """The figures of the measured prompts."""
        engine, spec = self.engine, self.engine.spec
        template = None if self.raw else getattr(engine.tokenizer, "chat_template", None)
        engines = [PLAIN] if self.drafter is None else [PLAIN, f"specdec, {self.drafter}"]
        require_parity(records, engines[-1])
        requests = {name: stats_of(records, name) for name in engines}
        stats = RequestStats.total(requests[engines[-1]])
        whole = run_figures(records, comparable=False)
        speeds = {name: timing["tokens_per_second"] for name, timing in whole["timing"].items()}
        slower, accepted = "", None
        if self.drafter is not None:
            slower = why_slower(speeds[engines[-1]] / speeds[PLAIN], stats, off=engine.drafts_off)
            accepted = acceptance_figures(requests[engines[-1]], spec.depth)
        return {
            "target": self.target,
            "drafter": self.drafter,
            "prompts": len(records),
            "spec": asdict(spec),
            "temperature": self.params.temperature,
            "batch_size": engine.config.max_batch_size,
            "tokens_per_second": speeds,
            "acceptance_length": stats.acceptance_length,
            "accepted_per_position": stats.accepted_per_position,
            "stats": asdict(stats),
            "drafts_off": engine.drafts_off,
            "slower": slower,
            "accuracy": _accuracy(records, self.prompts),
            "cut_off": whole["runs"][PLAIN]["cut_off"],
            "hardware": hardware(engine.target.device),
            "versions": VERSIONS,
            "identical_to_plain": True,
            "data": self.data,
            "template": "chat template" if template else "raw",
            "thinking": "the template's default" if "enable_thinking" in str(template) else "none",
            "times": {name: time_figures(own, whole["timing"][name]["seconds"]) for name, own in requests.items()},
            "speculative_decoding": accepted,
            "categories": grouped_figures(records, False, [self.prompts[one["index"]].category for one in records]),
            "processor_share": _processor_share(records) if engine.target.device.type == "cpu" else None,
        }


def require_parity(records: Sequence[Record], name: str) -> None:
    """Raises SpecDecError at the first output of a run that differs from plain decoding."""
    for record in records:
        at = first_difference(record["runs"][name]["token_ids"], record["runs"][PLAIN]["token_ids"])
        if at is not None:
            raise SpecDecError(
                f"no figures: prompt {record['index']} differs from plain decoding at token {at} with {name}"
            )


def markdown_table(report: BenchReport) -> str:
    """The report as a Markdown table with one line of context."""
    speeds, drafter = report["tokens_per_second"], report["drafter"]
    spec, stats = SpecConfig(**report["spec"]), RequestStats(**report["stats"])
    rows = [
        {
            "run": name,
            "tokens/s": f"{x:.1f}",
            **_time_cells(report["times"].get(name)),
            "vs no drafter": f"{x / speeds[PLAIN]:.2f}x",
        }
        for name, x in speeds.items()
    ]
    if drafter is not None and not stats.drafted_rounds:
        rows[1]["vs no drafter"] = "no drafts"  # the ratio of two plain runs is noise
    busy = busy_in_words(report["processor_share"])
    accuracy = "" if report["accuracy"] is None else f"; accuracy {100 * report['accuracy']:.1f} %"
    if accuracy and report["cut_off"]:  # a cut-off answer is mostly wrong
        accuracy += f", cut off: {report['cut_off']} of {report['prompts']}"
    lines = [
        *table_lines(rows),
        "",
        f"{report['target']}, {counted(report['prompts'], 'prompt')}, batch {report['batch_size']}, temperature "
        f"{report['temperature']:g}, {counted(spec.num_steps, 'step')} of topk {spec.topk}, {spec.num_nodes} nodes: "
        f"{_drafts_in_words(report, stats)}{accuracy}; "
        f"identical to plain decoding: yes. {report['hardware']}, {report['versions']}{busy and '; '}{busy}.",
        "",
        f"data: {report['data']}; template: {report['template']}; thinking: {report['thinking']}",
        *_acceptance_lines(report["speculative_decoding"]),
        *group_lines(report["categories"], PLAIN if drafter is None else f"specdec, {drafter}"),
    ]
    return "\n".join(lines)


def _time_cells(times: dict[str, Any] | None) -> dict[str, str]:
    """Cells of the table; empty if a run has no figures of its requests."""
    times = times or {}
    cells = {"tokens/s a user": rounded(times.get("tokens_per_second_per_user"), 1)}
    for name in ("TPOT", "TTFT"):
        spread = times.get(f"{name.lower()}_ms")
        found = "" if spread is None else f"{spread['mean']:.2f} ({spread['p50']:.2f}, {spread['p99']:.2f})"
        cells[f"{name} ms (p50, p99)"] = found
    return cells


def _acceptance_lines(found: dict[str, Any] | None) -> list[str]:
    """Figures of `acceptance_figures`, if there were drafts."""
    if found is None or not found["num_spec_steps"]:
        return []
    shares = {name: ", ".join(f"{x:.2f}" for x in found[f"{name}per_position"]) for name in ("", "conditional_")}
    return [
        "",
        f"mean acceptance length {found['mean_acceptance_length']:.3f} by token, "
        f"{found['acceptance_length_per_request']:.3f} by request; draft acceptance rate "
        f"{100 * found['draft_acceptance_rate']:.1f} %; of all rounds with drafts, by position {shares['']}; "
        f"given the one before {shares['conditional_']}; "
        f"{found['accepted_per_node']:.3f} accepted per verified node",
    ]


def _drafts_in_words(report: BenchReport, stats: RequestStats) -> str:
    if report["drafter"] is None:
        return "no drafter"
    off, slower = report["drafts_off"], report["slower"]
    if stats.drafted_rounds:
        by_depth = depths_in_words(stats.accepted_per_position, stats.drafted_counts)
        found = f"{acceptance_in_words(stats, off)} (by position {by_depth})"
        return f"{found}; slower, since {slower}" if slower else found
    return why_no_drafts(stats.rounds, report["spec"]["adaptive"], off)


def _processor_share(records: Sequence[Record]) -> float:
    runs = [run for record in records for run in record["runs"].values()]
    return float(sum(run["processor_seconds"] for run in runs) / sum(run["seconds"] for run in runs))


def _accuracy(records: Sequence[Record], prompts: Sequence[Problem]) -> float | None:
    """The share of right answers among prompts with a reference answer; None if there are none."""
    answers = [problem.answer or "" for problem in prompts]
    answered = [record for record in records if final_number(answers[record["index"]]) is not None]
    right = grade(answered, PLAIN, answers)["strict"]
    return sum(right) / len(right) if right else None
