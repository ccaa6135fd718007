"""When requests are sent. Knows no request.

rate          they arrive as a Poisson process, whatever the server does
concurrency   the most of them under way; without a rate the next is sent when one has ended
"""

import random
from dataclasses import dataclass

from specdec.errors import ConfigError

DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When requests are sent. timeout: seconds without a byte after which one is given up."""

    rate: float | None = None
    concurrency: int | None = None
    seed: int = 0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate={self.rate}: a positive number of requests a second is wanted")
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout={self.timeout}: a positive number of seconds is wanted")

    @property
    def at_a_time(self) -> int | None:
        """The most requests under way; None: as many as come."""
        return DEFAULT_CONCURRENCY if self.rate is None and self.concurrency is None else self.concurrency

    def arrivals(self, requests: int) -> list[float]:
        """Seconds from the start at which each request is due."""
        if self.rate is None:
            return [0.0] * requests
        draw, at, due = random.Random(self.seed), 0.0, []
        for _ in range(requests):
            due.append(at)
            at += draw.expovariate(self.rate)
        return due
