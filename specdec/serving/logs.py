"""The log of a server: the thread that writes it, the start report, and a periodic line while there is traffic.

Any thread formats a line and puts it into a queue, or drops it if the queue is full. The log thread writes the queue to
a file descriptor, so a slow or absent reader delays no request. Only the end of the process waits for it, at most
CLOSE_SECONDS.
"""

import asyncio
import json
import logging
import os
import threading
import time
from queue import SimpleQueue
from typing import Any, Literal

from specdec.errors import counted
from specdec.serving.metrics import MetricsCollector, Snapshot
from specdec.serving.state import ServeState

MAX_QUEUED_BYTES = 4 << 20
"""Most bytes of queued lines; further lines are dropped."""
CLOSE_SECONDS = 1.0
TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the record's attribute `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII: no control character or lone surrogate reaches a terminal


class NonBlockingHandler(logging.Handler):
    """Writes to a file descriptor on a daemon thread. dropped: number of dropped lines so far."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor
        self.dropped = 0
        self._lines: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._queued = self._written = 0  # bytes so far, each counted by one thread
        threading.Thread(target=self._run, name="specdec-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record. `logging` calls this with the handler's lock held."""
        try:
            line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
        except Exception:
            self.handleError(record)
            return
        if self._queued - self._written + len(line) > MAX_QUEUED_BYTES:
            self.dropped += 1
            return
        self._queued += len(line)
        self._lines.put(line)

    def flush(self) -> None:
        """Wait until the queue is written, for at most CLOSE_SECONDS."""
        reached = threading.Event()
        self._lines.put(reached)
        reached.wait(CLOSE_SECONDS)

    def close(self) -> None:
        self.flush()
        super().close()

    def _run(self) -> None:
        reported = 0  # dropped lines already reported
        while True:
            taken = self._lines.get()
            if isinstance(taken, bytes):
                self._write(taken)
                self._written += len(taken)
            is_last = isinstance(taken, threading.Event) or self._lines.empty()
            if is_last and (unreported := self.dropped - reported):
                text = "%d lines of this log were dropped: its reader is too slow"
                record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (unreported,), None)
                self._write((self.format(record) + "\n").encode())
                reported += unreported
            if isinstance(taken, threading.Event):
                taken.set()

    def _write(self, line: bytes) -> None:
        """Write the whole line. If there is no reader, it is lost."""
        left = memoryview(line)
        while left:
            try:
                left = left[os.write(self.descriptor, left) :]
            except BlockingIOError:  # another process made the pipe non-blocking
                time.sleep(0.05)
            except OSError:
                return


def set_up(kind: Literal["text", "json"], level: int) -> None:
    """Let the root logger write to standard error through such a handler, unless the program has set others."""
    handler = NonBlockingHandler(2)
    handler.setFormatter(JsonFormatter() if kind == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level, handlers=[handler])


logger = logging.getLogger("specdec.serving")


def describe(state: ServeState) -> str:
    """Describe weights, context, slots, memory, drafter and parser of a server in one line."""
    engine, parser = state.engine, state.tool_parser
    stats, drafter = engine.engine.stats(), "none"
    slots, sliding = f"{stats.full_slots.capacity} KV slots", stats.swa_slots.capacity
    if sliding:
        slots += f" and {sliding} of sliding windows"
    if engine.drafter is not None:
        sizes = f"{counted(engine.spec.num_steps, 'step')}, {engine.spec.num_nodes} nodes"
        drafter = f"{engine.drafter.__class__.__name__} ({sizes})"
    return (
        f"serving {', '.join(state.settings.model_names)}: weights in {engine.weights}, "
        f"context {engine.max_model_len} tokens, {counted(engine.config.max_batch_size, 'request')} at a time, "
        f"{slots} ({engine.kv_bytes / 1e9:.2f} GB), "
        f"drafter {drafter}, tool parser {'none' if parser is None else parser.__name__}"
    )


async def report_traffic(metrics: MetricsCollector, seconds: float) -> None:
    """Log one line every `seconds` (0: never) if tokens were read or generated, until this is cancelled."""
    last, then = None, time.monotonic()
    while seconds:
        await asyncio.sleep(seconds)
        snapshot, now = await metrics.snapshot(), time.monotonic()
        if line := traffic_line(last, snapshot, now - then):
            logger.info(line)
        last, then = snapshot, now


def traffic_line(before: Snapshot | None, after: Snapshot, seconds: float) -> str | None:
    """A line on the traffic between two snapshots; None if there was none."""
    since = after.requests.copy()
    if before is not None:
        since.add(before.requests, sign=-1)
    if not (since.prompt_tokens or since.output_tokens):
        return None
    pool = after.engine.full_slots
    parts = [
        f"prompts {since.prompt_tokens / seconds:.1f} tokens/s",
        f"outputs {since.output_tokens / seconds:.1f} tokens/s",
        f"{counted(after.engine.running, 'request')} running, {after.engine.waiting} waiting",
        f"KV slots {100 * pool.held / pool.capacity if pool.capacity else 0:.1f} % in use",
    ]
    if since.prompt_tokens:
        parts.append(f"{100 * since.cached_tokens / since.prompt_tokens:.1f} % of prompts cached")
    if since.drafted_rounds:
        accepted = 100 * sum(since.accepted_counts) / since.draft_tokens
        parts.append(f"acceptance length {since.acceptance_length:.2f}, {accepted:.1f} % of drafts")
    if after.engine.drafts.off and 2 * since.drafted_rounds < since.rounds:
        few = f"{since.drafted_rounds} of {since.rounds} rounds had drafts" if since.drafted_rounds else "no drafts"
        parts.append(f"{few} ({after.engine.drafts.off})")
    return ", ".join(parts)
