"""Connections bounded in number and in time: what uvicorn leaves to a proxy.

A connection waits for a request until the last byte of that request has come. Where there is no room for a new
connection, the one that has waited longest is closed, so idle clients never keep working ones out. A request whose last
byte has come is never given up here. It knows sockets and h11, and nothing of routes or engines.
"""

import json
import logging
import socket
import time
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.serving.http.faults import error_body
from specdec.serving.http.pacing import Door, Pace
from specdec.serving.server_settings import ServeSettings

logger = logging.getLogger("specdec.serving")

PIECE, BODY_PIECE = 1 << 10, 1 << 18
"""Bytes parsed in one turn of the event loop: of heads and of bodies in chunks, which may be of one byte each, and of
bodies of a length that is known. A piece of 64 KiB takes the loop about as long as one of 256 KiB."""
HEAD_READ = 1 << 14
"""Bytes read at once while a head is awaited: what comes after one that is refused is not read."""
PIPELINED_SECONDS = 0.05
"""For which a request waits that came before the answer to the one in front of it."""
WRITE_SECONDS = 300.0
"""A client that reads nothing for this long is given up."""
QUIET_SECONDS = 10.0
"""Between two lines of the log that say the same."""
LATE = (h11.IDLE, h11.SEND_BODY)
"""What h11 calls a client whose request is not whole."""


class Accepted(socket.socket):
    """One connection, counted until it is closed. began: when it was accepted."""

    connections: "Connections"
    protocol: "Connection | None" = None
    began: float = 0.0

    def close(self) -> None:
        self.connections.forget(self)
        super().close()


class Connections:
    """The open connections of one server; belongs to its event loop."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.door: Door | None = None
        self.most = settings.resolved_connections()
        self.open: dict[int, Accepted] = {}  # by file descriptor
        self._waiting: dict[int, Accepted] = {}  # those from which a request is awaited, the longest wait first
        self._quiet_until: dict[str, float] = {}
        self.pace = Pace()  # of addresses that send what is no HTTP

    def add(self, accepted: Accepted) -> None:
        self.open[accepted.fileno()] = self._waiting[accepted.fileno()] = accepted

    def forget(self, accepted: Accepted) -> None:
        """It is closed, or about to be."""
        number = accepted.fileno()
        for known in (self.open, self._waiting):
            if known.get(number) is accepted:
                del known[number]

    def awaits_request(self, accepted: Accepted, awaits: bool) -> None:
        number = accepted.fileno()
        if not awaits:
            self._waiting.pop(number, None)
        elif self.open.get(number) is accepted:
            self._waiting.setdefault(number, accepted)

    def make_room(self) -> bool:
        """Room for one more, if need be by closing the one that has waited longest. -> is there room?"""
        if len(self.open) < self.most:
            return True
        longest = next(iter(self._waiting.values()), None)
        self.warn(
            "%d connections are open, as many as may be; %s",
            self.most,
            "new ones are refused" if longest is None else "those that have waited longest for a request are closed",
        )
        if longest is None:
            return False
        self._close(longest)
        return True

    def sweep(self) -> None:
        """Close those that are late. Called about once a second."""
        now = time.monotonic()
        for accepted in list(self.open.values()):
            late = now - accepted.began > self.settings.timeout_headers  # where TLS is not agreed on yet
            if accepted.protocol is not None:
                late = accepted.protocol.is_late(now)
            if late:
                self._close(accepted, answer=True)

    def close_incomplete(self) -> None:
        """Close those whose request is not whole: the server stops, and nothing would come of it."""
        for accepted in list(self._waiting.values()):
            self._close(accepted)

    def warn(self, message: str, *values: object) -> None:
        """Into the log, the same message at most every QUIET_SECONDS."""
        now = time.monotonic()
        if now >= self._quiet_until.get(message, 0.0):
            self._quiet_until[message] = now + QUIET_SECONDS
            logger.warning(message, *values)

    def _close(self, accepted: Accepted, answer: bool = False) -> None:
        self.forget(accepted)
        if accepted.protocol is not None:
            accepted.protocol.give_up(answer)
        else:
            with suppress(OSError):
                accepted.shutdown(socket.SHUT_RDWR)  # its transport reads the end, and closes it


class Connection(H11Protocol):
    """uvicorn's, that is late at some time, and answers a client that has closed its own half.

    EOF from a client that has sent its whole request means that it has gone, or that it still reads. TCP tells these
    apart only when something is sent: an interim response (100) or a comment between two events, which clients must
    skip, make the system of a client that has gone answer with a reset. Then the request is aborted."""

    _told_late = False  # it sent no HTTP, and is told so in a moment
    _completing = False  # an answer is whole, and uvicorn looks for the next request

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._accepted: Accepted | None = None
        self._since: float | None = None  # the request that is awaited, since then
        self._write_since: float | None = None  # the client reads nothing, since then
        self._unparsed = b""  # has come, and is parsed in later turns of the loop; nothing is read meanwhile

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        number = transport.get_extra_info("socket").fileno()
        self._accepted = self._connections.open.get(number)
        self._since = time.monotonic()
        self._read_at_once(HEAD_READ)
        if self._accepted is not None:
            self._accepted.protocol = self
        else:  # it was closed to make room, before this loop came to it
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed = b""
        super().connection_lost(exc)
        if self._accepted is not None:
            self._connections.forget(self._accepted)
            self._accepted.protocol = None

    def data_received(self, data: bytes) -> None:
        begun = bool(self._unparsed)
        self._unparsed += data
        if begun:
            self.transport.pause_reading()
        else:
            self._parse()

    def _parse(self) -> None:
        """A piece of what has come; the rest when others had their turn."""
        if not self._unparsed or self.transport.is_closing():
            return
        in_chunks = any(name == b"transfer-encoding" for name, _ in self.headers or ())
        size = BODY_PIECE if self.conn.their_state is h11.SEND_BODY and not in_chunks else PIECE
        piece, self._unparsed = self._unparsed[:size], self._unparsed[size:]
        if self._since is None:
            self._since = time.monotonic()
        awaited = self.conn.their_state
        super().data_received(piece)
        if awaited is h11.IDLE and self.conn.their_state is h11.SEND_BODY:
            self.flow.pause_reading()  # until the application asks for the body
            self._read_at_once(BODY_PIECE)
        self._note_state()
        if self._told_late:
            return
        if self._unparsed:
            self.transport.pause_reading()
            self.loop.call_soon(self._parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _read_at_once(self, size: int) -> None:
        if hasattr(self.transport, "max_size"):  # a transport of TLS has a buffer of its own
            self.transport.max_size = size

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. Told, and closed, no faster than refused requests are."""
        address = self.client[0] if self.client else ""
        wait = self._connections.pace.delay(address, time.monotonic())
        if not wait:
            super().send_400_response(msg)
            return
        self._unparsed, self._told_late = b"", True
        self.transport.pause_reading()
        self.loop.call_later(wait, self._send_late_400, msg)

    def _send_late_400(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def handle_events(self) -> None:
        """A request that came before the one in front of it was answered waits a moment: browsers and clients wait for
        answers, and one connection would keep the loop busy."""
        if self._completing and self.conn.trailing_data[0]:
            self.flow.pause_reading()  # so that no end is read in front of it
            self.loop.call_later(PIPELINED_SECONDS, self._handle_late)
        else:
            super().handle_events()

    def _handle_late(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()
            super().handle_events()
            self._note_state()

    def on_response_complete(self) -> None:
        if self.conn.their_state is not h11.SEND_BODY:  # else it was answered before its body had come
            self._since = None
        self._read_at_once(HEAD_READ)
        self._completing = True
        try:
            super().on_response_complete()
        finally:
            self._completing = False
        if self._since is None and self.conn.trailing_data[0]:  # the beginning of the next request came already
            self._since = time.monotonic()
        self._note_state()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """-> True: keep the connection, to answer on it. TLS has no halves, and HTTP/1.0 no interim responses."""
        while self._unparsed and not self.transport.is_closing():
            self._parse()
        if self._told_late:
            return True
        answering = self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]  # before the first
        if not answering or self._awaits() or self.scheme == "https" or self.scope["http_version"] == "1.0":
            return None
        self.cycle.keep_alive = False
        if not self.cycle.response_started:
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        elif self.scope["state"].get("events"):
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")
        self._look_for_reset(0.005)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_since = time.monotonic()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_since = None

    def is_late(self, now: float) -> bool:
        """The head or the body of a request is overdue, or the client does not read. (uvicorn ends idle ones.)"""
        if self._write_since is not None and now - self._write_since > WRITE_SECONDS:
            return True
        if self._since is None:
            return False
        settings, state = self._connections.settings, self.conn.their_state
        allowed = {h11.IDLE: settings.timeout_headers, h11.SEND_BODY: settings.timeout_body}.get(state)
        return allowed is not None and now - self._since > allowed

    def give_up(self, answer: bool) -> None:
        """Close. answer: tell the client that it was late, if anything came from it and nothing was answered."""
        begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        if answer and begun and (self.cycle is None or not self.cycle.response_started):  # type: ignore[redundant-expr]
            self.transport.write(plain_answer(408, "this request did not come in time; send it faster"))
            self.transport.close()
        else:
            self.transport.abort()

    def _awaits(self) -> bool:
        """Nothing would be lost with it but a refusal."""
        return self._told_late or self.conn.their_state in LATE

    def _note_state(self) -> None:
        if not self._awaits():
            self._since = None
        if self._accepted is not None:
            self._connections.awaits_request(self._accepted, self._awaits())

    def _look_for_reset(self, delay: float) -> None:
        """Watch a client that has closed its half: abort once its system has said that it has closed both."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(delay, self._look_for_reset, min(2 * delay, 1.0))


def plain_answer(status: int, message: str, retry: int | None = None) -> bytes:
    """A whole HTTP/1.1 answer in OpenAI's shape, for a client that is not let in."""
    body = json.dumps(error_body(status, message, None, None))
    again = "" if retry is None else f"Retry-After: {retry}\r\n"
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n{again}Connection: close\r\n\r\n{body}".encode()
