"""Limits how fast each client (API key or address) gets refusals and has its bodies read; excess waits on its
connection.

Refusals and bodies take Python's lock from the engine's thread. So each client has a token bucket for refusals and one
for body bytes; if a bucket is empty, they wait. Nothing is dropped.

    due[client]    when the bucket is full again   | `burst` units before now ......... now | debt ...
"""

import asyncio
import math
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PER_SECOND = 10
BURST = 64
"""Burst of refusals in units: a refusal takes one unit, and one more for every UNIT_BYTES of its body."""
UNIT_BYTES = 1 << 16
BODY_BYTES_PER_SECOND = 8 << 20
"""Body bytes read per client and second: more than an engine can prefill."""
BODY_BURST_BYTES = 8 << 20
"""Burst of body bytes per client: two of the largest bodies."""
MAX_SECONDS = 2.0
"""Longest wait in seconds of an answer or a piece of a body."""
MIN_SECONDS = 1e-3
"""Shorter waits are not worth a timer."""
MAX_WAITING = 64
"""Most answers that wait at a time; further ones are sent at once, so that clients cannot fill the server with waiting
connections."""
MAX_REMEMBERED = 10_000
OVER_LIMIT = "over_limit"
"""Key in a request's state: it is refused because its client exceeds its own limits, and its answer waits. Other 429s
are answered at once, so that a proxy can try another server."""


class ClientPace:
    """Token buckets of all clients: `burst` units at once, refilled with `per_second`. Above MAX_REMEMBERED clients,
    those with full buckets are forgotten."""

    def __init__(self, per_second: float = PER_SECOND, burst: float = BURST) -> None:
        self._per_second = per_second
        self._full = burst / per_second  # seconds until an empty bucket is full
        self._due: dict[str, float] = {}

    def delay(self, client: str, now: float, units: float = 1) -> float:
        """Take `units`. Returns the seconds to wait for them."""
        due = self._due_after(client, now, min(units / self._per_second, self._full))
        wait = min(due - now, MAX_SECONDS) if due - now > MIN_SECONDS else 0.0
        self._set_due(client, now, now + wait if wait else due)  # a client's debt is limited to its longest wait
        return wait

    def take(self, client: str, now: float) -> float:
        """Take one unit if there is one. Returns the seconds until there is one; 0: it was taken."""
        due = self._due_after(client, now, 1 / self._per_second)
        if due - now > MIN_SECONDS:
            return due - now
        self._set_due(client, now, due)
        return 0.0

    def _due_after(self, client: str, now: float, units_seconds: float) -> float:
        return max(self._due.get(client, -math.inf), now - self._full) + units_seconds

    def _set_due(self, client: str, now: float, due: float) -> None:
        self._due[client] = due
        if len(self._due) > MAX_REMEMBERED:
            self._due = {name: when for name, when in self._due.items() if when > now - self._full}


class Paced:
    """Middleware that delays refusals (400 to 499) and pieces of bodies by their client's buckets."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.refusals = ClientPace()
        self.bodies = ClientPace(BODY_BYTES_PER_SECOND, BODY_BURST_BYTES)
        self.waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        size = 0

        def client() -> str:
            """The client; known after the API key was checked."""
            name: str = scope.get("state", {}).get("client") or (scope.get("client") or ("",))[0]
            return name

        async def in_pieces() -> Message:
            # the connection reads no further before the next call
            nonlocal size
            message = await receive()
            if piece := len(message.get("body", b"")):
                size += piece
                if wait := self.bodies.delay(client(), time.monotonic(), piece):
                    await asyncio.sleep(wait)
            return message

        async def in_turn(message: Message) -> None:
            if message["type"] == "http.response.start" and is_paced(message["status"], scope):
                wait = self.refusals.delay(client(), time.monotonic(), 1 + size // UNIT_BYTES)
                if wait and self.waiting < MAX_WAITING:
                    self.waiting += 1
                    try:
                        await asyncio.sleep(wait)
                    finally:
                        self.waiting -= 1
            await send(message)

        await self.app(scope, in_pieces, in_turn)


def is_paced(status: int, scope: Scope) -> bool:
    """Is this status paced: a client's mistake or its own limit? Not 408, which closes the connection."""
    if status == 429:
        return OVER_LIMIT in scope.get("state", {})
    return 400 <= status < 499 and status != 408
