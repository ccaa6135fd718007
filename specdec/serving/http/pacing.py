"""How fast one client, an API key or an address, is answered and read: the rest waits, each on its own connection.

Refusals and bodies take Python's lock from the thread that steps the engine. So each client has a pail of refusals that
are answered at once and one of bytes that are read at once; when it is empty they wait. Nothing is dropped.

    due[client]    when the pail is full again     | `burst` units before now ......... now | what is owed ...

A client that does not read its refusals is not slowed down by their waiting: the door is shut for a second to one for
whom as many refusals wait as may, and the listener turns it away by the first bytes of a connection, with 429.
"""

import asyncio
import math
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serving.http.api_keys import bearer_token

SHUT_SECONDS = 1.0
LOOKED_AT = 1 << 11
"""Bytes of a head in which the API key is looked for."""
MAX_SHUT_TO = 1_000


class Door:
    """Whom it is shut to, and until when."""

    def __init__(self, *, by_key: bool) -> None:
        self._by_key = by_key  # requests need an API key
        self._until: dict[str, float] = {}  # by key or address

    def shut(self, scope: Scope, now: float) -> None:
        """To the client of this request, which is known to the application."""
        key = bearer_token(Headers(scope=scope))
        self._until = {name: until for name, until in self._until.items() if until > now}
        if len(self._until) < MAX_SHUT_TO:
            self._until[key if self._by_key else (scope.get("client") or ("",))[0]] = now + SHUT_SECONDS

    def turns_away(self, head: bytes, address: str, now: float) -> bool:
        """Does a request that begins like this come from such a client?"""
        if not self._until or not head.startswith(b"POST "):
            return False
        name = _key_in(head) if self._by_key else address
        return self._until.get(name, 0.0) > now


def _key_in(head: bytes) -> str:
    """The API key of a head; empty where none is seen."""
    lines = head.partition(b"\r\n\r\n")[0].split(b"\r\n")
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"authorization":
            return bearer_token({"authorization": value.strip().decode("latin-1")})
    return ""


PER_SECOND = 10
BURST = 64
"""Units of refusals at once: a refusal takes one for itself, and one for every UNIT_BYTES of its body."""
UNIT_BYTES = 1 << 16
BODY_BYTES_PER_SECOND, BODY_BURST_BYTES = 8 << 20, 8 << 20
"""Bytes that are read of the bodies of one client: two of the largest at once, and then more a second than an engine
reads of prompts."""
MAX_SECONDS = 2.0
"""No answer, and no piece of a body, waits longer."""
MIN_SECONDS = 1e-3
"""Less is not worth a timer."""
MAX_WAITING = 64
"""Answers that wait at a time, or clients could fill the server with connections that wait; more are given at once, and
the door is shut to a client that gets one of these."""
MAX_REMEMBERED = 10_000
OVER_LIMIT = "over_limit"
"""In a request's state: it is refused for a limit of its client's own, who was told when to come again, and does not
wait. Other 429s are answered at once, so that a proxy can try another server."""


class Pace:
    """What each client got lately, in units of which `burst` are free at once and `per_second` after that. Of more than
    MAX_REMEMBERED clients those are forgotten that have used nothing lately."""

    def __init__(self, per_second: float = PER_SECOND, burst: float = BURST) -> None:
        self._per_second = per_second
        self._full = burst / per_second  # seconds in which an empty pail fills
        self._due: dict[str, float] = {}

    def delay(self, client: str, now: float, units: float = 1) -> float:
        """Seconds for which so many more are to wait."""
        due = self._due_after(client, now, min(units / self._per_second, self._full))
        wait = min(due - now, MAX_SECONDS) if due - now > MIN_SECONDS else 0.0
        self._note(client, now, now + wait if wait else due)  # nobody owes more than what it waits for
        return wait

    def take(self, client: str, now: float) -> float:
        """One unit, if there is one left. -> seconds until there is; 0: it was taken"""
        due = self._due_after(client, now, 1 / self._per_second)
        if due - now > MIN_SECONDS:
            return due - now
        self._note(client, now, due)
        return 0.0

    def _due_after(self, client: str, now: float, units_seconds: float) -> float:
        return max(self._due.get(client, -math.inf), now - self._full) + units_seconds

    def _note(self, client: str, now: float, due: float) -> None:
        self._due[client] = due
        if len(self._due) > MAX_REMEMBERED:
            self._due = {name: when for name, when in self._due.items() if when > now - self._full}


class Paced:
    """Around what refuses: an answer from 400 to 499, and each piece of a body, waits for its turn."""

    def __init__(self, app: ASGIApp, door: Door | None = None) -> None:
        self.app = app
        self.door = door
        self.refusals = Pace()
        self.bodies = Pace(BODY_BYTES_PER_SECOND, BODY_BURST_BYTES)
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
                elif wait and self.door is not None and scope["state"].get("client"):
                    self.door.shut(scope, time.monotonic())
            await send(message)

        await self.app(scope, in_pieces, in_turn)


def is_paced(status: int, scope: Scope) -> bool:
    """Is it a client's mistake, or its own limit? Not 408: its connection is closed."""
    if status == 429:
        return OVER_LIMIT in scope.get("state", {})
    return 400 <= status < 499 and status != 408
