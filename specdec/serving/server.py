"""Runs an application on a socket until a signal ends it, gracefully, or its engine has died.

SIGTERM, SIGINT and SIGHUP: no new connections, streams go on for `stop_seconds` and are then ended with an error event.
A second SIGTERM or SIGINT ends at once. The process never outlives its deadline: where a thread hangs, it leaves.
"""

import asyncio
import functools
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from specdec.errors import ConfigError
from specdec.serving.application import create_app
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http.connections import Connection, Connections
from specdec.serving.http.listener import Listener
from specdec.serving.http.probes import Watch
from specdec.serving.http.trimming import Trimmer, without_what_stays
from specdec.serving.logs import Reporter, describe
from specdec.serving.server_settings import ServeSettings

logger = logging.getLogger("specdec.serving")

LAST_SECONDS = 3.0
"""For streams that were ended to say so."""
OVERDUE_SECONDS = 10.0
"""After which a process that should have ended is ended."""
SWITCH_SECONDS = 0.0001
"""After which a thread that wants Python's lock gets it. The engine's thread gives it up at every operation of torch,
thousands of times a step; with Python's own 5 ms, a loop that is busy with others takes most of the time between."""


def listen(host: str, port: int) -> Listener:
    """A bound socket; port 0 picks one that is free. Raises ConfigError where there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = Listener(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_DEFER_ACCEPT"):  # Linux: a connection is not there before its first byte, or this second
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{host}:{port} cannot be listened on: {reason}; give another --host or --port") from None
    return bound


def address(bound: socket.socket, scheme: str = "http") -> str:
    """The URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def require_certificate(settings: ServeSettings) -> None:
    """Raises ConfigError where the files for TLS cannot be used."""
    if settings.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        said = getattr(error, "reason", None) or error.strerror or str(error)
        raise ConfigError(
            f"ssl_certfile={str(settings.ssl_certfile)!r} with ssl_keyfile={str(settings.ssl_keyfile)!r} cannot be "
            f"used: {said}; give the certificate and its key as PEM files"
        ) from None


def run_app(engine: AsyncEngine, settings: ServeSettings, bound: Listener, ready: Callable[[], None]) -> str | None:
    """Serve until a signal comes; closes the engine. ready: called once requests are taken.

    -> why it ended by itself, such as an engine whose thread has died; None after a signal.
    """
    connections = Connections(settings)
    bound.connections, bound.secure = connections, settings.ssl_certfile is not None
    app = create_app(engine, settings)
    connections.door = app.state.door
    config = uvicorn.Config(
        app,
        loop="asyncio",  # whose accept is the Listener's
        http=functools.partial(Connection, connections),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(settings.stop_seconds + LAST_SECONDS) + 1,
        timeout_keep_alive=settings.timeout_keep_alive,  # type: ignore[arg-type]  # seconds for call_later
        server_header=False,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
    )
    server = Server(config, engine, settings, connections, ready)
    server.reporter = Reporter(engine, app.state.metrics, settings.stats_seconds)
    logger.info(describe(app.state.serve))
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with without_what_stays():
            server.run(sockets=[bound])
    finally:
        sys.setswitchinterval(usual)
        asyncio.run(engine.close())
        server.deadline.cancel()
    return server.died


class Server(uvicorn.Server):
    """uvicorn's, that tells when it is ready, looks after its engine and its connections, and ends in time."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: AsyncEngine,
        settings: ServeSettings,
        connections: Connections,
        ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.died: str | None = None
        self.reporter: Reporter | None = None
        self._engine = engine
        self._stop_seconds = settings.stop_seconds
        self._connections = connections
        self._watch = Watch(engine, settings.liveness_seconds)
        self._trimmer = Trimmer()
        self._ready = ready
        self.deadline = threading.Timer(settings.stop_seconds + LAST_SECONDS + OVERDUE_SECONDS, _leave_at_once)
        self.deadline.daemon = True

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # about once a second
            self._connections.sweep()
            self._watch.look()
            self._trimmer.look()
            if self.reporter is not None:
                self.reporter.look()
        if self.died is None:
            self.died = self._watch.died
        return await super().on_tick(counter) or self.died is not None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGHUP too, unless it is to be ignored (nohup)."""
        hangup = getattr(signal, "SIGHUP", None)
        here = threading.current_thread() is threading.main_thread()
        with super().capture_signals():
            if hangup is None or not here or signal.getsignal(hangup) is signal.SIG_IGN:
                yield
                return
            before = signal.signal(hangup, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(hangup, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig != getattr(signal, "SIGHUP", None):  # a terminal may hang up twice
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        self.deadline.start()
        ending = asyncio.create_task(self._engine.close(0.0 if self.died else self._stop_seconds))
        # a request that becomes whole now is answered with 503, so little is lost by not waiting for it
        asyncio.get_running_loop().call_later(min(1.0, self._stop_seconds), self._connections.close_incomplete)
        await super().shutdown(sockets)
        if self.force_exit:
            await self._engine.close()
        await ending


def _leave_at_once() -> None:
    """A step of the engine, or another thread, hangs: nothing in this process can end it."""
    logger.critical("the process did not end in time; it leaves as it is")
    logging.shutdown()
    os._exit(1)
