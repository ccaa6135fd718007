"""A client: its API key, its requests per minute and at a time, its share of cached prompts, and its priority.

A client is an API key, or an address if the server has no keys. Requests are counted before their bodies are read; a
refusal is 429 with Retry-After. Only POST requests that need the API key count. Invariant: requests with different API
keys never have the same cache salt, unless the server was told that its clients share cached prompts.
"""

import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.serving.http.faults import ApiError
from specdec.serving.server_settings import ServeSettings

logger = logging.getLogger("specdec.serving")
GUARDED = ("/v1/", "/tokenize", "/detokenize")
"""Prefixes of paths that need the API key; health and metrics do not."""
OVER_LIMIT = "over_limit"
"""Key in a request's state: it is refused because its client exceeds its own limits."""
QUIET_SECONDS = 10.0
"""Seconds between two log lines about refusals: a client that retries at once would fill the log."""
MAX_REMEMBERED = 10_000
"""Above this number of clients, those that sent nothing in the last minute are forgotten."""


def bearer_token(headers: Mapping[str, str]) -> str:
    """The key in these headers (with lower-case names); empty if there is none."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def route_path(scope: Scope) -> str:
    """The path without the prefix that a proxy adds for this server."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


class RequestRate:
    """Requests per minute of each client, which may all arrive at once.

    A request costs 60 / per_minute seconds. A client spends the seconds of the last minute, the oldest first.
    """

    def __init__(self, per_minute: int) -> None:
        self._cost = 60 / per_minute
        self._spent_until: dict[str, float] = {}  # by client

    def take(self, client: str, now: float) -> float:
        """Take one request if there is one. Returns the seconds until there is one; 0: it was taken."""
        until = max(self._spent_until.get(client, -math.inf), now - 60) + self._cost
        if until - now > 1e-3:  # less is a rounding error
            return until - now
        self._spent_until[client] = until
        if len(self._spent_until) > MAX_REMEMBERED:
            self._spent_until = {name: spent for name, spent in self._spent_until.items() if spent > now - 60}
        return 0.0


class ClientLimits:
    """Middleware around the routes, inside the check of the API key, which identifies the client.

    Limits per client, 0: none. per_minute: requests, which may all arrive at once. at_a_time: open requests.
    """

    def __init__(self, app: ASGIApp, *, per_minute: int = 0, at_a_time: int = 0) -> None:
        self.app = app
        self.at_a_time, self.per_minute = at_a_time, per_minute
        self._open: Counter[str] = Counter()
        self._rate = RequestRate(per_minute) if per_minute else None
        self._refused: Counter[str] = Counter()  # refusals since the last log line
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
        """The refusal of this client's request; None: it is allowed and counted."""
        most = self.at_a_time
        if most and self._open[client] >= most:
            return _refused(f"{most} of your requests are open, as many as may be; wait for one to end", 1.0)
        if self._rate is not None and (wait := self._rate.take(client, now)):
            return _refused(f"{self.per_minute} requests a minute are allowed, and you have sent them", wait)
        return None


def _refused(message: str, seconds: float) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(max(1, math.ceil(seconds)))})


MIN_BLOCK = 16
"""Block size in tokens: cached prompts are reported in whole blocks, so that a prompt cannot be guessed token by
token."""


def salt_for(client: str, cache_salt: str | None, settings: ServeSettings) -> str | None:
    """The engine's salt for a request, made of the client's API key and the body's salt."""
    if settings.share_prefix_cache:
        client = ""
    if not client and cache_salt is None:
        return None
    parts = [client.encode(), b"" if cache_salt is None else b"=" + cache_salt.encode("utf-8", "surrogatepass")]
    return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).hexdigest()


def require_priority(priority: int, settings: ServeSettings) -> None:
    """Raise ApiError if this priority is not allowed; 0 always is. The engine checks the range."""
    if priority and not settings.allow_priority:
        message = f"priority={priority}: this server treats all requests alike; leave it out, or start the server with "
        raise ApiError(400, message + "--allow-priority", param="priority", code="priority_not_allowed")


def in_whole_blocks(cached_tokens: int, page_size: int) -> int:
    """Cached tokens to report, rounded down to whole blocks."""
    block = max(MIN_BLOCK, page_size)
    return cached_tokens // block * block
