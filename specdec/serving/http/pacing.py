"""Refused requests are answered no faster than anybody can mean them.

A refusal costs the server little, but who asks again at once gets hundreds a second, and each takes Python's lock from
the thread that steps the engine: streams of others were five times slower. So each client, an API key or an address,
has a pail of refusals that are answered at once; when it is empty they wait, each on its own connection, so that a
client who waits for answers slows down by itself. Nothing is dropped, and no other answer of the client waits.

    due[client]    when the pail is full again     | BURST units before now ............ now | what is owed ...
"""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PER_SECOND = 10
BURST = 64
"""Units at once; a refusal takes one for itself, and one for every UNIT_BYTES of its body, as reading those took."""
UNIT_BYTES = 1 << 16
MOST_SECONDS = 2.0
"""No answer waits longer."""
LEAST_SECONDS = 1e-3
"""Less is not worth a timer."""
MOST_WAITING = 64
"""Answers that wait at a time; more are given at once, or clients could fill the server with connections that wait."""
MOST_REMEMBERED = 10_000
PROMPT = (408, 429)
"""Refusals that are answered at once: they tell a client, or a proxy in front of it, to wait or to go elsewhere."""


class Pace:
    """What each client was refused lately."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def delay(self, client: str, now: float, num_bytes: int = 0) -> float:
        """Seconds for which one more refusal of a request with so many bytes of body is to wait."""
        units = min(1 + num_bytes // UNIT_BYTES, BURST)
        due = max(self._due.get(client, 0.0), now - BURST / PER_SECOND) + units / PER_SECOND
        wait = min(due - now, MOST_SECONDS) if due - now > LEAST_SECONDS else 0.0
        self._due[client] = now + wait if wait else due  # nobody owes more than what it waits for
        if len(self._due) > MOST_REMEMBERED:
            self._due = {name: when for name, when in self._due.items() if when > now - BURST / PER_SECOND}
        return wait


class Paced:
    """Around what refuses: an answer from 400 to 499 waits for its turn."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.pace = Pace()
        self.waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            return message

        async def in_turn(message: Message) -> None:
            if message["type"] == "http.response.start" and is_paced(message["status"]):
                client = scope.get("state", {}).get("client") or (scope.get("client") or ("",))[0]
                wait = self.pace.delay(client, time.monotonic(), size)
                if wait and self.waiting < MOST_WAITING:
                    self.waiting += 1
                    try:
                        await asyncio.sleep(wait)
                    finally:
                        self.waiting -= 1
            await send(message)

        await self.app(scope, counted, in_turn)


def is_paced(status: int) -> bool:
    return 400 <= status < 499 and status not in PROMPT
