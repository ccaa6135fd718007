"""How many connections a server has, and for how long it waits for what they send. It knows no connection."""

import os
from dataclasses import dataclass

from specdec.config import require_int
from specdec.errors import ConfigError, shown

RESERVED_FILES = 32
"""File descriptors that are left for everything that is no connection."""
MOST_BY_DEFAULT = 16_384


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """most: open connections, 0: as many as the limit of open files allows. headers, body: seconds within which the
    head of a request, and the whole request, must come. keep_alive: seconds that a connection stays open between two
    requests."""

    most: int = 0
    headers: float = 10.0
    body: float = 120.0
    keep_alive: float = 30.0

    def __post_init__(self) -> None:
        require_int("max_connections", self.most, 0, 1 << 30)
        for name in ("headers", "body", "keep_alive"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"timeout_{name}={shown(value)}: a number of seconds above 0 is required")

    def resolved_most(self) -> int:
        """`most`, or the number that the limit of open files allows. Raises ConfigError where it allows fewer."""
        allowed = allowed_connections()
        if self.most > allowed:
            raise ConfigError(
                f"max_connections={self.most} is more than the {allowed} that the limit of open files allows; raise "
                "that limit (ulimit -n, LimitNOFILE=) or ask for fewer"
            )
        return self.most or min(allowed, MOST_BY_DEFAULT)


def allowed_connections() -> int:
    """How many connections the limit of open files leaves room for, besides the files that are open now."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MOST_BY_DEFAULT
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 30
    try:
        in_use = len(os.listdir("/proc/self/fd"))
    except OSError:
        in_use = 64
    return max(1, soft - in_use - RESERVED_FILES)
