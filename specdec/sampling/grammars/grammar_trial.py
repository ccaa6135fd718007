"""Compiles grammars in a worker process first: a crash, a hang or a lack of memory there costs only one request.

The library limits most of its own work, but some intersections of patterns take minutes, and chains of references
overflow the stack. A compiled grammar cannot be sent between processes, so one that passes is compiled again in this
process, by `with_large_stack`, with twice the stack of the trial. The worker starts with the first grammar that needs
it, and again after a grammar that ended it or took much memory.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from specdec.errors import ConfigError

T = TypeVar("T")

PROGRAM = Path(__file__).with_name("grammar_worker.py")
SECONDS = 3.0
"""Processor seconds that compiling a grammar may take."""
ANSWER_SECONDS = 20.0
"""Seconds of real time that it may take, if other programs use the processor."""
START_SECONDS = 120.0
BYTES = 512 << 20
"""Memory that compiling a grammar may take."""
MAX_WORKER_BYTES = 32 << 20
"""After a grammar that took more than this, the worker is ended, which returns its memory."""
FORCED_BYTES = 1 << 14
"""Longest text that a grammar may force at its beginning: each copy of a state holds it."""
STACK_BYTES = 64 << 20
"""Address space of a trial's stack; only touched pages take memory."""

ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}

_stack_size = threading.Lock()


class GrammarTrial:
    """The worker of one tokenizer. `run` may be called from any thread, but only one at a time."""

    def __init__(self, tokenizer_json: str, eos: Any, *, n_vocab: int) -> None:
        self._begin = {"tokenizer": tokenizer_json, "n_vocab": n_vocab, "eos": eos}
        self._worker: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None

    def run(self, grammar: str) -> int:
        """Returns the bytes that the grammar takes. Raises ConfigError, with the reason, if it must not be compiled."""
        asked = {"grammar": grammar, "seconds": SECONDS, "bytes": BYTES, "forced": FORCED_BYTES}
        try:
            answer = self._answer(self._ready(), asked, ANSWER_SECONDS)
        except BaseException:  # the worker has died, or half an answer may be left in the pipe
            self._end()
            raise
        if answer["bytes"] > MAX_WORKER_BYTES:
            self._end()
        if answer["reason"]:
            raise ConfigError(answer["reason"])
        return int(answer["bytes"])

    def _ready(self) -> "subprocess.Popen[bytes]":
        """The running worker, started if there is none or this process is a fork."""
        if self._worker is not None and self._worker.poll() is None:  # in a fork, its parent's worker counts as ended
            return self._worker
        self._end()
        try:
            worker = subprocess.Popen(
                [sys.executable or "python3", "-P", str(PROGRAM), str(STACK_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,  # Ctrl-C is meant for this process only
            )
        except OSError as error:
            raise ConfigError(f"no process could be started to compile it in: {error}") from None
        self._worker = worker
        self._finalizer = weakref.finalize(self, _stop, worker, os.getpid())
        try:
            self._answer(worker, self._begin, START_SECONDS)
        except ConfigError:
            raise ConfigError("the process that it would be compiled in did not start") from None
        return worker

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._worker = self._finalizer = None

    def _answer(self, worker: "subprocess.Popen[bytes]", asked: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The worker's answer. Raises ConfigError, with the reason, if it ends or does not answer within `seconds`."""
        assert worker.stdin is not None and worker.stdout is not None
        line, start = b"", time.monotonic()
        timer = threading.Timer(seconds, worker.kill)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.stdin.write(json.dumps(asked).encode() + b"\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            late = time.monotonic() - start >= seconds
            raise ConfigError(f"it took more than {seconds:g} s to compile" if late else _why(worker))
        answer: dict[str, Any] = json.loads(line)
        return answer


def with_large_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread with twice the stack of a trial; return its result or raise its error."""
    pool = ThreadPoolExecutor(1, "specdec-grammar")
    with _stack_size:  # one setting for all threads that the process starts
        before = threading.stack_size(2 * STACK_BYTES)
        try:
            done = pool.submit(work)
        finally:
            threading.stack_size(before)
    pool.shutdown(wait=False)
    return done.result()


def _why(worker: "subprocess.Popen[bytes]") -> str:
    """The reason for a worker's end, by its exit status."""
    code = worker.wait(5)
    if code == -getattr(signal, "SIGPROF", 0):
        return f"it takes more than {SECONDS:g} s of computing to compile"
    if code == -signal.SIGSEGV:
        return "its references or groups are nested too deep"
    return f"it takes more than {BYTES >> 20} MiB, or ends the library"


def _stop(worker: "subprocess.Popen[bytes]", pid: int) -> None:
    if os.getpid() == pid:  # otherwise in a fork, whose parent has the worker
        with contextlib.suppress(OSError), worker:
            worker.kill()
