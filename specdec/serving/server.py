"""Runs an application on a socket until a signal ends it gracefully or its engine has died.

SIGTERM, SIGINT and SIGHUP: no new connections; streams continue for `stop_seconds` and then end with an error event. A
second SIGTERM or SIGINT ends the server at once. The process never outlives its deadline, even if a thread hangs.

    main thread         waits and forwards signals
    specdec-http        uvicorn's event loop (so uvicorn handles no signals), which checks the engine ten times a second
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from specdec.errors import ConfigError
from specdec.serving.application import create_app
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http.probes import EngineWatch
from specdec.serving.logs import describe, report_traffic
from specdec.serving.server_settings import ServeSettings

logger = logging.getLogger("specdec.serving")

LAST_SECONDS = 3.0
"""Seconds for the last event of streams that the stop has ended."""
OVERDUE_SECONDS = 10.0
"""Seconds after the deadline at which the process is killed."""
SWITCH_SECONDS = 0.0001
"""Python's switch interval: the longest time until another thread gets the interpreter lock. The engine's thread
releases the lock at every torch operation, thousands of times per step. With Python's default of 5 ms, a busy event
loop would take most of the time."""
TICK_SECONDS = 0.1
ACCEPTED_AT_ONCE = 16
"""Connections accepted per turn of the loop; streams continue between turns."""
QUEUED = 1024
"""Connections that the operating system queues for the loop."""
HEAD_BYTES = 1 << 16
RECEIVED_BYTES = 1 << 16
"""Bytes of one connection that the operating system buffers. The loop parses them in one turn: 0.1 s for 64 KiB of
one-byte chunks."""
WRITE_SECONDS = 300
"""Seconds after which the operating system resets the connection of a client that reads nothing."""


def listen(host: str, port: int) -> socket.socket:
    """Make a bound socket; port 0 picks a free port. Raises ConfigError if that fails.

    Connections inherit its options. On Linux a connection is accepted only after its first byte or a second, and is
    reset if its client reads nothing for WRITE_SECONDS."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED_BYTES)
    if sys.platform == "linux":
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * WRITE_SECONDS)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{host}:{port} cannot be listened on: {reason}; give another --host or --port") from None
    return bound


def address(bound: socket.socket, scheme: str = "http") -> str:
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def require_certificate(settings: ServeSettings) -> None:
    """Raise ConfigError if the files for TLS cannot be used."""
    if settings.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        key = "" if settings.ssl_keyfile is None else f" with ssl_keyfile={str(settings.ssl_keyfile)!r}"
        raise ConfigError(
            f"ssl_certfile={str(settings.ssl_certfile)!r}{key} cannot be used: {reason}; give the certificate and its "
            "key as PEM files"
        ) from None


def run_app(
    engine: AsyncEngine, settings: ServeSettings, bound: socket.socket, ready: Callable[[], None]
) -> str | None:
    """Serve until a signal, then close the engine. ready: called when requests are accepted.

    Returns why it ended without a signal, such as a dead engine thread; None after a signal.
    """
    app = create_app(engine, settings)
    server = uvicorn.Server(uvicorn_config(app, settings))
    logger.info(describe(app.state.serve))
    deadline = threading.Timer(settings.stop_seconds + LAST_SECONDS + OVERDUE_SECONDS, _exit_now)
    deadline.daemon = True
    with ThreadPoolExecutor(1, "specdec-http") as http, _process_settings(), _stop_on_signals(server):
        served = http.submit(asyncio.run, _serve(server, bound, app, ready, deadline))
        while not served.done():
            wait({served}, 1.0)  # signals are handled in between, also those that another thread received
    deadline.cancel()
    return served.result()


def uvicorn_config(app: FastAPI, settings: ServeSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",  # h11 bounds heads; httptools does not
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        backlog=ACCEPTED_AT_ONCE,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_graceful_shutdown=int(settings.stop_seconds + LAST_SECONDS) + 1,
        timeout_keep_alive=settings.timeout_keep_alive,  # type: ignore[arg-type]  # seconds for call_later
        server_header=False,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
    )


async def _serve(
    server: uvicorn.Server, bound: socket.socket, app: FastAPI, ready: Callable[[], None], deadline: threading.Timer
) -> str | None:
    """Serve until the server is told to stop, which starts the deadline."""
    engine, settings = app.state.serve.engine, app.state.serve.settings
    watch = EngineWatch(engine, settings.liveness_seconds)
    reporting = asyncio.create_task(report_traffic(app.state.metrics, settings.stats_seconds))
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    while not (server.started or serving.done()):
        await asyncio.sleep(TICK_SECONDS / 10)
    if server.started:
        bound.listen(QUEUED)
        ready()
    while not (server.should_exit or serving.done()):
        watch.check()
        if watch.died is not None:
            server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(TICK_SECONDS)
    deadline.start()
    reporting.cancel()
    ending = asyncio.create_task(engine.close(0.0 if watch.died else settings.stop_seconds))
    app.state.body_reader.stop(min(1.0, settings.stop_seconds))
    try:
        await serving
    finally:
        if server.force_exit:
            await engine.close()
        await ending
    return watch.died


@contextmanager
def _stop_on_signals(server: uvicorn.Server) -> Iterator[None]:
    """Let signals stop the server: SIGHUP too, unless it is ignored (nohup)."""

    def stop(number: int, frame: FrameType | None) -> None:
        if number != getattr(signal, "SIGHUP", None):
            server.handle_exit(signal.SIGINT, frame)  # a second one ends at once
        elif not server.should_exit:  # a terminal may hang up twice
            server.handle_exit(signal.SIGTERM, frame)

    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        numbers.append(hangup)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _process_settings() -> Iterator[None]:
    """Raise the file limit to the maximum, let cycle collection skip all objects that exist now, and set the switch
    interval, so that the engine's thread soon gets Python's lock."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(usual)


def _exit_now() -> None:
    """Exit although a step of the engine or another thread hangs, which nothing in this process can end."""
    logger.critical("the process did not end in time; it exits now, without closing the engine")
    logging.shutdown()
    os._exit(1)
