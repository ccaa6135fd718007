"""Runs an application on a socket until a signal ends it, gracefully.

SIGTERM and SIGINT: no new connections, streams go on for `stop_seconds` and are then ended with an error event, so
that no client takes half an answer for a whole one. A second signal ends at once. The exit code is 0.
"""

import asyncio
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from specdec.errors import ConfigError
from specdec.serving.app import create_app
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.settings import ServeSettings

LAST_SECONDS = 3.0
"""For streams that were ended to say so."""


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 picks one that is free. Raises ConfigError where there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{host}:{port} cannot be listened on: {reason}; give another --host or --port") from None
    return bound


def address(bound: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_app(engine: AsyncEngine, settings: ServeSettings, bound: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until a signal comes; closes the engine. ready: called once requests are taken."""
    config = uvicorn.Config(
        create_app(engine, settings),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(settings.stop_seconds + LAST_SECONDS) + 1,
        timeout_keep_alive=30,
        server_header=False,
    )
    try:
        Server(config, engine, settings.stop_seconds, ready).run(sockets=[bound])
    finally:
        asyncio.run(engine.close())


class Server(uvicorn.Server):
    """uvicorn's, that tells when it is ready, and ends what streams on after `stop_seconds`."""

    def __init__(
        self, config: uvicorn.Config, engine: AsyncEngine, stop_seconds: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._stop_seconds = stop_seconds
        self._ready = ready

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # the second one
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        ending = asyncio.create_task(self._engine.close(self._stop_seconds))
        await super().shutdown(sockets)
        if self.force_exit:
            await self._engine.close()
        await ending
