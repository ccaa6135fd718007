"""A phase benchmark drawn: milliseconds over batch and over context, with the memory floor of each run below it."""

from collections.abc import Sequence
from typing import Any, BinaryIO

from specdec.evaluation.phases.phase_report import Cell, PhaseReport, title

COLOURS = ("tab:grey", "tab:green", "tab:blue", "tab:orange", "tab:red", "tab:purple")


def save_phase_plot(report: PhaseReport, file: str | BinaryIO) -> None:
    """Two panels as a PNG: over batch at the shortest context, over context at the smallest batch."""
    from matplotlib.figure import Figure

    shown = [cell for cell in report.cells if cell.shown]
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(title(report).replace("; ", "\n"), fontsize=8)
    for axes, over, fixed in zip(figure.subplots(1, 2), ("batch", "context"), ("context", "batch"), strict=True):
        least = min((getattr(cell, fixed) for cell in shown), default=0)
        _panel(axes, [cell for cell in shown if getattr(cell, fixed) == least], over, f"{fixed} {least}")
    figure.savefig(file, format="png", dpi=120)


def _panel(axes: Any, cells: Sequence[Cell], over: str, at: str) -> None:
    """A line for each run, dotted for peers; its floor, dashed, in the same colour."""
    for number, run in enumerate(dict.fromkeys(cell.run for cell in cells)):
        points = sorted((getattr(cell, over), cell.ms["round"], cell.floor_ms) for cell in cells if cell.run == run)
        places, colour = [x for x, _, _ in points], COLOURS[number % len(COLOURS)]
        style = ":" if run.startswith("transformers") else "-"
        medians = [times.median for _, times, _ in points]
        below = [times.median - times.p10 for _, times, _ in points]
        above = [times.p90 - times.median for _, times, _ in points]
        axes.errorbar(places, medians, yerr=[below, above], label=run, color=colour, linestyle=style, marker="o")
        axes.plot(places, [floor for _, _, floor in points], color=colour, linestyle="--", linewidth=1, marker="_")
    axes.set(title=f"over {over}, {at}", xlabel=over, ylabel="ms a round; dashed: floor of its verify step")
    axes.set_ylim(bottom=0)
    if cells:
        axes.set_xscale("log", base=2)
        places = sorted({getattr(cell, over) for cell in cells})
        axes.set_xticks(places, [str(place) for place in places])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8)
