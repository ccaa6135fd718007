"""GET /live, /ready, /ping and /health: should this process be kept, and should it get requests now?

A server whose rounds fail gets no more requests, so nothing would show whether it has recovered. `EngineWatch`
therefore requests one token now and then, and declares the engine dead if these requests fail too.
"""

import asyncio
import logging
import time
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from specdec.config import SamplingParams
from specdec.errors import QueueFullError, SpecDecError
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http.faults import REFUSED, Answer
from specdec.serving.state import StateDep

logger = logging.getLogger("specdec.serving")
router = APIRouter()

PROBE_SECONDS = 2.0
"""Seconds between two probes of an engine whose rounds fail."""
MAX_FAILED = 3
"""Consecutive failed probes after which the engine counts as dead."""


class Health(Answer):
    status: Literal["ok", "unavailable"]
    reason: str | None = None


HEALTH: dict[str, Any] = {"response_model": Health, "responses": {503: {"model": Health, "description": REFUSED[503]}}}
AS_SAGEMAKER = "Answers like /ready, under the name that SageMaker asks for."


@router.get("/live", **HEALTH)
async def read_live(state: StateDep) -> Response:
    """200 unless the process should be replaced: its engine's thread has ended, or hangs in a step."""
    return _answer(why_not_alive(state.engine, state.settings.liveness_seconds))


@router.get("/ping", name="read_ping", description=AS_SAGEMAKER, **HEALTH)
@router.get("/health", name="read_health", description="Answers like /ready.", **HEALTH)
@router.get("/ready", **HEALTH)
async def read_ready(state: StateDep) -> Response:
    """200 while it accepts requests; 503 if it is stopping, hangs, or its rounds fail repeatedly."""
    return _answer(why_not_alive(state.engine, state.settings.liveness_seconds) or state.engine.trouble)


def why_not_alive(engine: AsyncEngine, most_seconds: float) -> str | None:
    """Why the process should be replaced; None: it is alive."""
    if engine.died is not None:
        return engine.died
    seconds = engine.seconds_in_step
    if seconds > most_seconds:
        return f"a step of the engine has not ended for {seconds:.0f} s"
    return None


def _answer(reason: str | None) -> Response:
    if reason is not None:
        return JSONResponse({"status": "unavailable", "reason": reason}, 503)
    return JSONResponse({"status": "ok"})


class EngineWatch:
    """Watches the engine of one server, on its event loop. died: why the process must end; None: it need not."""

    def __init__(self, engine: AsyncEngine, liveness_seconds: float) -> None:
        self.died: str | None = None
        self._engine = engine
        self._liveness_seconds = liveness_seconds
        self._said_hung = False
        self._failed = 0  # consecutive failed probes
        self._next = 0.0
        self._probe: asyncio.Task[Any] | None = None

    def check(self) -> None:
        """Called ten times a second; does not wait."""
        self.died = self.died or self._engine.died
        hung = why_not_alive(self._engine, self._liveness_seconds)
        if hung and not self._said_hung and self.died is None:
            logger.error("%s: /live answers 503, so that this process is replaced", hung)
        self._said_hung = hung is not None
        if not self._engine.failing:
            self._failed = 0
        elif not hung and time.monotonic() >= self._next and (self._probe is None or self._probe.done()):
            self._probe = asyncio.create_task(self._probe_engine())

    async def _probe_engine(self) -> None:
        """Request one token. An engine that can generate it is no longer failing."""
        self._next = time.monotonic() + PROBE_SECONDS
        try:
            await self._engine.generate([[0]], SamplingParams(max_new_tokens=1, ignore_eos=True))
            logger.info("the engine is well again: it made a token")
        except QueueFullError:
            pass
        except SpecDecError as error:
            self._failed += 1
            logger.warning("the engine failed a probe of one token, %d in a row: %s", self._failed, error)
            if self._failed >= MAX_FAILED:
                self.died = f"the engine makes no token any more: {error}"
