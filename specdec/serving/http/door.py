"""Whom the listener turns away by the first bytes of a connection, before anything is made for it.

A client that does not read its refusals is not slowed down by their waiting (`pacing`), so the door is shut for a
second to a client for whom as many refusals wait as may. It is told so, with 429. What names no such client is let in,
and so is all that comes on a connection that is open.
"""

from starlette.datastructures import Headers
from starlette.types import Scope

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
