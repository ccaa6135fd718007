"""A Python command in a fork that has imported torch, transformers and the package: `processes.py` starts it.

In the fork everything is as if Python had just started: arguments, environment, folder, standard streams, signals, and
how it ends.
"""

import atexit
import fcntl
import gc
import io
import os
import runpy
import signal
import sys
import termios
import threading
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TextIO

TESTS = Path(__file__).parent


class Command(NamedTuple):
    """What `python ARGUMENTS` is started with. terminal: its standard input is a terminal that becomes its own."""

    arguments: list[str]
    env: dict[str, str]
    cwd: str
    terminal: bool


def run_command(command: Command, streams: Sequence[Connection]) -> NoReturn:
    """Run the command with these standard streams, and end the process as Python would."""
    gc.freeze()  # what was imported before the fork stays
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    if command.terminal:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(command.cwd)
    os.environ.clear()
    os.environ.update(command.env)
    sys.path[:] = [place for place in sys.path if place != str(TESTS)]
    if folder := os.environ.get("SHALLOW_PAIR"):  # see shallow_pair.py
        import_module("specdec.models.published").BUNDLED_DIR = Path(folder)
    sys.stdin = sys.__stdin__ = open_stream(0, "r", "strict")
    sys.stdout = sys.__stdout__ = open_stream(1, "w", "strict")
    sys.stderr = sys.__stderr__ = open_stream(2, "w", "backslashreplace")
    # whatever the shell that runs the tests ignores in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    run_to_its_end(command.arguments)


def open_stream(descriptor: int, mode: str, errors: str) -> TextIO:
    unbuffered = mode == "w" and bool(os.environ.get("PYTHONUNBUFFERED"))
    binary: Any = os.fdopen(descriptor, mode + "b", buffering=0 if unbuffered else -1, closefd=False)
    by_line = descriptor == 2 or binary.isatty()
    text = io.TextIOWrapper(binary, "utf-8", errors, line_buffering=by_line, write_through=unbuffered)
    text.mode = mode  # type: ignore[attr-defined]
    return text


def run(arguments: list[str]) -> None:
    """Run what Python would: -m MODULE, -c PROGRAM or a file, each with arguments of its own."""
    first, *rest = arguments
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        program = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), program.__dict__)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


def run_to_its_end(arguments: list[str]) -> NoReturn:
    """End as Python does, except that modules are not taken apart, which takes half a second."""
    status, interrupted = 0, False
    try:
        run(arguments)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if status and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]  # the steps of Py_FinalizeEx, in its order
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        status = 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)
