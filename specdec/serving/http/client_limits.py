"""How much one client may ask: requests a minute and requests at a time, each off unless it is set.

A client is an API key, or an address where the server has no keys. Requests are counted before their bodies are read;
a refusal is 429 with Retry-After, and costs nothing. Only POST requests behind the API key count.
"""

import logging
import math
import time
from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.serving.http.faults import ApiError
from specdec.serving.http.pacing import OVER_LIMIT, Pace

logger = logging.getLogger("specdec.serving")
GUARDED = ("/v1/", "/tokenize", "/detokenize")
"""Paths behind the API key; health and metrics need no key."""
QUIET_SECONDS = 10.0
"""Between two lines of the log about refusals: one that asks again at once would fill it."""


def route_path(scope: Scope) -> str:
    """The path as routes have it, without the prefix under which a proxy shows this server."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


class ClientLimits:
    """Around the routes, inside the check of the API key, which says whose request it is.

    Of one client, 0: no limit. per_minute: requests, of which all may come at once. at_a_time: open requests.
    """

    def __init__(self, app: ASGIApp, *, per_minute: int = 0, at_a_time: int = 0) -> None:
        self.app = app
        self.at_a_time, self.per_minute = at_a_time, per_minute
        self._open: Counter[str] = Counter()
        self._minutes = Pace(per_minute / 60, per_minute) if per_minute else None
        self._refused: Counter[str] = Counter()  # since the last line of the log
        self._quiet_until = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not route_path(scope).startswith(GUARDED):
            await self.app(scope, receive, send)
            return
        client = scope["state"]["client"]
        refusal = self.refusal(client, time.monotonic())
        if refusal is not None:
            scope["state"][OVER_LIMIT] = True
            self._note_refused(client, time.monotonic())
            await refusal.response()(scope, receive, send)
            return
        self._open[client] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    def _note_refused(self, client: str, now: float) -> None:
        self._refused[client] += 1
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            for name, count in self._refused.most_common(8):
                logger.warning("%d requests of %s were refused (429): it exceeds its own limits", count, name or "?")
            self._refused.clear()

    def refusal(self, client: str, now: float) -> ApiError | None:
        """Why this client may not ask now; None: it may, and one request is taken from its minute."""
        most = self.at_a_time
        if most and self._open[client] >= most:
            return _refused(f"{most} of your requests are open, as many as may be; wait for one to end", 1.0)
        if self._minutes is not None and (wait := self._minutes.take(client, now)):
            return _refused(f"{self.per_minute} requests a minute are allowed, and you have sent them", wait)
        return None


def _refused(message: str, seconds: float) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(max(1, math.ceil(seconds)))})
