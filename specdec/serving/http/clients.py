"""A client: its API key, its requests per minute and at a time, its share of cached prompts, and its priority.

A client is an API key, or an address if the server has no keys. Requests are counted before their bodies are read; a
refusal is 429 with Retry-After. Only POST requests that need the API key count. Invariant: requests with different API
keys never have the same cache salt, unless the server was told that its clients share cached prompts.
"""

import hashlib
import hmac
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.errors import counted
from specdec.serving.fair_pool import CLIENT
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


class ClientLimits:
    """Limits per client, 0: none. per_minute: requests, which may all arrive at once. at_a_time: open requests.

    A token bucket: a client has the seconds of the last minute that it has not spent, and a request costs 60 /
    per_minute of them.
    """

    def __init__(self, *, per_minute: int = 0, at_a_time: int = 0) -> None:
        self.at_a_time, self.per_minute = at_a_time, per_minute
        self.open: Counter[str] = Counter()  # requests of each client that are being answered
        self._spent_until: dict[str, float] = {}  # by client: the time up to which its seconds are spent
        self._refused: Counter[str] = Counter()  # refusals since the last log line
        self._quiet_until = 0.0

    def refusal(self, client: str, now: float) -> ApiError | None:
        """The refusal of this client's request; None: it is allowed, and counted for its minute."""
        if self.at_a_time and self.open[client] >= self.at_a_time:
            wait = 1.0
            said = f"you have {counted(self.at_a_time, 'open request')}, the most allowed; wait for one to end"
        elif self.per_minute and (wait := self.take(client, now)):
            said = f"you have sent {counted(self.per_minute, 'request')} within a minute, the most allowed"
        else:
            return None
        self._refused[client] += 1
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            for name, count in self._refused.most_common(8):
                refused = counted(count, "request")
                logger.warning("refused (429) %s of %s: it exceeds its own limits", refused, name or "?")
            self._refused.clear()
        return ApiError(429, said, code="rate_limit_exceeded", headers={"Retry-After": str(max(1, math.ceil(wait)))})

    def take(self, client: str, now: float) -> float:
        """Spend one request's seconds if the client has them. Returns 0, or the seconds until it will have them."""
        until = max(self._spent_until.get(client, -math.inf), now - 60) + 60 / self.per_minute
        if until - now > 1e-3:  # less is a rounding error
            return until - now
        self._spent_until[client] = until
        if len(self._spent_until) > MAX_REMEMBERED:
            self._spent_until = {name: spent for name, spent in self._spent_until.items() if spent > now - 60}
        return 0.0


class Guard:
    """Middleware: checks the API key and the limits of its client, and sets the client in the scope's state ("client")
    and in CLIENT: the name of the key, or the address if there are no keys."""

    def __init__(self, app: ASGIApp, api_keys: Mapping[str, str], limits: ClientLimits) -> None:
        self.app = app
        self.api_keys = {name: key.encode() for name, key in api_keys.items()}
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client, guarded = (scope.get("client") or ("",))[0], route_path(scope).startswith(GUARDED)
        if self.api_keys and guarded:
            given = bearer_token(Headers(scope=scope)).encode()
            # compare with all keys in constant time, so that time reveals nothing
            matches = [name for name, known in self.api_keys.items() if hmac.compare_digest(given, known)]
            if not matches:
                problem = "the API key is wrong" if given else "no API key was given"
                message = f"{problem}; send 'Authorization: Bearer KEY'"
                refusal = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await refusal.response()(scope, receive, send)
                return
            client = matches[0]
        state = scope.setdefault("state", {})
        state["client"] = client
        CLIENT.set(client)
        if not guarded or scope["method"] != "POST":
            await self.app(scope, receive, send)
        elif over := self.limits.refusal(client, time.monotonic()):
            state[OVER_LIMIT] = True
            await over.response()(scope, receive, send)
        else:
            self.limits.open[client] += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self.limits.open -= Counter((client,))


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
