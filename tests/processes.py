"""Python processes that tests start: forks in which everything is imported, or real ones.

    done = run(["-m", "specdec", "generate", "hello"])      done.returncode, done.stdout, done.stderr
    process = start(["-m", "specdec", "serve"], stdout=PIPE)

A real start imports torch and transformers for four seconds; a fork takes milliseconds. So by default a command runs
in a fork of Python's own fork server (`multiprocessing`), which has imported what commands use, has computed nothing
and has one thread. `make test-deep` starts a new Python for each command, and so does `real=True`: each way to start
(the console script, the module, the server) has a test with it, and so has what a process imports by itself.
"""

import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pkgutil import iter_modules
from subprocess import DEVNULL, PIPE
from typing import IO, Any

import pytest
from forked_command import TESTS, Command, run_command

from marks import is_deep

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


@cache
def _fork_server() -> Any:
    """The context of the fork server, which is started here."""
    from specdec.cli import actions

    context = multiprocessing.get_context("forkserver")
    names = [f"{actions.__name__}.{each.name}" for each in iter_modules(actions.__path__)]
    context.set_forkserver_preload(["forked_command", *names, *USED_LATER])
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        forkserver.ensure_running()
    return context


def stop_fork_server() -> None:
    """End the fork server of this process, if it has one, and wait: its processor time counts in that of the tests."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


class Fork:
    """A command in a fork, with the part of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        terminal: bool = False,
    ) -> None:
        self.args = arguments
        pipes: dict[int, IO[Any]] = {}  # the ends of this process
        streams = []
        for number, asked in enumerate((stdin, stdout, stderr)):
            if asked == PIPE:
                end, its_end = os.pipe()
                pipes[number] = os.fdopen(end, "r" if text else "rb")
            elif asked == DEVNULL:
                its_end = os.open(os.devnull, os.O_RDWR)
            else:
                its_end = os.dup(number if asked is None else asked if isinstance(asked, int) else asked.fileno())
            streams.append(Connection(its_end))
        self.stdout, self.stderr = pipes.get(1), pipes.get(2)
        paths = [os.fspath(argument) for argument in arguments]
        command = Command(paths, dict(os.environ if env is None else env), os.fspath(cwd or os.getcwd()), terminal)
        self._process = _fork_server().Process(target=run_command, args=(command, streams), daemon=True)
        self._process.start()
        for stream in streams:
            stream.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def __enter__(self) -> "Fork":
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return self.returncode

    def send_signal(self, kind: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, kind)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """The rest of standard output and standard error, once the process has ended; it is killed after `timeout`."""
        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(file.read) if file else None for file in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        return tuple(read.result() if read else None for read in reads)


Process = Fork | subprocess.Popen[Any]
Done = subprocess.CompletedProcess[Any]


def start(arguments: Sequence[str], *, real: bool = False, terminal: bool = False, **options: Any) -> Process:
    """`python ARGUMENTS`, with the options of `subprocess.Popen`; text, not bytes.

    terminal: its standard input is a terminal that becomes its own, in a session of its own.
    """
    options = {"text": True, **options}
    # libraries of macOS are not safe after a fork
    if not (real or is_deep()) and sys.platform == "linux":
        return Fork(arguments, terminal=terminal, **options)

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell has its programs ignore in the background
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    return subprocess.Popen([sys.executable, *arguments], start_new_session=terminal, preexec_fn=begin, **options)


def run(arguments: Sequence[str], *, timeout: float = 300, real: bool = False, **options: Any) -> Done:
    """`python ARGUMENTS` to its end, with what it says."""
    return _finish(start(arguments, real=real, stdout=PIPE, stderr=PIPE, **options), timeout)


def run_ranks(arguments: Sequence[str], count: int, *, timeout: float = 300) -> list[Done]:
    """`count` processes of one job, with the variables by which `torchrun` and `accelerate launch` tell them so."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    job |= {**os.environ, "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    ranks = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    started = [start(arguments, env=env, stdout=PIPE, stderr=PIPE) for env in ranks]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda process: _finish(process, timeout), started))


def _finish(process: Process, timeout: float) -> Done:
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return Done(process.args, process.wait(), out, err)
