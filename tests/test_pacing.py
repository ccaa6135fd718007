"""Refusals and bodies are paced by client."""

import asyncio
from types import SimpleNamespace

import pytest

from specdec.serving.http import pacing
from specdec.serving.http.client_limits import ClientLimits
from specdec.serving.http.pacing import (
    BODY_BURST_BYTES,
    BODY_BYTES_PER_SECOND,
    BURST,
    MAX_SECONDS,
    PER_SECOND,
    UNIT_BYTES,
    ClientPace,
    Paced,
    is_paced,
)


def test_a_pail_of_refusals_is_answered_at_once_and_then_so_many_a_second() -> None:
    pace = ClientPace()
    assert [pace.delay("a", 100.0) for _ in range(BURST)] == [0.0] * BURST
    assert [pace.delay("a", 100.0) for _ in range(3)] == pytest.approx([i / PER_SECOND for i in (1, 2, 3)])
    assert pace.delay("b", 100.0) == 0.0  # another client has a pail of its own
    assert pace.delay("a", 100.0 + 3 / PER_SECOND) == pytest.approx(1 / PER_SECOND)
    assert [pace.delay("a", 200.0) for _ in range(BURST + 1)][-2:] == pytest.approx([0.0, 1 / PER_SECOND])


def test_a_refused_body_counts_by_its_bytes_and_none_waits_for_long() -> None:
    pace, large = ClientPace(), BURST * UNIT_BYTES
    assert pace.delay("a", 100.0, 1 + large // UNIT_BYTES) == 0.0  # a mistake in a large body is told at once
    assert pace.delay("a", 100.0, 1 + large // UNIT_BYTES) == MAX_SECONDS
    assert pace.delay("a", 100.0, 1 + large // UNIT_BYTES) == MAX_SECONDS  # and nobody owes more than that
    assert pace.delay("a", 100.0 + MAX_SECONDS) == pytest.approx(1 / PER_SECOND)


def test_clients_of_long_ago_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(pacing, "MAX_REMEMBERED", 10)
    pace = ClientPace()
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


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """Seconds of each wait, which takes no time."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(pacing, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(pacing, "time", SimpleNamespace(monotonic=lambda: 50.0))
    return found


def test_bodies_of_one_client_are_read_no_faster_than_so_many_bytes_a_second(slept) -> None:
    """700 clients a second that each sent half a body kept the event loop from the streams of others."""
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


def test_refusals_wait_and_other_answers_do_not(slept) -> None:
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
