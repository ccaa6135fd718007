"""Time limit for the bodies of requests: a late body is refused with 408, or with 503 when the server stops."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specdec.serving.http.faults import ApiError

CLOSE = {"Connection": "close"}  # the rest of the body is not read


class BodyTime:
    """The bodies that one server awaits. It belongs to the server's event loop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stopping = False
        self._awaited: set[asyncio.Timeout] = set()

    def stop(self, seconds: float) -> None:
        """From now on, wait at most `seconds` for any body."""
        self._stopping = True
        self._seconds = min(self._seconds, seconds)
        latest = asyncio.get_running_loop().time() + seconds
        for timeout in self._awaited:
            timeout.reschedule(min(latest, timeout.when() or latest))

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Within the block, a body is read. Raises ApiError if it is late."""
        try:
            async with asyncio.timeout(self._seconds) as timeout:
                self._awaited.add(timeout)
                try:
                    yield
                finally:
                    self._awaited.discard(timeout)
        except TimeoutError:
            if self._stopping:
                raise ApiError(503, "the server is stopping; ask another one", code="stopping", headers=CLOSE) from None
            message = f"the body did not arrive within {self._seconds:g} s; send it faster"
            raise ApiError(408, message, code="timeout", headers=CLOSE) from None
