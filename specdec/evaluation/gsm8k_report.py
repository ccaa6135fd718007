"""The report of an evaluation: a pure function of its transcripts, as plain JSON values and as Markdown.

What depends on the machine and the moment is in `timing`. The rest of two reports of one evaluation is equal, however
often it was interrupted and however many processes shared it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from specdec.evaluation.scoring import SCORES, is_correct, mcnemar_p, wilson_interval
from specdec.evaluation.transcripts import Record
from specdec.runtime.request import RequestStats

Report = dict[str, Any]
"""settings, note, runs (scores, tokens, acceptance by name), categories and turns (the same by category and by turn of
a dialogue, where the data has more than one), comparison (of two runs, else None), timing."""

UNNAMED = "other"
"""The category of problems without one, in data where others have one."""


def make_report(
    settings: Record,
    answers: Sequence[str] | None,
    records: Sequence[Record],
    hardware: str,
    categories: Sequence[str | None] = (),
    note: str = "",
) -> Report:
    """`records` in the order of the problems; answers and categories by the number of the problem.

    answers None: nothing is graded, and a speed-up is given only where every output is that of plain decoding. Tokens
    per second are those of one process.
    """
    names = list(records[0]["runs"])
    runs: dict[str, Any] = {name: _run(records, name) for name in names}
    timing: dict[str, Any] = {"hardware": hardware, **{name: _speed(records, name) for name in names}}
    graded: dict[str, dict[str, list[bool]]] = {}
    if answers is not None:
        graded = {name: _grade(records, name, answers) for name in names}
    for name, scores in graded.items():
        runs[name] |= {score: _share(right) for score, right in scores.items()}
    comparison: dict[str, Any] | None = None
    if len(names) == 2:
        comparison = _compare(records)
        if graded:
            first, second = graded.values()
            comparison |= {score: _split(names, first[score], second[score]) for score in SCORES}
        # an accuracy vouches for outputs that part; where there is none, a figure needs equal outputs
        if answers is not None or not comparison["unequal"]:
            timing["speed_up"] = _speed_up(timing, names)
    comparable = "speed_up" in timing
    return {
        "settings": settings,
        "note": note,
        "runs": runs,
        "categories": _by_category(records, categories, comparable),
        "turns": _by_turn(records, comparable),
        "comparison": comparison,
        "timing": timing,
    }


def markdown(report: Report) -> str:
    """A table, what the comparison found, and the settings that are not off."""
    settings = report["settings"]
    known = [f"{key} {value}" for key, value in settings.items() if value not in (None, "", [])]
    lines = [*_run_table(report), *_comparison_lines(report), *_category_table(report)]
    if report["note"]:
        lines += ["", f"{settings['task']}: {report['note']}."]
    return "\n".join([*lines, "", "; ".join([*known, report["timing"]["hardware"]])])


def speeds_may_be_shown(report: Report) -> bool:
    """Not where two runs were made for their speed and their outputs differ."""
    return report["comparison"] is None or "speed_up" in report["timing"]


def _run(records: Sequence[Record], name: str) -> dict[str, Any]:
    """Tokens and acceptance of one run over some records."""
    stats = RequestStats()
    for record in records:
        stats.add(RequestStats(**record["runs"][name]["stats"]))
    return {
        "output_tokens": stats.output_tokens,
        "cut_off": sum(record["runs"][name]["finish_reason"] == "length" for record in records),
        "acceptance_length": stats.acceptance_length,
        "accepted_per_position": stats.accepted_per_position,
    }


def _speed(records: Sequence[Record], name: str) -> dict[str, float]:
    seconds = sum(record["runs"][name]["seconds"] for record in records)
    tokens = sum(record["runs"][name]["stats"]["output_tokens"] for record in records)
    return {"seconds": seconds, "tokens_per_second": tokens / seconds}


def _speed_up(timing: dict[str, Any], names: Sequence[str]) -> float:
    """Of the first run over the second."""
    first, second = (timing[name]["tokens_per_second"] for name in names)
    return float(first / second)


def _grade(records: Sequence[Record], name: str, answers: Sequence[str]) -> dict[str, list[bool]]:
    """Right or wrong by score, a flag for each record."""
    texts = [(record["runs"][name]["text"], answers[record["index"]]) for record in records]
    return {score: [is_correct(text, answer, score) for text, answer in texts] for score in SCORES}


def _share(right: Sequence[bool]) -> dict[str, Any]:
    low, high = wilson_interval(sum(right), len(right))
    return {"correct": sum(right), "share": sum(right) / len(right), "wilson_95": [low, high]}


def _compare(records: Sequence[Record]) -> dict[str, Any]:
    unequal: list[Record] = []
    for record in records:
        if record["parting"]:
            turn = {"turn": record["turn"]} if record["turn"] else {}
            unequal.append({"problem": record["index"], **turn, **record["parting"]})
    return {"equal": len(records) - len(unequal), "unequal": unequal}


def _split(names: Sequence[str], first: Sequence[bool], second: Sequence[bool]) -> dict[str, Any]:
    """How many problems only one of the two runs solved, and how likely chance splits them so."""
    split = Counter(zip(first, second, strict=True))
    only_first, only_second = split[True, False], split[False, True]
    return {
        f"only_{names[0]}": only_first,
        f"only_{names[1]}": only_second,
        "mcnemar_p": mcnemar_p(only_first, only_second),
    }


def _by_category(records: Sequence[Record], categories: Sequence[str | None], comparable: bool) -> dict[str, Any]:
    """Figures by category; empty where the data has none."""
    groups: dict[str, list[Record]] = {}
    if any(categories):
        for record in records:
            groups.setdefault(categories[record["index"]] or UNNAMED, []).append(record)
    return {name: _group(members, comparable) for name, members in groups.items()}


def _by_turn(records: Sequence[Record], comparable: bool) -> dict[str, Any]:
    """Figures by turn of the dialogues; empty where all have one."""
    turns = sorted({record["turn"] for record in records})
    groups = {f"turn {turn + 1}": [record for record in records if record["turn"] == turn] for turn in turns}
    return {name: _group(members, comparable) for name, members in groups.items()} if len(turns) > 1 else {}


def _group(records: Sequence[Record], comparable: bool) -> dict[str, Any]:
    names = list(records[0]["runs"])
    timing: dict[str, Any] = {name: _speed(records, name) for name in names}
    if comparable:
        timing["speed_up"] = _speed_up(timing, names)
    problems = len({record["index"] for record in records})
    return {"problems": problems, "runs": {name: _run(records, name) for name in names}, "timing": timing}


def _run_table(report: Report) -> list[str]:
    graded = "strict" in next(iter(report["runs"].values()))
    score_heads = "strict accuracy (Wilson 95 %) | last number | " if graded else ""
    lines = [
        f"| run | {score_heads}cut off | acceptance length | by position | tokens/s |",
        f"| --- | {'---: | ---: | ' if graded else ''}---: | ---: | --- | ---: |",
    ]
    for name, run in report["runs"].items():
        cells = [name, *(_percentage(run[score]) for score in SCORES if score in run)]
        speed = f"{report['timing'][name]['tokens_per_second']:.1f}" if speeds_may_be_shown(report) else "withheld"
        positions = ", ".join(f"{x:.2f}" for x in run["accepted_per_position"])
        cells += [str(run["cut_off"]), f"{run['acceptance_length']:.2f}", positions, speed]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _percentage(score: dict[str, Any]) -> str:
    share, low, high = (100 * x for x in (score["share"], *score["wilson_95"]))
    return f"{share:.1f} % ({low:.1f} to {high:.1f})"


def _comparison_lines(report: Report) -> list[str]:
    comparison, timing = report["comparison"], report["timing"]
    if comparison is None:
        return []
    differ, total = len(comparison["unequal"]), comparison["equal"] + len(comparison["unequal"])
    if "speed_up" in timing:
        first, second = report["runs"]
        differing = f"; {differ} of {total} outputs differ" if differ else ""
        lines = ["", f"- speed-up: {timing['speed_up']:.2f}x ({first} over {second}, tokens/s{differing})"]
    else:
        lines = ["", f"- no speed-up: {differ} of {total} outputs differ from plain decoding"]
    lines.append(f"- equal transcripts: {comparison['equal']} of {total}")
    lines += [_parting_line(one) for one in comparison["unequal"]]
    for score in SCORES:
        if score in comparison:
            lines.append(f"- {score}: " + ", ".join(f"{key} {value:.3g}" for key, value in comparison[score].items()))
    return lines


def _parting_line(one: Record) -> str:
    where = f"problem {one['problem']}" + (f", turn {one['turn'] + 1}," if "turn" in one else "")
    if one["position"] is None:
        return f"- {where} follows an answer that differs"
    if one["logit_margin"] is None:
        return f"- {where} ends in one run at token {one['position']}, and goes on in the other"
    return f"- {where} parts at token {one['position']}, logit margin {one['logit_margin']:.2g}"


def _category_table(report: Report) -> list[str]:
    groups = {**report["categories"], **report["turns"]}
    if not groups:
        return []
    names = list(report["runs"])
    speed_up = "speed_up" in report["timing"]
    heads = ["category", "problems", *(f"{name}: acceptance length" for name in names[:1])]
    heads += [f"{name}: tokens/s" for name in names if speeds_may_be_shown(report)] + ["speed-up"] * speed_up
    lines = ["", f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    for category, group in groups.items():
        cells = [category, str(group["problems"]), f"{group['runs'][names[0]]['acceptance_length']:.2f}"]
        if speeds_may_be_shown(report):
            cells += [f"{group['timing'][name]['tokens_per_second']:.1f}" for name in names]
        if speed_up:
            cells.append(f"{group['timing']['speed_up']:.2f}x")
        lines.append(f"| {' | '.join(cells)} |")
    return lines
