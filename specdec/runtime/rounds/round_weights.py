"""The weights of target and drafter, looked up once a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specdec.layers.fuse import watched_weights


class RoundWeights:
    """Numbers that change with the weights: see `Weights`."""

    def __init__(self, target: Any, drafter: Any) -> None:
        self._weights = watched_weights(target, drafter)
        self._in_step = False
        # in the current step, once they were looked up
        self._generation: int | None = None
        self._version: tuple[object, ...] | None = None

    def generation(self) -> int:
        """Changes whenever weights were re-pointed."""
        if self._generation is not None:
            return self._generation
        now = sum(weights.generation() for weights in self._weights)
        self._generation = now if self._in_step else None
        return now

    def version(self) -> tuple[object, ...]:
        """Changes whenever weights were re-pointed or updated in place."""
        if self._version is not None:
            return self._version
        found = self.generation(), *(weights.updates() for weights in self._weights)
        self._version = found if self._in_step else None
        return found

    @contextmanager
    def cached_lookups(self) -> Iterator[None]:
        """Look the weights up once within the block: it costs the host 0.3 us a tensor."""
        self._generation, self._version, self._in_step = None, None, True
        try:
            yield
        finally:
            self._generation, self._version, self._in_step = None, None, False
