"""Isolation of clients from one another: who shares cached prompts, and whether a request may be served first.

It knows settings and what a client sent, no engine. Invariant: requests with different API keys never have the same
cache salt, unless the server was told that its clients share cached prompts.
"""

import hashlib

from specdec.config import MAX_PRIORITY
from specdec.serving.http.faults import ApiError
from specdec.serving.server_settings import ServeSettings

MIN_BLOCK = 16
"""Tokens: cached prompts are reported in whole blocks, so that a prompt cannot be guessed token by token."""


def salt_for(client: str, cache_salt: str | None, settings: ServeSettings) -> str | None:
    """The engine's salt for a request of this client, by its API key, with the salt that its body has."""
    if settings.share_prefix_cache:
        client = ""
    if not client and cache_salt is None:
        return None
    parts = [client.encode(), b"" if cache_salt is None else b"=" + cache_salt.encode("utf-8", "surrogatepass")]
    return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).hexdigest()


def require_priority(priority: int, settings: ServeSettings) -> int:
    """Raises ApiError for one that is not allowed here, or out of range. 0 is always allowed."""
    if priority and not settings.allow_priority:
        message = f"priority={priority}: this server treats all requests alike; leave it out, or start the server with "
        raise ApiError(400, message + "--allow-priority", param="priority", code="priority_not_allowed")
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        message = f"priority={priority}: an integer from {-MAX_PRIORITY} to {MAX_PRIORITY} is expected"
        raise ApiError(400, message, param="priority", code="invalid_value")
    return priority


def in_blocks(cached_tokens: int, page_size: int) -> int:
    """Cached tokens as clients are told: rounded down to whole blocks."""
    block = max(MIN_BLOCK, page_size)
    return cached_tokens // block * block
