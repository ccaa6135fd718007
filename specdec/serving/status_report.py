"""What a server says of itself in its log: what it serves when it starts, and how it goes while there is traffic."""

import asyncio
import logging
import time

from specdec.serving.async_engine import AsyncEngine
from specdec.serving.metrics import Metrics, Snapshot
from specdec.serving.state import ServeState

logger = logging.getLogger("specdec.serving")


def describe(state: ServeState) -> str:
    """Weights, context, slots, memory, drafter and parser of a server, in one line."""
    engine, parser = state.engine, state.tool_parser
    stats, drafter = engine.stats_now(), "none"
    slots, sliding = f"{stats.full_slots.capacity} KV slots", stats.swa_slots.capacity
    if sliding:
        slots += f" and {sliding} of sliding windows"
    if engine.drafter is not None:
        sizes = f"{engine.spec.num_steps} steps, {engine.spec.num_nodes} nodes"
        drafter = f"{type(engine.drafter).__name__} ({sizes})"
    return (
        f"serving {', '.join(state.settings.model_names)}: weights in {engine.weights}, "
        f"context {engine.max_model_len} tokens, {engine.config.max_batch_size} requests at a time, "
        f"{slots} ({engine.kv_bytes / 1e9:.2f} GB), "
        f"drafter {drafter}, tool parser {'none' if parser is None else parser.__name__}"
    )


class Reporter:
    """One line every `seconds` in which tokens were read or made; 0: none. Belongs to an event loop."""

    def __init__(self, engine: AsyncEngine, metrics: Metrics, seconds: float) -> None:
        self._engine, self._metrics, self._seconds = engine, metrics, seconds
        self._last: Snapshot | None = None
        self._then = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Called about once a second; does not wait."""
        due = self._seconds and time.monotonic() - self._then >= self._seconds
        if due and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._say())

    async def _say(self) -> None:
        snapshot = await self._metrics.snapshot()
        now = time.monotonic()
        line = said(self._last, snapshot, now - self._then)
        self._last, self._then = snapshot, now
        if line:
            logger.info(line)


def said(before: Snapshot | None, after: Snapshot, seconds: float) -> str | None:
    """The line of what happened between two snapshots; None where nothing did."""
    since = after.requests.copy()
    if before is not None:
        since.add(before.requests, sign=-1)
    if not (since.prompt_tokens or since.output_tokens):
        return None
    pool = after.engine.full_slots
    parts = [
        f"prompts {since.prompt_tokens / seconds:.1f} tokens/s",
        f"outputs {since.output_tokens / seconds:.1f} tokens/s",
        f"{after.engine.running} requests running, {after.engine.waiting} waiting",
        f"KV slots {100 * pool.held / pool.capacity if pool.capacity else 0:.1f} % in use",
    ]
    if since.prompt_tokens:
        parts.append(f"{100 * since.cached_tokens / since.prompt_tokens:.1f} % of prompts cached")
    if since.drafted_rounds:
        accepted = 100 * sum(since.accepted_counts) / since.draft_tokens
        parts.append(f"acceptance length {since.acceptance_length:.2f}, {accepted:.1f} % of drafts")
    return ", ".join(parts)
