"""The API key that a request comes with. It knows no client and no setting."""

from collections.abc import Mapping


def bearer_token(headers: Mapping[str, str]) -> str:
    """The key, of headers whose names are in small letters; empty without one."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""
