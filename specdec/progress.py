"""What takes long: a sign of life on standard error, on a terminal only, and what is left when it is interrupted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text


@contextmanager
def working(what: str) -> Iterator[None]:
    """A sign of life for the length of the block."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(what)):
        yield


@contextmanager
def progress_bar(what: str, total: int, done: int = 0, *, enabled: bool = True) -> Iterator[Callable[..., None]]:
    """A bar that counts to `total`; the block gets `update(done, what)`, of which it may leave out `what`."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(
        *columns, *times, console=console, transient=True, disable=not (enabled and console.is_terminal)
    ) as bar:
        task = bar.add_task(what, total=total, completed=done)

        def update(done: int, what: str | None = None) -> None:
            bar.update(task, completed=done, description=what)

        yield update


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a measurement. report: that of what was finished until then, None where nothing was."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report
