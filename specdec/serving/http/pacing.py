"""How fast one client, an API key or an address, is answered and read: the rest waits, each on its own connection.

Refusals and bodies take Python's lock from the thread that steps the engine. So each client has a pail of refusals that
are answered at once and one of bytes that are read at once; when it is empty they wait. Nothing is dropped.

    due[client]    when the pail is full again     | `burst` units before now ......... now | what is owed ...
"""

import asyncio
import math
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PER_SECOND = 10
BURST = 64
"""Units of refusals at once: a refusal takes one for itself, and one for every UNIT_BYTES of its body."""
UNIT_BYTES = 1 << 16
BODY_BYTES_PER_SECOND = 8 << 20
"""Bytes of one client's bodies that are read a second: more than an engine reads of prompts."""
BODY_BURST_BYTES = 8 << 20
"""Bytes of one client's bodies that are read at once: two of the largest."""
MAX_SECONDS = 2.0
"""No answer, and no piece of a body, waits longer."""
MIN_SECONDS = 1e-3
"""Less is not worth a timer."""
MAX_WAITING = 64
"""Answers that wait at a time, or clients could fill the server with connections that wait; more are given at once."""
MAX_REMEMBERED = 10_000
OVER_LIMIT = "over_limit"
"""In a request's state: it is refused for a limit of its client's own, who was told when to come again, and does not
wait. Other 429s are answered at once, so that a proxy can try another server."""


class ClientPace:
    """What each client got lately, in units of which `burst` are free at once and `per_second` after that. Of more than
    MAX_REMEMBERED clients those are forgotten that have used nothing lately."""

    def __init__(self, per_second: float = PER_SECOND, burst: float = BURST) -> None:
        self._per_second = per_second
        self._full = burst / per_second  # seconds in which an empty pail fills
        self._due: dict[str, float] = {}

    def delay(self, client: str, now: float, units: float = 1) -> float:
        """Seconds that this many more units have to wait."""
        due = self._due_after(client, now, min(units / self._per_second, self._full))
        wait = min(due - now, MAX_SECONDS) if due - now > MIN_SECONDS else 0.0
        self._set_due(client, now, now + wait if wait else due)  # a client owes no more than the time it waits
        return wait

    def take(self, client: str, now: float) -> float:
        """One unit, if there is one left. -> seconds until there is; 0: it was taken"""
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
    """Middleware in which each refusal (400 to 499) and each piece of a body waits for its turn."""

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
            """Known once the API key was looked at."""
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
    """Is it a client's mistake, or its own limit? Not 408: its connection is closed."""
    if status == 429:
        return OVER_LIMIT in scope.get("state", {})
    return 400 <= status < 499 and status != 408
