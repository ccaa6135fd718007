"""The exceptions of specdec. They live at the bottom because every layer raises them.

Their messages are one sentence. `shown` puts a value into one.
"""

import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any


class SpecDecError(Exception):
    """Base of every error that specdec raises on purpose."""


class ConfigError(SpecDecError, ValueError):
    """A setting, a sampling parameter or a prompt that is not allowed."""


class UnsupportedModelError(SpecDecError, ValueError):
    """A model, or a pair of target and drafter, that specdec cannot run exactly."""


class CheckpointError(SpecDecError, OSError):
    """A checkpoint that is missing, incomplete, or made for something else."""


class CapacityError(SpecDecError, ValueError):
    """A request that can never fit the KV pools or the model length."""


class OutOfSlotsError(SpecDecError):
    """No free page in one of the two pools at this moment."""


class QueueFullError(SpecDecError):
    """The queue is full: as many requests wait as the limit allows."""


class StoppingError(SpecDecError):
    """A served engine that stops."""


class RequestFailedError(SpecDecError):
    """The tokenizer, the grammar or a step raised an error in this request alone. It has ended, and no other has."""


class RoundFailedError(SpecDecError):
    """The round of this request raised an error, again when it was tried again, and of its requests this was the newest
    or the one let in last."""


class DeviceLostError(SpecDecError):
    """A device of an engine that is split over several did not answer in time. The engine cannot go on."""


class KVStateError(SpecDecError):
    """A KV operation that the present state forbids."""


class DoubleFreeError(KVStateError):
    """Slots freed, or evicted, that no request holds."""


class LocationError(KVStateError):
    """SPECDEC_SANITIZE=1 found a forward about to read or write a slot that is not its row's."""


class FrozenKVError(KVStateError):
    """A KV mutation while a frozen view is open, a nested view, or a view used after it closed."""


MAX_SHOWN = 160
"""Characters of a value that an error shows."""


class _Short(reprlib.Repr):
    """Plain values as Python writes them, at a readable length; of anything else only the kind."""

    plain = (bool, float, complex, bytes, type(None))

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlist = self.maxtuple = self.maxdict = 8

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, self.plain):
            return super().repr_instance(x, level)
        if type(x).__name__ in ("dtype", "device"):  # torch's; this module imports neither torch nor numpy
            return repr(x)
        if hasattr(x, "item") and getattr(x, "shape", None) == ():  # a scalar in a numpy or torch box
            return repr(x.item())
        if hasattr(x, "shape"):
            return f"<{type(x).__name__} of shape {tuple(x.shape)}>"
        return f"<{getattr(x, '__name__', type(x).__name__)}>"


_short = _Short()


def shown(value: object) -> str:
    """A value as a message shows it: never a printed tensor, module or long list."""
    text = " ".join(_short.repr(value).split())
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def require_one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Raise ConfigError unless the value is one of these."""
    if value not in (names := list(known)):
        raise ConfigError(f"{name}={shown(value)} is unknown; choose one of {', '.join(names)}")


@contextmanager
def about(name: str) -> Iterator[None]:
    """What is wrong with a model or a checkpoint, as an error in the block says, becomes a sentence about `name`."""
    try:
        yield
    except (UnsupportedModelError, CheckpointError) as error:
        raise type(error)(f"{name}: {error}") from error


@contextmanager
def naming_file(path: str | PathLike[str]) -> Iterator[None]:
    """An error of the system while a file is written, such as a full disk, names that file."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has gone
    except OSError as error:
        if error.errno is None or error.filename == str(path):  # not the system's, or named already
            raise
        reason = error.strerror or first_line(error)
        raise OSError(error.errno, f"cannot be written: {reason}", str(path)) from error


def is_fault(error: BaseException) -> bool:
    """Is it a fault of what was called? Interrupts and lack of memory are none: what was interrupted is done again. A
    panic of a Rust library is one, though it derives from BaseException."""
    if isinstance(error, Exception):
        return not isinstance(error, MemoryError)
    return type(error).__name__ == "PanicException"


def name_row(error: BaseException, row: int) -> BaseException:
    """Returns the error, marked with the row of the request table that it concerns: raised in a step, it ends the
    request of that row and no other. An error that is no fault (`is_fault`) gets no mark."""
    if is_fault(error):
        error.row = int(row)  # type: ignore[attr-defined]
    return error


def row_named_by(error: BaseException | None) -> int | None:
    """The row that an error names, or the one that it was raised from; None: it may concern any request."""
    while error is not None:
        row = getattr(error, "row", None)
        if isinstance(row, int):
            return row
        error = error.__cause__
    return None


def error_summary(error: BaseException) -> str:
    """Kind and first sentence of an error; not the error itself, whose frames hold tensors."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"


def first_line(error: BaseException, most: int = 200) -> str:
    """The first sentence of another library's message, at a readable length. A first line that ends in a colon is
    joined with the next one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = " ".join([lines[0], *(each.strip() for each in lines[1:2] if lines[0].endswith(":"))])
    if isinstance(error, KeyError) and " " not in line:
        line = f"{type(error).__name__}: {line}"
    return line if len(line) <= most else line[:most] + "..."
