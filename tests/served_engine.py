"""A server in this process, for tests that look inside it; `server_process.py` starts one in its own process."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from specdec import Engine, EngineConfig
from specdec.serving.application import create_app
from specdec.serving.async_engine import INTAKE_SECONDS, AsyncEngine
from specdec.serving.server import address, listen
from specdec.serving.server_settings import ServeSettings


@contextmanager
def served(
    engine: Engine, max_body_bytes: int = 1 << 20, intake_seconds: float = INTAKE_SECONDS, **more: Any
) -> Iterator[tuple[str, AsyncEngine, asyncio.AbstractEventLoop]]:
    """Serve an engine on a thread. Yields (URL, AsyncEngine, event loop). more: other settings."""
    running, ready = AsyncEngine(engine, intake_seconds=intake_seconds), threading.Event()
    settings = ServeSettings(model_names=["tiny-gemma4"], max_body_bytes=max_body_bytes, **more)
    config = uvicorn.Config(create_app(running, settings), log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    loop = asyncio.new_event_loop()

    async def serve(bound: socket.socket) -> None:
        starting = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:
            await asyncio.sleep(0.01)
        ready.set()
        await starting
        await running.close()

    with listen("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=loop.run_until_complete, args=(serve(bound),))
        thread.start()
        try:
            assert ready.wait(120)
            yield address(bound), running, loop
        finally:
            server.should_exit = True
            thread.join(120)
            loop.close()


def bundled_engine(drafter: str | None = "tiny-gemma4-mtp", **settings: Any) -> Any:
    """Make a module's fixture: an engine of the bundled pair. settings: of its EngineConfig."""

    @pytest.fixture(scope="module")
    def engine() -> Iterator[Engine]:
        with Engine.from_pretrained("tiny-gemma4", drafter, config=EngineConfig(**settings)) as engine:
            yield engine

    return engine


def served_url(**settings: Any) -> Any:
    """Make a module's fixture: the URL of a server over its `engine` fixture. settings: of `served`."""

    @pytest.fixture(scope="module")
    def url(engine: Engine) -> Iterator[str]:
        with served(engine, **settings) as (url, _, _):
            yield url

    return url


def until(condition: Callable[..., Any], *arguments: Any, seconds: float = 120.0) -> None:
    """Wait for a condition, such as a line of the log, which is written only after the answer was sent."""
    end = time.monotonic() + seconds
    while not condition(*arguments):
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.02)
