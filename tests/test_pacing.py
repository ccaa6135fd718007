"""Refusals are paced by client, pipelined requests by connection, and clients that are gone cost next to nothing."""

import asyncio
import json
import socket
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import h11
import pytest
from server_process import running_server
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.serving.http import connections, pacing
from specdec.serving.http.client_limits import ClientLimits
from specdec.serving.http.connections import Connections
from specdec.serving.http.listener import Listener, first_bytes
from specdec.serving.http.pacing import (
    BODY_BURST_BYTES,
    BODY_BYTES_PER_SECOND,
    BURST,
    MAX_SECONDS,
    MAX_SHUT_TO,
    PER_SECOND,
    SHUT_SECONDS,
    UNIT_BYTES,
    Door,
    Pace,
    Paced,
    is_paced,
)
from specdec.serving.server_settings import ServeSettings


def test_a_pail_of_refusals_is_answered_at_once_and_then_so_many_a_second() -> None:
    pace = Pace()
    assert [pace.delay("a", 100.0) for _ in range(BURST)] == [0.0] * BURST
    assert [pace.delay("a", 100.0) for _ in range(3)] == pytest.approx([i / PER_SECOND for i in (1, 2, 3)])
    assert pace.delay("b", 100.0) == 0.0  # another client has a pail of its own
    assert pace.delay("a", 100.0 + 3 / PER_SECOND) == pytest.approx(1 / PER_SECOND)
    assert [pace.delay("a", 200.0) for _ in range(BURST + 1)][-2:] == pytest.approx([0.0, 1 / PER_SECOND])


def test_a_refused_body_counts_by_its_bytes_and_none_waits_for_long() -> None:
    pace, large = Pace(), BURST * UNIT_BYTES
    assert pace.delay("a", 100.0, 1 + large // UNIT_BYTES) == 0.0  # a mistake in a large body is told at once
    assert pace.delay("a", 100.0, 1 + large // UNIT_BYTES) == MAX_SECONDS
    assert pace.delay("a", 100.0, 1 + large // UNIT_BYTES) == MAX_SECONDS  # and nobody owes more than that
    assert pace.delay("a", 100.0 + MAX_SECONDS) == pytest.approx(1 / PER_SECOND)


def test_clients_of_long_ago_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(pacing, "MAX_REMEMBERED", 10)
    pace = Pace()
    for number in range(100):
        pace.delay(f"client {number}", 100.0 * number)
    assert len(pace._due) <= 10


def test_only_mistakes_are_paced() -> None:
    """Who is to come later, or to go elsewhere, hears that at once."""
    statuses = (200, 400, 401, 404, 405, 408, 413, 429, 499, 500, 503)
    assert [status for status in statuses if is_paced(status, {})] == [*(400, 401, 404, 405, 413)]


def test_a_client_over_its_own_limits_is_paced_and_noted_once(caplog) -> None:
    """Four clients that asked for 40 streams at once, over and over, got 400 refusals a second, and a line for each."""
    sent = []

    async def send(message):
        sent.append(message)

    async def go(limits: ClientLimits) -> list[dict]:
        scopes = [{"type": "http", "method": "POST", "path": "/v1/x", "state": {"client": "a"}} for _ in range(99)]
        for scope in scopes:
            await limits(scope, None, send)  # type: ignore[arg-type]
        return scopes

    limits = ClientLimits(None, at_a_time=1)  # type: ignore[arg-type]
    limits._open["a"] = 1
    scopes = asyncio.run(go(limits))
    assert [message["status"] for message in sent if "status" in message] == [429] * 99
    assert all(is_paced(429, scope) for scope in scopes) and not is_paced(429, {"state": {}})
    assert [record.getMessage() for record in caplog.records] == [
        "1 requests of a were refused (429): it exceeds its own limits"
    ]


def test_bodies_of_one_client_are_read_no_faster_than_so_many_bytes_a_second(monkeypatch) -> None:
    """700 clients a second that each sent half a body kept the event loop from the streams of others."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(pacing, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(pacing, "time", SimpleNamespace(monotonic=lambda: 50.0))
    paced, piece = Paced(None), b"x" * (1 << 18)  # type: ignore[arg-type]
    free = BODY_BURST_BYTES // len(piece)
    assert answered(paced, 200, free, "a", piece) == free and slept == []
    assert answered(paced, 200, 2, "a", piece) == 2
    assert slept == pytest.approx([len(piece) / BODY_BYTES_PER_SECOND, 2 * len(piece) / BODY_BYTES_PER_SECOND])
    assert answered(paced, 200, 2, "b", piece) == 2 and len(slept) == 2  # another client has a pail of its own


def answered(paced: Paced, status: int, times: int, client: str, body: bytes = b"") -> int:
    """So many requests, one after the other -> how many answers came."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message["status"])

    async def go() -> None:
        paced.app = app
        for _ in range(times):
            await paced({"type": "http", "client": (client, 1), "state": {}}, receive, send)

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": status})

    asyncio.run(go())
    return len(sent)


def test_refusals_wait_and_other_answers_do_not(monkeypatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(pacing, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(pacing, "time", SimpleNamespace(monotonic=lambda: 50.0))
    paced = Paced(None)  # type: ignore[arg-type]
    assert answered(paced, 400, BURST, "a") == BURST and slept == []
    assert answered(paced, 200, 99, "a") == 99 and slept == []
    assert answered(paced, 400, 2, "a") == 2
    assert slept == pytest.approx([1 / PER_SECOND, 2 / PER_SECOND])
    assert answered(paced, 400, 1, "b", b"x" * UNIT_BYTES * BURST) == 1 and len(slept) == 2
    assert answered(paced, 400, 1, "b") == 1 and len(slept) == 3  # the body had emptied its pail
    paced.waiting = pacing.MAX_WAITING
    assert answered(paced, 400, 9, "a") == 9 and len(slept) == 3
    assert paced.waiting == pacing.MAX_WAITING


def test_a_client_that_left_before_it_sent_anything_gets_no_protocol(monkeypatch) -> None:
    """Connections that come and go made a protocol each: 3,900 a second took half of the event loop."""
    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.connections = Connections(ServeSettings(["a"], max_connections=20))
        listener.setblocking(False)
        for _ in range(5):
            socket.create_connection(listener.getsockname()).close()
        with socket.create_connection(listener.getsockname()) as quiet:
            accepted, _ = listener.accept()
            assert accepted.getpeername() == quiet.getsockname()
            assert first_bytes(accepted) == b""
            assert len(listener.connections.open) == 1
            accepted.close()


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nauthorization:  Bearer  sk-a \r\nContent-Length: 9\r\n\r\n"


def scope_of(key: str | None, address: str, known: bool = True) -> dict:
    headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    return {"type": "http", "client": (address, 1), "headers": headers, "state": {"client": "a"} if known else {}}


def test_the_door_is_shut_to_a_key_or_to_an_address_for_a_second() -> None:
    door = Door(by_key=True)
    assert not door.turns_away(HEAD, "1.2.3.4", 100.0)
    door.shut(scope_of("sk-a", "1.2.3.4"), 100.0)
    assert door.turns_away(HEAD, "5.6.7.8", 100.9)
    for other in (HEAD.replace(b"sk-a", b"sk-b"), HEAD.replace(b"POST", b"GET"), HEAD[:60], b""):
        assert not door.turns_away(other, "1.2.3.4", 100.9)
    in_body = HEAD.replace(b"sk-a", b"sk-b") + b"\r\nAuthorization: Bearer sk-a\r\n"
    assert not door.turns_away(in_body, "1.2.3.4", 100.9)
    assert not door.turns_away(HEAD, "1.2.3.4", 100.0 + SHUT_SECONDS)
    by_address = Door(by_key=False)
    by_address.shut(scope_of(None, "1.2.3.4"), 100.0)
    assert by_address.turns_away(HEAD, "1.2.3.4", 100.9) and not by_address.turns_away(HEAD, "5.6.7.8", 100.9)


def test_the_door_is_shut_to_few_clients_at_a_time() -> None:
    door = Door(by_key=False)
    for number in range(5_000):
        door.shut(scope_of(None, f"address {number}"), 100.0 + number / 10_000)
    assert len(door._until) == MAX_SHUT_TO
    door.shut(scope_of(None, "another"), 200.0)
    assert list(door._until) == ["another"]


def test_a_client_for_whom_as_many_refusals_wait_as_may_finds_the_door_shut(monkeypatch) -> None:
    """A client that left without reading its refusals did not wait, and made a protocol and a task of each connection:
    1,200 a second took most of the event loop, and streams of others were three times slower."""
    monkeypatch.setattr(pacing, "time", SimpleNamespace(monotonic=lambda: 50.0))
    door = Door(by_key=True)

    async def refuse(scope, receive, send):
        await send({"type": "http.response.start", "status": 400})

    async def send(message):
        pass

    def refused(times: int, known: bool = True) -> bool:
        async def go() -> None:
            for _ in range(times):
                await paced(scope_of("sk-a", "1.2.3.4", known), None, send)  # type: ignore[arg-type]

        asyncio.run(go())
        return door.turns_away(HEAD, "1.2.3.4", 50.5)

    paced = Paced(refuse, door)
    assert not refused(BURST)
    paced.waiting = pacing.MAX_WAITING
    paced.refusals.delay("1.2.3.4", 50.0, BURST)
    assert not refused(1, known=False)  # its key is wrong
    assert refused(1)


def test_whom_the_door_is_shut_to_is_told_429_and_gets_no_protocol() -> None:
    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.connections = Connections(ServeSettings(["a"], max_connections=20))
        listener.connections.door = Door(by_key=True)
        listener.connections.door.shut(scope_of("sk-a", "1.2.3.4"), time.monotonic() + 60)
        listener.setblocking(False)
        with (
            socket.create_connection(listener.getsockname(), timeout=60) as shut,
            socket.create_connection(listener.getsockname(), timeout=60) as other,
        ):
            shut.sendall(HEAD + b"[1, 2, 3]")
            other.sendall(HEAD.replace(b"sk-a", b"sk-b"))
            accepted, _ = listener.accept()
            assert accepted.getpeername() == other.getsockname()
            assert len(listener.connections.open) == 1
            with pytest.raises(BlockingIOError):
                listener.accept()
            said = b""
            while block := shut.recv(1 << 16):  # to its end: no reset
                said += block
            head, _, body = said.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ") and b"Retry-After: 1\r\n" in head
            assert json.loads(body)["error"]["type"] == "rate_limit_error"
            accepted.close()


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


def asked(server, raw: bytes) -> bytes:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as made:
        made.sendall(raw)
        made.shutdown(socket.SHUT_WR)
        blocks = []
        while block := made.recv(1 << 16):
            blocks.append(block)
    return b"".join(blocks)


def test_pipelined_requests_are_all_answered_in_order_whether_more_is_sent_or_not(server) -> None:
    one = b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n"
    last = b"GET /nowhere HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
    said = asked(server, one * 6 + last)
    assert said.count(b"HTTP/1.1 200 OK") == 6 and said.count(b"HTTP/1.1 404") == 1
    assert said.rindex(b"HTTP/1.1 200 OK") < said.index(b"HTTP/1.1 404")


def test_a_pipelined_request_waits_for_its_moment(monkeypatch) -> None:
    """64 at once on each of four connections kept the loop busy; the second now comes by a timer."""
    later = []
    made = SimpleNamespace(
        _completing=True,
        conn=SimpleNamespace(trailing_data=(b"GET / HTTP/1.1", False)),
        flow=SimpleNamespace(pause_reading=lambda: later.append("paused")),
        loop=SimpleNamespace(call_later=lambda seconds, call: later.append(seconds)),
        _handle_late=None,
    )
    connections.Connection.handle_events(made)  # type: ignore[arg-type]
    assert later == ["paused", connections.PIPELINED_SECONDS]


def test_nothing_of_a_body_is_read_before_it_is_asked_for() -> None:
    """A request that is refused at its head had 256 kB of its body read first, and 4 MB parsed if they had come."""
    calls = []
    made = connections.Connection.__new__(connections.Connection)
    made._since, made._accepted, made._unparsed = 0.0, None, b""
    made.headers, made.conn = [(b"content-length", b"9")], SimpleNamespace(their_state=h11.IDLE)
    made.flow = SimpleNamespace(read_paused=False, pause_reading=lambda: calls.append("paused"))
    made.transport = SimpleNamespace(is_closing=lambda: False, max_size=0, resume_reading=lambda: None)
    made._read_at_once(connections.HEAD_READ)
    assert made.transport.max_size == connections.HEAD_READ < connections.BODY_PIECE

    def head_ends(self, data: bytes) -> None:
        self.conn.their_state = h11.SEND_BODY

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(H11Protocol, "data_received", head_ends)
        made.data_received(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n")
        assert calls == ["paused"] and made.transport.max_size == connections.BODY_PIECE
        made.data_received(b"123")
    assert calls == ["paused"]  # once: the application resumes it


def test_whoever_sends_no_http_is_told_so_sooner_or_later(server) -> None:
    """Beyond the pail the answer waits, though the client has closed its half; whoever sends HTTP is not held up."""
    began = time.monotonic()
    answers = [asked(server, b"GET\r\n\r\n") for _ in range(BURST + 4)]
    assert all(said.startswith(b"HTTP/1.1 400") for said in answers)
    assert time.monotonic() - began >= 2 / PER_SECOND
    models = asked(server, b"GET /v1/models HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
    assert json.loads(models.rpartition(b"\r\n\r\n")[2])["object"] == "list"
