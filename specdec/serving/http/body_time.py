"""Time limit for the body of a request. A late body is refused with 408, or with 503 when the server stops.

A proxy limits the time of heads and the number of connections (docs/deployment.md).
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serving.http.faults import ApiError

CLOSE = {"Connection": "close"}  # the rest of the body is not read


class BodyTimes:
    """The bodies that one server awaits. It belongs to the server's event loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.stopping = False
        self._awaited: set[asyncio.Timeout] = set()

    def stop(self, seconds: float) -> None:
        """From now on, wait at most `seconds` for any body."""
        self.stopping = True
        self.seconds = min(self.seconds, seconds)
        latest = asyncio.get_running_loop().time() + seconds
        for timeout in self._awaited:
            timeout.reschedule(min(latest, timeout.when() or latest))

    async def receive(self, receive: Receive, began: float) -> Message:
        """The next message of a request whose body is awaited since `began`. Raises ApiError if it is late."""
        try:
            async with asyncio.timeout_at(began + self.seconds) as timeout:
                self._awaited.add(timeout)
                try:
                    return await receive()
                finally:
                    self._awaited.discard(timeout)
        except TimeoutError:
            if self.stopping:
                raise ApiError(503, "the server is stopping; ask another one", code="stopping", headers=CLOSE) from None
            message = f"the body did not arrive within {self.seconds:g} s; send it faster"
            raise ApiError(408, message, code="timeout", headers=CLOSE) from None


class BodyTime:
    """Middleware around the routes, inside the middleware that checks keys and sizes."""

    def __init__(self, app: ASGIApp, times: BodyTimes) -> None:
        self.app = app
        self.times = times

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, whole = asyncio.get_running_loop().time(), False

        async def in_time() -> Message:
            nonlocal whole
            message = await (receive() if whole else self.times.receive(receive, began))
            whole = whole or not message.get("more_body", False)
            return message

        await self.app(scope, in_time, send)
