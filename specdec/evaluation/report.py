"""The report of an evaluation: a pure function of its transcripts, as plain JSON values, as Markdown, and as a picture.

What depends on the machine and the moment is in `timing`. The rest of two reports of one evaluation is equal, however
often it was interrupted and however many processes shared it.
"""

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, BinaryIO

from specdec.errors import ConfigError
from specdec.evaluation.scoring import SCORES, is_correct, mcnemar_p, wilson_interval
from specdec.request import RequestStats

Record = dict[str, Any]
"""One problem: index, parting (position and logit_margin, or None), and by run its text, token_ids, stats, seconds."""
Report = dict[str, Any]
"""settings, runs (scores, tokens, acceptance by name), comparison (of two runs, else None), timing."""


def make_report(settings: dict[str, Any], answers: Sequence[str], records: Sequence[Record], hardware: str) -> Report:
    """`records` in the order of the problems. Tokens per second are those of one process."""
    runs: dict[str, Any] = {}
    timing: dict[str, Any] = {"hardware": hardware}
    solved: dict[tuple[str, str], list[bool]] = {}
    for name in records[0]["runs"]:
        outputs, stats = [record["runs"][name] for record in records], RequestStats()
        for out in outputs:
            stats.add(RequestStats(**out["stats"]))
        runs[name] = {
            "output_tokens": stats.output_tokens,
            "cut_off": sum(out["finish_reason"] == "length" for out in outputs),
            "acceptance_length": stats.acceptance_length,
            "accepted_per_position": stats.accepted_per_position,
        }
        for score in SCORES:
            graded = [is_correct(out["text"], answer, score) for out, answer in zip(outputs, answers, strict=True)]
            low, high = wilson_interval(sum(graded), len(graded))
            runs[name][score] = {"correct": sum(graded), "share": sum(graded) / len(graded), "wilson_95": [low, high]}
            solved[name, score] = graded
        seconds = sum(out["seconds"] for out in outputs)
        timing[name] = {"seconds": seconds, "tokens_per_second": stats.output_tokens / seconds}
    comparison: dict[str, Any] | None = None
    if len(runs) == 2:
        unequal = [{"problem": record["index"], **record["parting"]} for record in records if record["parting"]]
        comparison = {"equal": len(records) - len(unequal), "unequal": unequal}
        for score in SCORES:
            split = Counter(zip(*(solved[name, score] for name in runs), strict=True))
            only = {
                f"only_{name}": split[pair] for name, pair in zip(runs, [(True, False), (False, True)], strict=True)
            }
            comparison[score] = {**only, "mcnemar_p": mcnemar_p(*only.values())}
    return {"settings": settings, "runs": runs, "comparison": comparison, "timing": timing}


def markdown(report: Report) -> str:
    """A table, what the comparison found, and the settings that are not off."""
    settings, timing, comparison = report["settings"], report["timing"], report["comparison"]
    lines = [
        "| run | strict accuracy (Wilson 95 %) | last number | cut off | acceptance length | by position | tokens/s |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for name, run in report["runs"].items():
        shares = [[100 * x for x in (run[score]["share"], *run[score]["wilson_95"])] for score in SCORES]
        scores = " | ".join(f"{share:.1f} % ({low:.1f} to {high:.1f})" for share, low, high in shares)
        accepted = f"{run['acceptance_length']:.2f} | {', '.join(f'{x:.2f}' for x in run['accepted_per_position'])}"
        speed = timing[name]["tokens_per_second"]
        lines.append(f"| {name} | {scores} | {run['cut_off']} | {accepted} | {speed:.1f} |")
    if comparison is not None:
        lines += ["", f"- equal transcripts: {comparison['equal']} of {settings['problems']}"]
        for one in comparison["unequal"]:
            part = f"parts at token {one['position']}, logit margin {one['logit_margin']:.2g}"
            lines.append(f"- problem {one['problem']} {part}")
        for score in SCORES:
            lines.append(f"- {score}: " + ", ".join(f"{key} {value:.3g}" for key, value in comparison[score].items()))
    known = [f"{key} {value}" for key, value in settings.items() if value not in (None, "", [])]
    return "\n".join([*lines, "", "; ".join([*known, timing["hardware"]])])


def require_matplotlib() -> None:
    """Before any work: raises ConfigError where `save_plot` could not draw."""
    if find_spec("matplotlib") is None:
        raise ConfigError("a PNG needs matplotlib: pip install 'specdec-runtime[plots]', or leave it out")


def save_plot(report: Report, file: str | BinaryIO) -> None:
    """Accuracy with intervals, acceptance by draft position, and tokens per second, side by side, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    accuracy, acceptance, speed = figure.subplots(1, 3)
    for row, (name, run) in enumerate(report["runs"].items()):
        shares = [run[score]["share"] for score in SCORES]
        errors = [[abs(run[score]["wilson_95"][end] - run[score]["share"]) for score in SCORES] for end in (0, 1)]
        accuracy.bar([at + 0.4 * row for at in range(len(SCORES))], shares, 0.38, yerr=errors, capsize=4, label=name)
        positions = run["accepted_per_position"]
        acceptance.bar(range(1, len(positions) + 1), positions)
        speed.bar(name, report["timing"][name]["tokens_per_second"])
    accuracy.set_xticks([at + 0.2 * (len(report["runs"]) - 1) for at in range(len(SCORES))], list(SCORES))
    accuracy.set(title="accuracy, Wilson 95 % interval", ylim=(0, 1.25))
    accuracy.legend(loc="upper right", ncols=2)
    acceptance.set(title="rounds that accept the draft", xlabel="draft position", ylim=(0, 1))
    speed.set(title="tokens/s")
    figure.savefig(file, format="png", dpi=120)
