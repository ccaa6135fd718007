"""The exceptions of specdec. They are the lowest layer, since every layer raises them.

A message is one sentence. `shown` formats a value for it.
"""

import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any


class SpecDecError(Exception):
    """Base of all errors that specdec raises on purpose."""


class ConfigError(SpecDecError, ValueError):
    """A setting, a sampling parameter or a prompt that is not allowed."""


class UnsupportedModelError(SpecDecError, ValueError):
    """A model, or a pair of target and drafter, that specdec cannot run exactly."""


class CheckpointError(SpecDecError, OSError):
    """A checkpoint that is missing, incomplete, or of another kind."""


class CapacityError(SpecDecError, ValueError):
    """A request that can never fit the KV pools or the model length."""


class OutOfSlotsError(SpecDecError):
    """A pool has too few free pages at the moment."""


class QueueFullError(SpecDecError):
    """The queue is full: as many requests wait as the limit allows."""


class StoppingError(SpecDecError):
    """The served engine is stopping."""


ENGINE_CLOSED = "this engine is closed; make a new one"


class RequestFailedError(SpecDecError):
    """The tokenizer, the grammar or a step raised an error in this request. Only this request has ended."""


class RoundFailedError(SpecDecError):
    """Rounds failed repeatedly, and this was the newest request in them, or the last one admitted."""


class DeviceLostError(SpecDecError):
    """A device of a split engine did not answer in time. The engine cannot continue."""


class KVStateError(SpecDecError):
    """A KV operation that is not allowed in the present state."""


class DoubleFreeError(KVStateError):
    """An attempt to free or evict slots that no request holds."""


class LocationError(KVStateError):
    """SPECDEC_SANITIZE=1 found that a forward would read or write a slot that is not its row's."""


class FrozenKVError(KVStateError):
    """A KV change while a frozen view is open, a nested view, or use of a closed view."""


MAX_SHOWN = 160
"""Most characters of a value in an error."""


class _Short(reprlib.Repr):
    """Shows plain values like Python, shortened; of other values only the kind."""

    plain = (bool, float, complex, bytes, type(None))

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlist = self.maxtuple = self.maxdict = 8

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, self.plain):
            return super().repr_instance(x, level)
        if type(x).__name__ in ("dtype", "device"):  # of torch; this module imports neither torch nor numpy
            return repr(x)
        if isinstance(x, type):  # a class has its instances' attributes, but no values of them
            return f"<{x.__name__}>"
        if hasattr(x, "item") and getattr(x, "shape", None) == ():  # a numpy or torch scalar
            return repr(x.item())
        if hasattr(x, "shape"):
            return f"<{type(x).__name__} of shape {tuple(x.shape)}>"
        return f"<{getattr(x, '__name__', type(x).__name__)}>"


_short = _Short()


def shown(value: object) -> str:
    """Format a value for a message: never a printed tensor, module or long list."""
    return clipped(" ".join(_short.repr(value).split()), MAX_SHOWN)


def clipped(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[:max_chars] + "..."


def counted(count: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: `1 prompt`, `2 prompts`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def require_one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Raise ConfigError unless the value is one of these."""
    if value not in (names := list(known)):
        raise ConfigError(f"{name}={shown(value)} is unknown; choose one of {', '.join(names)}")


def require_text(name: str, text: Any) -> str:
    """The text, if a tokenizer can read it: a string without halves of surrogate pairs."""
    if not isinstance(text, str):
        raise ConfigError(f"{name} is {shown(text)}; a string is expected")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} holds half a surrogate pair at character {error.start + 1}; take it out") from error
    return text


@contextmanager
def about(name: str) -> Iterator[None]:
    """Prefix errors of the block about a model or checkpoint with `name`."""
    try:
        yield
    except (UnsupportedModelError, CheckpointError) as error:
        raise type(error)(f"{name}: {error}") from error


@contextmanager
def naming_file(path: str | PathLike[str]) -> Iterator[None]:
    """Make system errors of the block, such as a full disk, name this file."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has gone
    except OSError as error:
        if error.errno is None or error.filename == str(path):  # not from the system, or named already
            raise
        reason = error.strerror or first_line(error)
        raise OSError(error.errno, f"cannot be written: {reason}", str(path)) from error


def is_fault(error: BaseException) -> bool:
    """Is the error the called code's fault? Interrupts and lack of memory are not: the work is repeated. A panic of a
    Rust library is, although it derives from BaseException."""
    if isinstance(error, Exception):
        return not isinstance(error, MemoryError)
    return type(error).__name__ == "PanicException"


class faults_go_to:
    """Give a fault of the block (`is_fault`) to `handle`, which may raise another error. Other errors are raised.

    It is entered for each request with a grammar, and `contextmanager` would take four times as long.
    """

    def __init__(self, handle: Callable[[BaseException], object]) -> None:
        self._handle = handle

    def __enter__(self) -> None:
        """Nothing is prepared."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if error is None or not is_fault(error):
            return False
        self._handle(error)
        return True


def name_row(error: BaseException, row: int) -> BaseException:
    """Returns the error, marked with a row of the request table. Raised in a step, it ends only the request of that
    row. An error that is no fault (`is_fault`) is not marked."""
    if is_fault(error):
        error.row = int(row)  # type: ignore[attr-defined]
    return error


def row_named_by(error: BaseException | None) -> int | None:
    """The row that an error, or its cause, names; None: it may concern any request."""
    while error is not None:
        row = getattr(error, "row", None)
        if isinstance(row, int):
            return row
        error = error.__cause__
    return None


def error_summary(error: BaseException) -> str:
    """Kind and first sentence of an error, as text: the error's frames would keep tensors alive."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"


def first_line(error: BaseException) -> str:
    """The first sentence of another library's message, shortened. A first line that ends in a colon is joined with the
    next."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = " ".join([lines[0], *(each.strip() for each in lines[1:2] if lines[0].endswith(":"))])
    if isinstance(error, KeyError) and " " not in line:
        line = f"{type(error).__name__}: {line}"
    return clipped(line, 200)
