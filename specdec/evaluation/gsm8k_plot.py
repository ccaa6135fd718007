"""The report of an evaluation as one picture: what was run and found in the title, a panel for each kind of figure.

Every axis ends where its figures can: shares at 1, tokens a forward at the drafts and the bonus, speeds at zero below.
"""

from importlib.util import find_spec
from typing import Any, BinaryIO

from specdec.errors import ConfigError
from specdec.evaluation.gsm8k_report import Report, speeds_may_be_shown
from specdec.evaluation.scoring import SCORES

COLOURS = {"speculative": "tab:green", "plain": "tab:grey"}


def require_matplotlib() -> None:
    """Before any work: raises ConfigError where `save_plot` could not draw."""
    if find_spec("matplotlib") is None:
        raise ConfigError("a PNG needs matplotlib: pip install 'specdec-runtime[plots]', or leave it out")


def save_plot(report: Report, file: str | BinaryIO) -> None:
    """Accuracy with intervals where answers are graded, acceptance, and tokens per second, side by side, as a PNG."""
    from matplotlib.figure import Figure

    first, drafted = _first_run(report), bool(_first_run(report)["accepted_per_position"])
    panels = [_accuracy] if "strict" in first else []
    panels += [_acceptance_by_position] if drafted else []
    panels += [_acceptance_by_category] if report["categories"] and drafted else []
    panels += [_speed] if speeds_may_be_shown(report) else []
    figure = Figure(figsize=(4.2 * max(len(panels), 2), 4.2), layout="constrained")
    figure.suptitle(title(report))
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, report)
    figure.savefig(file, format="png", dpi=120)


def title(report: Report) -> str:
    """Task, pair and what was found, on two lines."""
    settings, first, comparison = report["settings"], _first_run(report), report["comparison"]
    drafter = f"drafter {_short(settings['drafter'])}" if settings.get("drafter") else "no drafter"
    pair = f"{_short(settings['target'])}, {drafter}"
    found = [f"speed-up {report['timing']['speed_up']:.2f}x"] if "speed_up" in report["timing"] else []
    found += [f"acceptance length {first['acceptance_length']:.2f}"] if first["accepted_per_position"] else []
    if comparison is not None:
        found.append(f"{comparison['equal']} of {comparison['equal'] + len(comparison['unequal'])} outputs equal")
    found = found or [report["timing"]["hardware"]]
    return f"{settings['task']}, {settings['problems']} problems: {pair}\n{', '.join(found)}"


def _short(name: str, most: int = 48) -> str:
    """The end of a long path tells most."""
    return name if len(name) <= most else f"...{name[-most:]}"


def _first_run(report: Report) -> dict[str, Any]:
    """The run with a drafter, if there is one: it has an acceptance by position."""
    run: dict[str, Any] = next(iter(report["runs"].values()))
    return run


def _accuracy(axes: Any, report: Report) -> None:
    width = 0.8 / len(report["runs"])
    for row, (name, run) in enumerate(report["runs"].items()):
        shares = [run[score]["share"] for score in SCORES]
        errors = [[abs(run[score]["wilson_95"][end] - run[score]["share"]) for score in SCORES] for end in (0, 1)]
        places = [at + width * row for at in range(len(SCORES))]
        axes.bar(places, shares, 0.9 * width, yerr=errors, capsize=4, label=name, color=COLOURS[name])
    axes.set_xticks([at + width * (len(report["runs"]) - 1) / 2 for at in range(len(SCORES))])
    axes.set_xticklabels([score.replace("_", " ") for score in SCORES])
    axes.set(title="accuracy, Wilson 95 % interval", ylabel="share of problems", ylim=(0, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False)


def _acceptance_by_position(axes: Any, report: Report) -> None:
    shares = _first_run(report)["accepted_per_position"]
    axes.bar(range(1, len(shares) + 1), shares, color=COLOURS["speculative"])
    axes.set_xticks(range(1, len(shares) + 1))
    axes.set(title="rounds that accept the draft", xlabel="draft position", ylabel="share of rounds", ylim=(0, 1))


def _acceptance_by_category(axes: Any, report: Report) -> None:
    most = 1 + len(_first_run(report)["accepted_per_position"])
    lengths = {name: _first_run(group)["acceptance_length"] for name, group in report["categories"].items()}
    axes.barh([*lengths], [*lengths.values()], color=COLOURS["speculative"])
    axes.invert_yaxis()
    axes.set(title="acceptance length", xlabel="tokens a forward", xlim=(1, most))


def _speed(axes: Any, report: Report) -> None:
    speeds = {name: report["timing"][name]["tokens_per_second"] for name in report["runs"]}
    for name, speed in speeds.items():
        axes.bar_label(axes.bar(name, speed, 0.6, color=COLOURS[name]), fmt="%.1f", padding=2)
    axes.set(title="speed", ylabel="tokens/s", ylim=(0, 1.1 * max(speeds.values())))  # room for the figure above
