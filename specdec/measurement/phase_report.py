"""Results of a phase benchmark: plain values, a table of them, and a plot.

A cell is one way of decoding at one batch and context. It has times only if its parity check passed; otherwise `note`
says why not. `tokens_per_second` is by acceptance length: measured for a trained pair, supposed for random weights.
"""

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from importlib.util import find_spec
from io import BytesIO
from operator import attrgetter
from typing import Any

import numpy as np

from specdec.config import SpecConfig
from specdec.errors import ConfigError
from specdec.measurement.memory_floor import StepBytes
from specdec.measurement.parity import Parity
from specdec.measurement.timed_comparison import rounded, table_lines

STAGES = ("draft", "verify", "other", "host")
NO_KERNEL = "no kernel"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 10th and 90th percentile of some times, in milliseconds."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        return cls(*(1e3 * np.percentile(seconds, (50, 10, 90))).tolist())


@dataclass(slots=True, kw_only=True)
class Cell:
    """Figures of one way of decoding at one batch size and context.

    ms: times of a round ("round"), of its stages, and of the host's part; for a peer, of its step or round.
    uncaptured: timed rounds whose kernels were launched one by one.
    floor_ms: memory floor of one round.
    idle_ms: time of a round in which no kernel ran.
    break_even: acceptance length from which a round is faster than plain decoding.
    acceptance_length: of the timed rounds.
    ready_s: seconds from loaded weights to an engine with captured rounds, compilation included.
    """

    run: str
    batch: int
    context: int
    spec: SpecConfig | None = None
    rounds: int = 0
    uncaptured: int = 0
    parity: Parity | None = None
    ms: dict[str, Spread] = field(default_factory=dict)
    floor_bytes: StepBytes | None = None
    floor_ms: float = 0.0
    idle_ms: float | None = None
    acceptance_length: float | None = None
    ready_s: float | None = None
    break_even: float | None = None
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def shown(self) -> bool:
        return "round" in self.ms

    @property
    def x_floor(self) -> float | None:
        return self.ms["round"].median / self.floor_ms if self.shown else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """All cells of a run, and its conditions.

    subject: the pair or the shape. shrunk: how the shape was made smaller. assumed: acceptance lengths are supposed,
    not measured. weights: how target and drafter store theirs.
    """

    subject: str
    shrunk: str
    assumed: bool
    parameters: dict[str, int]
    weights: str
    weight_bytes: int
    read_bandwidth: float
    conditions: dict[str, Any]
    cells: list[Cell]

    def as_json(self) -> dict[str, Any]:
        record = asdict(self)
        for cell, plain in zip(self.cells, record["cells"], strict=True):
            plain["x_floor"] = cell.x_floor
        return record


def phase_table(report: PhaseReport) -> str:
    """The title, and a Markdown table with one row per cell."""
    lengths = list(dict.fromkeys(length for cell in report.cells for length in cell.tokens_per_second))
    rows = [cell_figures(cell, lengths) for cell in report.cells]
    if not any(row[NO_KERNEL] for row in rows):
        rows = [{head: text for head, text in row.items() if head != NO_KERNEL} for row in rows]
    return "\n".join([bench_title(report), "", *table_lines(rows)])


def bench_title(report: PhaseReport) -> str:
    """Subject, conditions and machine, in one line."""
    shrunk = f", SHRUNK to {report.shrunk}: no figures of the published model" if report.shrunk else ""
    weights = f"{report.weight_bytes / 1e9:.2f} GB of weights in {report.weights}"
    read = f"{report.read_bandwidth / 1e9:,.0f} GB/s read"
    known = ", ".join(f"{key} {value}" for key, value in report.conditions.items() if key != "command" and value)
    supposed = "; acceptance lengths (AL, tokens a round) are supposed, not measured" if report.assumed else ""
    return f"{report.subject}{shrunk}; {weights}, {read}; {known}{supposed}"


def cell_figures(cell: Cell, lengths: Sequence[str] = ()) -> dict[str, str]:
    """Texts of a row by heading; empty if the cell has no such figure. lengths: the tokens/s that are shown."""
    times = cell.ms.get("round")
    stages = {stage: cell.ms[stage].median if stage in cell.ms else None for stage in STAGES}
    figures = {"x floor": cell.x_floor, "floor": cell.floor_ms or None, **stages, NO_KERNEL: cell.idle_ms}
    speeds = {f"tokens/s {length}": cell.tokens_per_second.get(length) for length in lengths}
    return {
        "run": cell.run,
        "batch": str(cell.batch),
        "context": str(cell.context),
        "ms (p10 to p90)": f"{times.median:.2f} ({times.p10:.2f} to {times.p90:.2f})" if times else "",
        **{head: rounded(figure, 2) for head, figure in {**figures, "even at": cell.break_even}.items()},
        **{head: rounded(figure, 1) for head, figure in {**speeds, "ready s": cell.ready_s}.items()},
        "parity: best of checked, worst gap": cell.note
        or ("not judged" if cell.parity is None else cell.parity.summary),
    }


def drawn_phases(report: PhaseReport) -> bytes:
    """Two panels as a PNG: times over batch at the shortest context, and over context at the smallest batch."""
    from matplotlib.figure import Figure

    shown = [cell for cell in report.cells if cell.shown]
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(bench_title(report).replace("; ", "\n"), fontsize=8)
    for axes, over, fixed in zip(figure.subplots(1, 2), ("batch", "context"), ("context", "batch"), strict=True):
        least = min((getattr(cell, fixed) for cell in shown), default=0)
        _panel(axes, [cell for cell in shown if getattr(cell, fixed) == least], over, f"{fixed} {least}")
    return png_of(figure)


def _panel(axes: Any, cells: Sequence[Cell], over: str, at: str) -> None:
    """Draw a line for each run, dotted for peers, and its floor, dashed, in the same colour."""
    for number, run in enumerate(dict.fromkeys(cell.run for cell in cells)):
        points = sorted((cell for cell in cells if cell.run == run), key=attrgetter(over))
        places, colour = [getattr(cell, over) for cell in points], f"C{number}"
        median, p10, p90 = np.array([astuple(cell.ms["round"]) for cell in points]).T
        style = ":o" if run.startswith("transformers") else "-o"
        axes.errorbar(places, median, yerr=[median - p10, p90 - median], fmt=style, color=colour, label=run)
        axes.plot(places, [cell.floor_ms for cell in points], "--_", color=colour, linewidth=1)
    axes.set(title=f"over {over}, {at}", xlabel=over, ylabel="ms a round; dashed: its floor")
    axes.set_ylim(bottom=0)
    if cells:
        axes.set_xscale("log", base=2)
        places = sorted({getattr(cell, over) for cell in cells})
        axes.set_xticks(places, [str(place) for place in places])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8)


def require_matplotlib() -> None:
    """Raises ConfigError before any work if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigError("a PNG needs matplotlib: pip install 'specdec-runtime[plots]', or leave it out")


def png_of(figure: Any) -> bytes:
    """A matplotlib figure as PNG bytes."""
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()
