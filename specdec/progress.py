"""Progress of slow work, on standard error and only on a terminal; stages of a training, which take hours, are shown
everywhere. Also the report of interrupted work."""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from threading import current_thread, main_thread
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

COUNT_SECONDS = 0.2
"""Least time between two calls of a function that counts what is done."""


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner during the block."""
    console = Console(stderr=True)
    with console.status(Text(what)) if console.is_terminal else nullcontext():
        yield


@contextmanager
def progress_bar(what: str, total: int, done: int = 0, *, enabled: bool = True) -> Iterator[Callable[..., None]]:
    """Show a bar up to `total`. The block gets `update(done, what)`; `what` is optional, and `done` may be a function,
    which is called a few times a second."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    is_shown, next_count = enabled and console.is_terminal, -math.inf
    with Progress(*columns, *times, console=console, transient=True, disable=not is_shown) as bar:
        task = bar.add_task(what, total=total, completed=done)

        def update(done: int | Callable[[], int], what: str | None = None) -> None:
            nonlocal next_count
            if callable(done):
                if bar.get_time() < next_count:
                    return
                done, next_count = done(), bar.get_time() + COUNT_SECONDS
            bar.update(task, completed=done, description=what)

        yield update


class Stage:
    """Progress of a stage: `with Stage("training") as stage: ... stage.update(0.25, "loss 1.2")`. show=False: silent.

    It is a bar on a terminal, elsewhere a line every few seconds. The remaining time is estimated from this run only.
    """

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
        self.began = self.last_line_time = self.console.get_time()

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
            self.bar.update(self.task, completed=fraction)  # earlier runs do not count for the speed
        self.bar.update(self.task, completed=fraction, text=text)
        if self.in_lines and now - self.last_line_time >= self.every:
            self.last_line_time = now
            done, taken = fraction - self.first, now - self.began
            left = f", about {timedelta(seconds=round(taken * (1 - fraction) / done))} left" if done > 0 else ""
            words = f"{self.name} {fraction:4.0%}, {timedelta(seconds=round(taken))}{left}  {text}"
            self.console.print(words.rstrip(), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def interruptions_wait() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block, which is short and leaves nothing half done."""
    if current_thread() is not main_thread():  # signals reach the main thread alone
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a measurement. report: results so far, None if there are none."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report
