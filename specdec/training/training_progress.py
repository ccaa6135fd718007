"""How far a stage of training is, and about how long it still takes.

On a terminal a bar, elsewhere a line every few seconds. It knows nothing of what is trained: the caller says which
fraction is done. Invariant: the estimate counts only what this run did, so that a resumed run does not look faster.
"""

from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Stage:
    """`with Stage("training") as stage: ... stage.update(0.25, "loss 1.2")`; not shown: does nothing."""

    def __init__(self, name: str, *, every: float = 15.0, show: bool = True, console: Console | None = None) -> None:
        self.name, self.every = name, every
        self.console = console or Console()
        self.in_lines = show and not self.console.is_terminal
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True))
        text = TextColumn("{task.fields[text]}", markup=False)
        on_bar = show and self.console.is_terminal
        self.bar = Progress(*columns, *times, text, console=self.console, speed_estimate_period=600, disable=not on_bar)
        self.first: float | None = None  # fraction at the first update
        self.began = self.said = self.console.get_time()

    def __enter__(self) -> "Stage":
        self.task = self.bar.add_task(self.name, total=1.0, text="")
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def update(self, fraction: float, text: str = "") -> None:
        now, fraction = self.console.get_time(), min(1.0, fraction)
        if self.first is None:
            self.first, self.began = fraction, now
            self.bar.reset(self.task, completed=0, text=text)
            self.bar.update(self.task, completed=fraction)  # work of earlier runs does not count for the speed
        self.bar.update(self.task, completed=fraction, text=text)
        if self.in_lines and now - self.said >= self.every:
            self.said = now
            done, taken = fraction - self.first, now - self.began
            left = f", about {timedelta(seconds=round(taken * (1 - fraction) / done))} left" if done > 0 else ""
            words = f"{self.name} {fraction:4.0%}, {timedelta(seconds=round(taken))}{left}  {text}"
            self.console.print(words.rstrip(), markup=False, highlight=False, soft_wrap=True)
