"""Runs `specdec serve` in a process on a free port, and stops it gracefully.

    with running_server("--batch-size", "4") as server:
        httpx.get(server.url + "/health")

`server.log()` is its standard error, which is printed if the server does not start or exits with an error.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

from processes import Process, start

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 300.0
STOP_SECONDS = 240.0
GREETING = "specdec serve: "


@dataclass
class ServerProcess:
    """A running server. url: without a slash at its end, such as http://127.0.0.1:41231."""

    process: Process
    url: str
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_path.read_text("utf-8", errors="replace")

    def stop(self, kind: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal, wait, and return the exit code."""
        self.process.send_signal(kind)
        return self.process.wait(STOP_SECONDS)


@contextmanager
def running_server(
    *options: str, env: Mapping[str, str] | None = None, log_to: int | None = None, real: bool = False
) -> Iterator[ServerProcess]:
    """Run `python -m specdec serve --port 0 OPTIONS`, by default with the bundled pair, until it is ready.

    log_to: a file descriptor for its standard error, instead of the file that `log` reads.
    real: start a new Python, not a fork (see processes.py).
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    # drafts must not depend on how long rounds take; `drafts_of_one_shape` in conftest.py does this in pytest's process
    command = ["-m", "specdec", "serve", "--port", "0", "--fixed-drafts", *options]
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder, "log.txt")
        with log_path.open("w") as log:
            errors = log if log_to is None else log_to
            process = start(command, real=real, stdout=PIPE, stderr=errors, env=variables, cwd=folder)
        server = ServerProcess(process, "", log_path)
        try:
            server.url = _read_address(server)
            yield server
            if process.poll() is None:
                assert server.stop() == 0, f"the server left with {process.returncode}:\n{server.log()}"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _read_address(server: ServerProcess) -> str:
    """Read the address that the server prints once it is ready."""
    assert server.process.stdout is not None
    began = time.monotonic()
    for line in server.process.stdout:  # ends when the process does
        if line.startswith(GREETING):
            return line.removeprefix(GREETING).strip()
        if time.monotonic() - began > START_SECONDS:
            break
    raise AssertionError(f"the server did not start:\n{server.log()}")
