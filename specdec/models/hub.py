"""Checks early that the hub can be reached for a checkpoint that is not cached: its library tries for 30 seconds."""

import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants
from transformers.utils.hub import cached_file

from specdec.errors import CheckpointError

PATIENCE = 3.0
"""Seconds to wait for a first connection."""


def require_hub(name: str, options: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a checkpoint is not in the cache and the hub, or the proxy for it, cannot be reached.

    options: loading arguments of transformers. Offline mode skips the check.
    """
    if options.get("local_files_only") or constants.HF_HUB_OFFLINE or _is_cached(name, options):
        return
    address = urlsplit(os.environ.get("HF_ENDPOINT", constants.ENDPOINT))
    proxies = options.get("proxies") or ({} if proxy_bypass(address.hostname or "") else getproxies())
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy:
        address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=PATIENCE).close()
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint {name!r} here, and {address.hostname} cannot be reached to look for it there "
            f"({error.strerror or error}); give a folder or a name that is in the cache, or connect to the network"
        ) from error


def _is_cached(name: str, options: Mapping[str, Any]) -> bool:
    try:
        return cached_file(name, "config.json", **{**options, "local_files_only": True}) is not None
    except (OSError, ValueError):
        return False
