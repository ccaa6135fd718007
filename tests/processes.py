"""Processes of Python that tests start: forks that have everything imported, or real ones.

    done = run(["-m", "specdec.cli", "generate", "hello"])      done.returncode, done.stdout, done.stderr
    process = start(["-m", "specdec.cli", "serve"], stdout=PIPE)

By default a command runs in a fork of `fork_server.py`, of which every process of pytest has one from the first command
on; workers (pytest -n) share the one of which they are forks themselves. `make test-deep` starts Python anew for each,
and so does `real=True`: every way to start (the console script, the module, the server) has a test with it. What a
process has imported by itself is only seen in a real one.
"""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE
from threading import Thread
from typing import IO, Any

from forked_workers import SHARED

from marks import is_deep

FORK_SERVER = Path(__file__).with_name("fork_server.py")


class Fork:
    """A command in a fork, with what tests use of `subprocess.Popen`."""

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
        self.returncode: int | None = None
        mode = "r" if text else "rb"
        ours: list[int] = []  # the command's ends of the pipes, which it alone keeps
        given = [_descriptor(stdin, 0, ours)]
        files: list[IO[Any] | None] = []
        for number, asked in ((1, stdout), (2, stderr)):
            if asked == PIPE:
                end, its_end = os.pipe()
                ours.append(its_end)
                given.append(its_end)
                files.append(os.fdopen(end, mode))
            else:
                given.append(_descriptor(asked, number, ours))
                files.append(None)
        self.stdout, self.stderr = files
        self._status, its_status = socket.socketpair()
        request = {
            "arguments": [os.fspath(argument) for argument in arguments],
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or os.getcwd()),
            "terminal": terminal,
        }
        socket.send_fds(_fork_server()[0], [json.dumps(request).encode()], [its_status.fileno(), *given])
        its_status.close()
        for descriptor in ours:
            os.close(descriptor)
        self._lines = self._status.makefile("r")
        self.pid = int(self._lines.readline())

    def __enter__(self) -> "Fork":
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._status.close()
        return self.returncode

    def send_signal(self, kind: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, kind)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """What is left of standard output and standard error, once it has ended."""
        said: dict[IO[Any], Any] = {}
        deadline = None if timeout is None else time.monotonic() + timeout

        def read(file: IO[Any]) -> None:
            said[file] = file.read()

        readers = [Thread(target=read, args=[file], daemon=True) for file in (self.stdout, self.stderr) if file]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if deadline is None else max(0, deadline - time.monotonic()))
        self.wait(None if deadline is None else max(0, deadline - time.monotonic()))
        for file in said:
            file.close()
        return tuple(said.get(file) if file else None for file in (self.stdout, self.stderr))


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


def stop() -> None:
    """The forks' server of this process, if it has one. Called when pytest ends."""
    if _fork_server.cache_info().currsize:
        door, server = _fork_server()
        door.close()
        if server is not None:
            server.wait(60)
        _fork_server.cache_clear()


@cache
def _fork_server() -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    if path := os.environ.get(SHARED):
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.connect(path)
        return door, None
    return start_server()


def start_server(*listeners: socket.socket) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A server that ends when the socket is closed. listeners: at most one, to which others may connect."""
    door, its_door = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sockets = [each.fileno() for each in (its_door, *listeners)]
    command = [sys.executable, str(FORK_SERVER), *map(str, sockets)]
    paths = [str(FORK_SERVER.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with its_door:
        server = subprocess.Popen(command, stdin=DEVNULL, stdout=DEVNULL, env=env, pass_fds=sockets)
    return door, server


def _descriptor(asked: int | IO[Any] | None, inherited: int, ours: list[int]) -> int:
    if asked is None:
        return inherited
    if asked == DEVNULL:
        ours.append(os.open(os.devnull, os.O_RDWR))
        return ours[-1]
    return asked if isinstance(asked, int) else asked.fileno()
