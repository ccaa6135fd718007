"""The report of an evaluation, a pure function of its transcripts: as JSON values, as Markdown, and as a plot.

    strict       the number after the first `####` that has one: the answer that the model marked
    last_number  the last number in the text, marked or not

The first marker counts, as in GSM8K's own scorer and lm-eval's strict-match. Numbers are compared by value: "$1,234.50"
is 1234.5, "18.00" and "18 dollars" are 18, "25%" is 25. Figures that depend on the machine and the moment are in
`timing`; with adaptive drafts, which follow measured times, those of drafts do too. All other figures are equal in two
reports of one evaluation, whatever the interruptions and the number of processes.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import counted
from specdec.measurement.phase_report import png_of
from specdec.measurement.timed_comparison import (
    Record,
    group_lines,
    grouped_figures,
    length_in_words,
    run_figures,
    table_lines,
)
from specdec.runtime.drafts.draft_reports import depths_in_words, why_no_drafts, why_slower
from specdec.runtime.request_output import RequestStats

# a minus after a digit, a word or a bracket subtracts: "10-3" ends in 3, "= -3" in -3
NUMBER = r"[$€£]?((?<![\w)%])[-−])?[$€£]?(\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
ANY_NUMBER = re.compile(NUMBER)
MARKED_NUMBER = re.compile("#### *" + NUMBER)
Z_95 = 1.959963984540054


def final_number(text: str) -> Decimal | None:
    """The number after the first `####` that has one."""
    found = MARKED_NUMBER.search(text)
    return _as_decimal(*found.groups(default="")) if found else None


def last_number(text: str) -> Decimal | None:
    found = ANY_NUMBER.findall(text)
    return _as_decimal(*found[-1]) if found else None


SCORES: dict[str, Callable[[str], Decimal | None]] = {"strict": final_number, "last_number": last_number}


def is_correct(text: str, answer: str, score: str = "strict") -> bool:
    """Does the number in `text` equal the one marked in the reference `answer`? A missing number is wrong."""
    number = SCORES[score](text)
    return number is not None and number == final_number(answer)


def wilson_interval(correct: int, problems: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share."""
    share, z2 = correct / problems, Z_95**2
    middle = share + z2 / (2 * problems)
    half = Z_95 * math.sqrt(share * (1 - share) / problems + z2 / (4 * problems**2))
    scale = 1 + z2 / problems
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value: how likely chance alone splits the problems solved by only one run this unevenly."""
    changed = only_first + only_second
    tail = sum(math.comb(changed, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / (1 << changed))


def _as_decimal(sign: str, digits: str) -> Decimal:
    value = Decimal(digits.replace(",", ""))
    return -value if sign else value


Report = dict[str, Any]
"""settings, note, runs (scores, tokens, acceptance by name), categories and turns (the same by category and by turn of
a dialogue, where the data has more than one), comparison (of two runs, else None), timing."""

SCORE_HEADS = {"strict": "strict accuracy (Wilson 95 %)", "last_number": "last number"}


def make_report(
    settings: Record,
    answers: Sequence[str] | None,
    records: Sequence[Record],
    hardware: str,
    categories: Sequence[str | None],
    note: str = "",
) -> Report:
    """`records` in the order of the problems; answers and categories by the number of the problem.

    answers None: nothing is graded, and a speed-up is given only if every output equals plain decoding. Tokens per
    second are those of one process.
    """
    names = list(records[0]["runs"])
    graded = {} if answers is None else {name: grade(records, name, answers) for name in names}
    comparison = _compare(records) if len(names) == 2 else None
    if comparison is not None and graded:
        comparison |= {score: _compare_scores(names, *(graded[name][score] for name in names)) for score in SCORES}
    # with accuracies, outputs may differ; without them, a speed-up needs equal outputs
    comparable = comparison is not None and (bool(graded) or not comparison["unequal"])
    whole = run_figures(records, comparable)
    for name, scores in graded.items():
        whole["runs"][name] |= {score: _share(right) for score, right in scores.items()}
    several = any(one["turn"] for one in records)
    turns = [f"turn {one['turn'] + 1}" if several else None for one in records]
    return {
        "settings": settings,
        "note": note,
        "runs": whole["runs"],
        "categories": grouped_figures(records, comparable, [categories[one["index"]] for one in records]),
        "turns": grouped_figures(records, comparable, turns),
        "comparison": comparison,
        "timing": {"hardware": hardware, **whole["timing"]},
    }


def markdown(report: Report) -> str:
    """A table, the result of the comparison, and the settings that are not off."""
    settings = report["settings"]
    known = [f"{key} {value}" for key, value in settings.items() if value not in (None, "", [])]
    drafting, groups = next(iter(report["runs"])), report["categories"] | report["turns"]
    lines = [*_run_table(report), *_comparison_lines(report)]
    lines += group_lines(groups, drafting, speeds_may_be_shown(report))
    if report["note"]:
        lines += ["", f"{settings['task']}: {report['note']}."]
    return "\n".join([*lines, "", "; ".join([*known, report["timing"]["hardware"]])])


def speeds_may_be_shown(report: Report) -> bool:
    """False if two ungraded runs have different outputs."""
    return report["comparison"] is None or "speed_up" in report["timing"]


def grade(records: Sequence[Record], name: str, answers: Sequence[str]) -> dict[str, list[bool]]:
    """Right or wrong by score, a flag for each record."""
    texts = [(record["runs"][name]["text"], answers[record["index"]]) for record in records]
    return {score: [is_correct(text, answer, score) for text, answer in texts] for score in SCORES}


def _share(right: Sequence[bool]) -> dict[str, Any]:
    low, high = wilson_interval(sum(right), len(right))
    return {"correct": sum(right), "share": sum(right) / len(right), "wilson_95": [low, high]}


def _compare(records: Sequence[Record]) -> dict[str, Any]:
    parted = [record for record in records if record["parting"]]
    turns = [{"turn": record["turn"]} if record["turn"] else {} for record in parted]
    unequal = [{"problem": each["index"], **turn, **each["parting"]} for each, turn in zip(parted, turns, strict=True)]
    return {"equal": len(records) - len(unequal), "unequal": unequal}


def _compare_scores(names: Sequence[str], first: Sequence[bool], second: Sequence[bool]) -> dict[str, Any]:
    """Numbers of problems that only one of the two runs solved, and the p-value of this split."""
    split = Counter(zip(first, second, strict=True))
    only_first, only_second = split[True, False], split[False, True]
    return {
        f"only_{names[0]}": only_first,
        f"only_{names[1]}": only_second,
        "mcnemar_p": mcnemar_p(only_first, only_second),
    }


def _run_table(report: Report) -> list[str]:
    rows: list[dict[str, str]] = []
    for name, run in report["runs"].items():
        speed = f"{report['timing'][name]['tokens_per_second']:.1f}" if speeds_may_be_shown(report) else "withheld"
        row = {"run": name} | {head: _percentage(run[score]) for score, head in SCORE_HEADS.items() if score in run}
        row |= {"cut off": str(run["cut_off"]), "acceptance length": length_in_words(run)}
        by_position = depths_in_words(run["accepted_per_position"], run["drafted_counts"])
        row |= {"by position": by_position, "tokens/s": speed}
        rows.append(row)
    return table_lines(rows)


def _percentage(score: dict[str, Any]) -> str:
    share, low, high = (100 * x for x in (score["share"], *score["wilson_95"]))
    return f"{share:.1f} % ({low:.1f} to {high:.1f})"


def _comparison_lines(report: Report) -> list[str]:
    comparison, speed_up = report["comparison"], report["timing"].get("speed_up")
    if comparison is None:
        return []
    differ, total = len(comparison["unequal"]), comparison["equal"] + len(comparison["unequal"])
    found = f"{differ} of {total} outputs differ"
    runs = f"{' over '.join(report['runs'])}, tokens/s"
    run = _first_run(report)
    if speed_up is None:
        line = f"- no speed-up: {found} from plain decoding"
    elif not run["drafted_rounds"]:
        line = f"- no speed-up, since {why_no_drafts(run['rounds'], report['settings']['adaptive'])}"
    else:
        line = f"- speed-up: {speed_up:.2f}x ({runs}{f'; {found}' if differ else ''})"
        slower = why_slower(speed_up, RequestStats(rounds=run["rounds"], round_tokens=run["round_tokens"]))
        line += f"; slower, since {slower}" if slower else ""
    return [
        "",
        line,
        f"- equal transcripts: {comparison['equal']} of {total}",
        *(_parting_line(one) for one in comparison["unequal"]),
        *(
            f"- {score}: " + ", ".join(_figure_in_words(*figure) for figure in comparison[score].items())
            for score in SCORES
            if score in comparison
        ),
    ]


def _figure_in_words(name: str, value: Any) -> str:
    return f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"


def _parting_line(one: Record) -> str:
    where = f"problem {one['problem']}" + (f", turn {one['turn'] + 1}," if "turn" in one else "")
    if one["position"] is None:
        return f"- {where} follows an answer that differs"
    if one["logit_margin"] is None:
        return f"- {where} ends in one run at token {one['position']}, and goes on in the other"
    return f"- {where} parts at token {one['position']}, logit margin {one['logit_margin']:.2g}"


def drawn(report: Report) -> bytes:
    """Accuracy with intervals (if graded), acceptance, and tokens per second: bars side by side, as a PNG."""
    from matplotlib.figure import Figure

    runs, first = report["runs"], _first_run(report)
    scores = {f"{score}, {name}": run[score] for score in SCORES for name, run in runs.items() if score in run}
    drafts = {f"draft {place}": share for place, share in enumerate(first["accepted_per_position"], start=1)}
    lengths = {name: _first_run(group)["acceptance_length"] for name, group in report["categories"].items()}
    speeds = {name: report["timing"][name]["tokens_per_second"] for name in runs}
    panels: dict[str, dict[str, float]] = {
        "accuracy, Wilson 95 % interval": {label: score["share"] for label, score in scores.items()},
        "share of rounds that accept the draft": drafts,
        "acceptance length, tokens a forward": lengths if drafts else {},
        "tokens/s": speeds if speeds_may_be_shown(report) else {},
    }
    panels = {title: bars for title, bars in panels.items() if bars}
    figure = Figure(figsize=(4.2 * max(len(panels), 2), 4.2), layout="constrained")
    figure.suptitle(accuracy_title(report))
    for axes, (title, bars) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        labels, values = [*bars], [*bars.values()]
        spans = [scores[label]["wilson_95"] for label in labels if label in scores]
        errors = np.abs(np.transpose(spans) - values) if spans else None
        colours = ["tab:grey" if label.endswith("plain") else "tab:green" for label in labels]
        axes.bar_label(axes.barh(labels, values, color=colours, xerr=errors, capsize=4), fmt="%.3g", padding=2)
        axes.invert_yaxis()
        axes.margins(x=0.2)  # room for the figures
        axes.set(title=title)
    return png_of(figure)


def accuracy_title(report: Report) -> str:
    """Task, pair and main results, on two lines."""
    settings, first, comparison = report["settings"], _first_run(report), report["comparison"]
    drafter = f"drafter {Path(settings['drafter']).name}" if settings.get("drafter") else "no drafter"
    pair = f"{Path(settings['target']).name}, {drafter}"
    speed_up, found = report["timing"].get("speed_up"), list[str]()
    if speed_up is not None:
        found = [f"speed-up {speed_up:.2f}x" if first["drafted_rounds"] else "no drafts were made"]
    found += [f"acceptance length {first['acceptance_length']:.2f}"] if first["accepted_per_position"] else []
    if comparison is not None:
        found.append(f"{comparison['equal']} of {comparison['equal'] + len(comparison['unequal'])} outputs equal")
    found = found or [report["timing"]["hardware"]]
    return f"{settings['task']}, {counted(settings['problems'], 'problem')}: {pair}\n{', '.join(found)}"


def _first_run(report: Report) -> Any:
    """The run with a drafter, if there is one: only it has acceptance by position."""
    return next(iter(report["runs"].values()))
