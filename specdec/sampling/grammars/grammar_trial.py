"""Tries grammars in a worker process, where one that crashes, hangs or eats memory costs its own request and no other.

    trial = GrammarTrial(tokenizer_json, eos, n_vocab=...)
    trial.run(grammar)  ->  bytes that it takes; raises ConfigError with the reason against it

The library bounds much of its work by itself, but not all: intersections of patterns search for minutes, and chains of
references overflow the stack. A compiled grammar cannot cross processes, so what passes is compiled again, by
`with_large_stack`, on a stack twice as large as that of the trial; it is then known to end. The worker starts with the
first grammar that needs it, and again after one that ended it or took much memory.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from specdec.errors import ConfigError

T = TypeVar("T")

PROGRAM = Path(__file__).with_name("grammar_worker.py")
SECONDS = 3.0
"""Seconds of computing that a grammar may take."""
PATIENCE = 20.0
"""Seconds by the clock, on a machine that is busy with other things."""
START_SECONDS = 120.0
BYTES = 512 << 20
"""Memory that a grammar may take while it is compiled."""
LARGE_BYTES = 32 << 20
"""After a grammar that took more the worker ends, and gives the memory back with it."""
FORCED_BYTES = 1 << 14
"""Text that a grammar may force at its start: every copy of a state holds it."""
IDLE_SECONDS = 5.0
"""Without a grammar to try, after which the worker ends; the next one takes a fraction of a second to start."""
STACK_BYTES = 64 << 20
"""Address space; a page of it is taken when it is touched."""

_stack_size = threading.Lock()


class WorkerDied(Exception):
    """The worker ended, or did not answer in time. Its text says what is wrong with the grammar."""


class GrammarTrial:
    """One tokenizer's worker. From any thread; one grammar at a time."""

    def __init__(self, tokenizer_json: str, eos: Any, *, n_vocab: int) -> None:
        self._begin = {"tokenizer": tokenizer_json, "n_vocab": n_vocab, "eos": eos}
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._pid = os.getpid()
        self._finalizer: Any = None
        self._timer = threading.Timer
        self._idle: threading.Timer | None = None
        self.starts = 0

    def run(self, grammar: str) -> int:
        """Bytes that the grammar takes. Raises ConfigError, with the reason, for one that must not be compiled."""
        asked = {"grammar": grammar, "seconds": SECONDS, "bytes": BYTES, "forced": FORCED_BYTES, "stack": STACK_BYTES}
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            try:
                answer = self._answer(self._ready(), asked, PATIENCE)
                if answer["bytes"] > LARGE_BYTES:
                    self._end()
            except WorkerDied as error:
                self._end()
                raise ConfigError(str(error)) from None
            except BaseException:  # half an answer may be left in the pipe
                self._end()
                raise
            self._end_when_idle()
        if answer["reason"]:
            raise ConfigError(answer["reason"])
        return int(answer["bytes"])

    def _ready(self) -> "subprocess.Popen[bytes]":
        if self._worker is not None and self._pid == os.getpid() and self._worker.poll() is None:
            return self._worker
        self._end()
        try:
            worker = subprocess.Popen(
                [sys.executable or "python3", "-P", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "RAYON_NUM_THREADS": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                    "MALLOC_ARENA_MAX": "1",
                },
                start_new_session=True,  # Ctrl-C is for us
            )
        except OSError as error:
            raise WorkerDied(f"no process could be started to compile it in: {error}") from None
        self._worker, self._pid, self.starts = worker, os.getpid(), self.starts + 1
        self._finalizer = weakref.finalize(self, _stop, worker, os.getpid())
        try:
            self._answer(worker, self._begin, START_SECONDS)
        except WorkerDied:
            raise WorkerDied("the process that it would be compiled in did not start") from None
        return worker

    def _end_when_idle(self) -> None:
        if (worker := self._worker) is not None:
            self._idle = call_later(self._timer, IDLE_SECONDS, self, lambda trial: trial.end_idle(worker))

    def end_idle(self, worker: "subprocess.Popen[bytes]") -> None:
        """End this worker unless a grammar is tried right now, or another took its place: then that one's end comes."""
        if self._pid != os.getpid() or not self._lock.acquire(blocking=False):
            return
        try:
            if self._worker is worker:
                self._end()
        finally:
            self._lock.release()

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._worker = self._finalizer = None

    def _answer(self, worker: "subprocess.Popen[bytes]", asked: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer within that time. Raises WorkerDied once it has ended."""
        assert worker.stdin is not None and worker.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            worker.kill()

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            worker.stdin.write(json.dumps(asked).encode() + b"\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            raise WorkerDied(f"it took more than {seconds:g} s to compile" if late.is_set() else _why(worker))
        answer: dict[str, Any] = json.loads(line)
        return answer


def call_later(timer: type[threading.Timer], seconds: float, owner: T, call: Callable[[T], object]) -> threading.Timer:
    """Runs `call(owner)` after `seconds`, unless the owner was dropped by then."""
    held = weakref.ref(owner)

    def look() -> None:
        if (there := held()) is not None:
            call(there)

    started = timer(seconds, look)
    started.daemon = True
    started.start()
    return started


def with_large_stack(work: Callable[[], T]) -> T:
    """Runs `work` on a thread with twice the stack of a trial; returns or raises the same."""
    pool = ThreadPoolExecutor(1, "specdec-grammar")
    with _stack_size:  # it is the process's, for threads that start
        before = threading.stack_size(2 * STACK_BYTES)
        try:
            done = pool.submit(work)
        finally:
            threading.stack_size(before)
    pool.shutdown(wait=False)
    return done.result()


def _why(worker: "subprocess.Popen[bytes]") -> str:
    """The cause of a worker's end, as far as its exit status tells."""
    code = worker.wait(5)
    if code == -getattr(signal, "SIGPROF", 0):
        return f"it takes more than {SECONDS:g} s of computing to compile"
    if code == -signal.SIGSEGV:
        return "its references or groups are nested too deep"
    return f"it takes more than {BYTES >> 20} MiB, or ends the library"


def _stop(worker: "subprocess.Popen[bytes]", pid: int) -> None:
    if os.getpid() != pid:  # a fork's copy of it
        return
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
