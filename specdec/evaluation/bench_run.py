"""Tokens per second of a pair with and without its drafter, in one run; reported only if the outputs are equal.

Compare the ratios: absolute figures depend on the machine and the moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.evaluation.conditions import VERSIONS, hardware, pair_names
from specdec.evaluation.contest import Contestant, engine_contestant, require_parity, take_turns
from specdec.evaluation.gsm8k_report import final_number, is_correct, table_lines
from specdec.evaluation.request_figures import acceptance_figures, time_figures
from specdec.evaluation.tasks import batches_of
from specdec.evaluation.transformers_peer import assisted_peer, plain_peer
from specdec.progress import Interrupted, progress_bar, working
from specdec.runtime.draft_reports import acceptance_in_words, busy_in_words, depths_in_words, why_slower
from specdec.runtime.request import RequestStats
from specdec.text.prompt_files import Problem


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Result of `specdec bench` on prompts; missing figures are None.

    tokens_per_second: by contestant, in the order they ran. cut_off: number of outputs that `max_new_tokens` ended.
    stats: statistics of the engine with the drafter over all prompts; figures of drafts also have fields here.
    drafts_off: why its newest round had no draft. slower: why it was slower than plain decoding, if it was.

    times: `time_figures` of each engine. speculative_decoding: `acceptance_figures`. categories: by name: number of
    prompts, acceptance length, and tokens/s of each contestant. data: source of the prompts. template, thinking: how
    prompts were rendered, in words. processor_share: processor seconds of this process per second of the measurement;
    None on a GPU. Below 1, times are longer than on an idle machine.
    """

    target: str
    drafter: str | None
    prompts: int
    spec: SpecConfig
    temperature: float
    batch_size: int
    tokens_per_second: dict[str, float]
    acceptance_length: float
    accepted_per_position: list[float]
    stats: RequestStats
    drafts_off: str
    slower: str
    accuracy: float | None
    cut_off: int
    identical_to_plain: bool
    hardware: str
    versions: str
    data: str = ""
    template: str = ""
    thinking: str = ""
    times: dict[str, dict[str, Any]] = field(default_factory=dict)
    speculative_decoding: dict[str, Any] | None = None
    categories: dict[str, dict[str, Any]] = field(default_factory=dict)
    processor_share: float | None = None


def run_bench(
    *,
    target: str | Path,
    drafter: str | Path | None,
    prompts: Sequence[Problem],
    spec: SpecConfig,
    config: EngineConfig,
    params: SamplingParams,
    raw: bool = False,
    peer: bool = False,
    data: str = "",
    **loading: Any,
) -> BenchReport:
    """Run every contestant on every prompt. Raises SpecDecError if an output differs from plain decoding.

    params: need a seed at temperatures above 0, since otherwise no two outputs would agree. data: the prompts' source,
    for the report. loading: other arguments of `Engine.from_pretrained`. Ctrl-C raises Interrupted with the report of
    the prompts that all contestants finished.
    """
    if params.temperature > 0 and params.seed is None:
        raise ConfigError(f"temperature={params.temperature} without a seed: outputs could not be compared; give one")
    if not prompts:
        raise ConfigError("prompts is empty; give at least one")
    target, drafter = pair_names(target, drafter)
    config = replace(config, prefix_cache=False)  # every contestant computes every prompt
    with working(f"loading {target}"):
        engine = Engine.from_pretrained(target, drafter, spec=spec, config=config, **loading)
    spec = engine.spec
    bare = engine if drafter is None else Engine(engine.target, None, tokenizer=engine.tokenizer, config=config)
    plain = engine_contestant("specdec, no drafter", bare, params)
    drafting = None if drafter is None else engine_contestant(f"specdec, {drafter}", engine, params)
    contestants = [plain] if drafting is None else [plain, drafting]
    if peer:
        contestants += [plain_peer(engine, params), *assisted_peer(engine, params, spec.num_steps)]
    batches = batches_of(prompts, range(len(prompts)), config.max_batch_size)  # no batch spans two categories
    starts = [0, *accumulate(map(len, batches))]
    prompts = [prompts[i] for batch in batches for i in batch]
    ids = [engine.encode(problem.text) if raw else engine.chat_prompt(problem.text) for problem in prompts]
    with working("warming up"):  # allocations, thread pools, kernels
        for contestant in contestants:
            contestant.run(ids[:1])
            contestant.requests.clear()
    warm_up = engine.stats()

    def report() -> BenchReport:
        if drafting is not None:
            require_parity(plain, drafting)
        stats = engine.stats()
        stats.add(warm_up, sign=-1)
        slower, accepted = "", None
        if drafting is not None:
            slower = why_slower(drafting.tokens_per_second / plain.tokens_per_second, stats, off=engine.drafts_off)
            accepted = acceptance_figures(drafting.finished_requests, spec.depth)
        return BenchReport(
            target=target,
            drafter=drafter,
            prompts=len(plain.outputs),
            spec=spec,
            temperature=params.temperature,
            batch_size=config.max_batch_size,
            tokens_per_second={contestant.name: contestant.tokens_per_second for contestant in contestants},
            acceptance_length=stats.acceptance_length,
            accepted_per_position=stats.accepted_per_position,
            stats=stats.copy(),
            drafts_off=engine.drafts_off,
            slower=slower,
            accuracy=_accuracy(engine, plain, prompts),
            cut_off=_cut_off(engine, plain, params),
            identical_to_plain=True,
            hardware=hardware(engine.target.device),
            versions=VERSIONS,
            data=data,
            template="raw" if raw or not chat else "chat template",
            thinking="the template's default" if chat and not raw and "enable_thinking" in str(chat) else "none",
            times={one.name: time_figures(one.finished_requests, one.seconds) for one in contestants if one.requests},
            speculative_decoding=accepted,
            categories=_by_category(contestants, drafting or plain, prompts, starts),
            processor_share=_processor_share(contestants) if engine.target.device.type == "cpu" else None,
        )

    chat = getattr(engine.tokenizer, "chat_template", None)
    try:
        with progress_bar("measuring", len(batches)) as update:
            take_turns(contestants, [ids[start:end] for start, end in pairwise(starts)], update)
    except KeyboardInterrupt as stop:
        done = len(plain.outputs)
        raise Interrupted(f"{done} of {len(ids)} prompts were measured", report() if done else None) from stop
    return report()


def _by_category(
    contestants: Sequence[Contestant], drafting: Contestant, prompts: Sequence[Problem], starts: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Figures by category from the measured groups; empty without categories. starts: each group's first prompt."""
    laps: dict[str, list[int]] = {}
    for lap in range(len(drafting.laps)):
        if (name := prompts[starts[lap]].category) is not None:
            laps.setdefault(name, []).append(lap)

    def figures(own: Sequence[int]) -> dict[str, Any]:
        places = [i for lap in own for i in range(starts[lap], starts[lap + 1])]
        return {
            "prompts": len(places),
            "acceptance_length": RequestStats.total(drafting.requests[i] for i in places).acceptance_length,
            "tokens_per_second": {
                one.name: sum(len(one.outputs[i]) for i in places) / sum(one.laps[lap] for lap in own)
                for one in contestants
            },
        }

    return {name: figures(own) for name, own in laps.items()}


def markdown_table(report: BenchReport) -> str:
    """The report as a Markdown table with one line of context."""
    speeds = report.tokens_per_second
    base = next(iter(speeds.values()))
    rows = [
        {
            "run": name,
            "tokens/s": f"{x:.1f}",
            **_time_cells(report.times.get(name)),
            "vs no drafter": f"{x / base:.2f}x",
        }
        for name, x in speeds.items()
    ]
    if report.drafter is not None and not report.stats.drafted_rounds:
        rows[1]["vs no drafter"] = "no drafts"  # the ratio of two plain runs is noise
    busy = busy_in_words(report.processor_share)
    accuracy = "" if report.accuracy is None else f"; accuracy {100 * report.accuracy:.1f} %"
    if accuracy and report.cut_off:  # a cut-off answer is mostly wrong
        accuracy += f", cut off: {report.cut_off} of {report.prompts}"
    lines = [
        *table_lines(rows),
        "",
        f"{report.target}, {report.prompts} prompts, batch {report.batch_size}, temperature {report.temperature:g}, "
        f"{report.spec.num_steps} steps of topk {report.spec.topk}, {report.spec.num_nodes} nodes: "
        f"{_drafts_in_words(report)}{accuracy}; "
        f"identical to plain decoding: yes. {report.hardware}, {report.versions}{busy and '; '}{busy}.",
        *_acceptance_lines(report),
        *_category_lines(report),
    ]
    return "\n".join(lines)


def _time_cells(times: dict[str, Any] | None) -> dict[str, str]:
    """Cells of the table; empty if a run has no figures of its requests."""
    cells = dict.fromkeys(("tokens/s a user", "TPOT ms (p50, p99)", "TTFT ms (p50, p99)"), "")
    if times is None:
        return cells
    if times["tpot_ms"] is not None:
        cells["tokens/s a user"] = f"{times['tokens_per_second_per_user']:.1f}"
    for head, spread in (("TPOT ms (p50, p99)", times["tpot_ms"]), ("TTFT ms (p50, p99)", times["ttft_ms"])):
        if spread is not None:
            cells[head] = f"{spread['mean']:.2f} ({spread['p50']:.2f}, {spread['p99']:.2f})"
    return cells


def _acceptance_lines(report: BenchReport) -> list[str]:
    """Figures of drafts that other tools print, if there were drafts, and the conditions they depend on."""
    known = {"data": report.data, "template": report.template, "thinking": report.thinking}
    lines = ["", "; ".join(f"{name}: {words}" for name, words in known.items() if words)] if any(known.values()) else []
    found = report.speculative_decoding
    if found is None or not found["num_spec_steps"]:
        return lines
    shares = {name: ", ".join(f"{x:.2f}" for x in found[f"{name}per_position"]) for name in ("", "conditional_")}
    return [
        *lines,
        "",
        f"mean acceptance length {found['mean_acceptance_length']:.3f} by token, "
        f"{found['acceptance_length_per_request']:.3f} by request; draft acceptance rate "
        f"{100 * found['draft_acceptance_rate']:.1f} %; of all rounds with drafts, by position {shares['']}; "
        f"given the one before {shares['conditional_']}; "
        f"{found['accepted_per_node']:.3f} accepted per verified node",
    ]


def _category_lines(report: BenchReport) -> list[str]:
    rows = [
        {"category": name, "prompts": str(one["prompts"]), "acceptance length": f"{one['acceptance_length']:.2f}"}
        | {f"{run}: tokens/s": f"{speed:.1f}" for run, speed in one["tokens_per_second"].items()}
        for name, one in report.categories.items()
    ]
    return ["", *table_lines(rows)] if rows else []


def _drafts_in_words(report: BenchReport) -> str:
    stats = report.stats
    if report.drafter is None:
        return "no drafter"
    if stats.drafted_rounds:
        by_depth = depths_in_words(stats.accepted_per_position, stats.drafted_counts)
        found = f"{acceptance_in_words(stats, report.drafts_off)} (by position {by_depth})"
        return f"{found}; slower, since {report.slower}" if report.slower else found
    if not report.spec.adaptive or not stats.rounds:
        return "no drafts were made: no answer was long enough for one"
    why = f" ({report.drafts_off})" if report.drafts_off else ""
    return f"no drafts were made: none pays here; `--fixed-drafts` measures the drafter{why}"


def _processor_share(contestants: Sequence[Contestant]) -> float:
    return sum(one.processor_seconds for one in contestants) / sum(one.seconds for one in contestants)


def _cut_off(engine: Engine, plain: Contestant, params: SamplingParams) -> int:
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else engine.end_tokens)}
    return sum(len(ids) == params.max_new_tokens and ids[-1] not in ends for ids in plain.outputs)


def _accuracy(engine: Engine, plain: Contestant, prompts: Sequence[Problem]) -> float | None:
    """The share of right answers among prompts with a reference answer; None if there are none."""
    answered = zip(plain.outputs, (problem.answer or "" for problem in prompts), strict=False)  # fewer if interrupted
    graded = [is_correct(engine.decode(ids), answer) for ids, answer in answered if final_number(answer) is not None]
    return sum(graded) / len(graded) if graded else None
