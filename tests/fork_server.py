"""Runs commands of Python in forks of one process that has imported torch, transformers and the package.

    python fork_server.py FD [LISTENER]      `processes.py` starts it and asks through the socket FD

With LISTENER, a socket, the workers of a run (forked_workers.py) and their tests may connect to it and ask too. It ends
when FD is closed.

Starting Python and importing all that takes four seconds, a fork some milliseconds. In a fork everything is as if
Python had just started: arguments, environment, folder, standard streams, signals, and how it ends. This is safe
because the process that forks has computed nothing and has one thread.
"""

import atexit
import fcntl
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import termios
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NoReturn, TextIO

USED_LATER = (  # what commands, and transformers, import only when they run
    "accelerate",
    "accelerate.big_modeling",
    "transformers.models.gemma4.modeling_gemma4",
    "transformers.models.gemma4_assistant.modeling_gemma4_assistant",
    "transformers.models.llama.modeling_llama",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
)
MODELS = (  # of transformers, which tests build
    *("cohere", "cohere2", "gemma2", "gemma3", "glm", "glm4", "gpt_oss", "granite", "mistral"),
    *("mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
)
USED_BY_TESTS = (
    "accelerate",
    "httpx",
    "jsonschema",
    "openai",
    "openai.resources.chat",
    *(f"transformers.models.{name}.modeling_{name}" for name in MODELS),
)
MAX_REQUEST = 1 << 18  # bytes: the arguments and the environment
SECONDS_TO_END = 20
THREADS = "/proc/self/task"


def preload(*more: str) -> None:
    gc.disable()
    commands, actions = import_module("specdec.cli"), import_module("specdec.cli.actions")
    names = [
        f"{package.__name__}.{each.name}" for package in (commands, actions) for each in iter_modules(package.__path__)
    ]
    for name in [*names, *USED_LATER, *more]:
        if not name.endswith("__main__"):
            with suppress(ImportError):  # of an extra that is not installed
                import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()


def serve(first: socket.socket, listener: socket.socket | None) -> dict[str, Any] | None:
    """Answers until the first door is closed: None. In a process that is to run a command: what was asked."""
    doors = [first]
    while True:
        for ready in select.select([*doors, *filter(None, [listener])], [], [])[0]:
            if ready is listener:
                doors.append(listener.accept()[0])
                continue
            message, descriptors, _, _ = socket.recv_fds(ready, MAX_REQUEST, 4)
            if not message:
                ready.close()
                doors.remove(ready)
                if ready is first:
                    wait_for_the_last()
                    return None
                continue
            collect_ended()
            assert threading.active_count() == 1, threading.enumerate()
            assert not os.path.exists(THREADS) or len(os.listdir(THREADS)) == 1, "threads of a library"
            if os.fork() == 0:
                for each in [*doors, *filter(None, [listener])]:
                    each.close()
                return keep(json.loads(message), *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def collect_ended() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def wait_for_the_last() -> None:
    """A process that is not waited for would be missing from the processor time of the run."""
    deadline = time.monotonic() + SECONDS_TO_END
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.01)


def keep(request: dict[str, Any], report: int, *streams: int) -> dict[str, Any]:
    """Forks the command, says which process it is and how it ends, and ends. Returns in the command."""
    command = os.fork()
    if command == 0:
        os.close(report)
        prepare(request, streams)
        return request
    for stream in streams:
        os.close(stream)
    with socket.socket(fileno=report) as asker, suppress(BrokenPipeError, ConnectionResetError):
        asker.sendall(b"%d\n" % command)
        status = os.waitpid(command, 0)[1]
        asker.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def prepare(request: dict[str, Any], streams: tuple[int, ...]) -> None:
    """Everything that a start of Python finds or makes, but for the command itself."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if request["terminal"]:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if folder := os.environ.get("SHALLOW_PAIR"):  # see shallow_pair.py
        import_module("specdec.models.published").BUNDLED_DIR = Path(folder)
    sys.stdin = sys.__stdin__ = stream_of(0, "r", "strict")
    sys.stdout = sys.__stdout__ = stream_of(1, "w", "strict")
    sys.stderr = sys.__stderr__ = stream_of(2, "w", "backslashreplace")
    # whatever shell runs the tests, and whatever it ignores in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def stream_of(descriptor: int, mode: str, errors: str) -> TextIO:
    unbuffered = mode == "w" and bool(os.environ.get("PYTHONUNBUFFERED"))
    binary: Any = os.fdopen(descriptor, mode + "b", buffering=0 if unbuffered else -1, closefd=False)
    by_line = descriptor == 2 or binary.isatty()
    text = io.TextIOWrapper(binary, "utf-8", errors, line_buffering=by_line, write_through=unbuffered)
    text.mode = mode  # type: ignore[attr-defined]
    return text


def run(arguments: list[str]) -> None:
    """Runs what Python would: -m MODULE, -c PROGRAM or a file, each with arguments of its own."""
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
    """Ends as Python does, but for taking every module to pieces, which takes it half a second."""
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


if __name__ == "__main__":
    listener = socket.socket(fileno=int(sys.argv[2])) if sys.argv[2:] else None
    preload(*(USED_BY_TESTS if listener else ()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the commands
    if asked := serve(socket.socket(fileno=int(sys.argv[1])), listener):
        run_to_its_end(asked["arguments"])
    os._exit(0)
