"""Identity of the weights of target and drafter, looked up once per step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from specdec.modules.weight_watch import watched_weights


class RoundWeights:
    """Values that change when the weights change: see `Weights`."""

    def __init__(self, target: Any, drafter: Any) -> None:
        self._weights = watched_weights(target, drafter)
        self._found: dict[str, Any] | None = None  # what was looked up in the current step; None: between steps

    def generation(self) -> int:
        """A number that changes when weights are re-pointed to other storage."""
        number: int = self._once("generation", lambda: sum(weights.generation() for weights in self._weights))
        return number

    def version(self) -> tuple[object, ...]:
        """A value that changes when weights are re-pointed or updated in place."""
        found: tuple[object, ...] = self._once("version", self._version)
        return found

    def _version(self) -> tuple[object, ...]:
        return self.generation(), *(weights.updates() for weights in self._weights)

    def _once(self, name: str, look_up: Callable[[], Any]) -> Any:
        if self._found is None:
            return look_up()
        if name not in self._found:
            self._found[name] = look_up()
        return self._found[name]

    @contextmanager
    def cached_lookups(self) -> Iterator[None]:
        """Within the block, look the weights up only once: a look-up costs the host 0.3 us per tensor."""
        self._found = {}
        try:
            yield
        finally:
            self._found = None
