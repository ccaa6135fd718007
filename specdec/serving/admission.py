"""Admission of requests to a served engine: a bounded queue, and a bound on a prompt's text.

    open requests   | running, at most the engine's rows | waiting, at most `max_waiting` |  refused
    per client      | at most `per_client` (0: no limit)                                  |  refused

The queue only counts and knows no engine. Any thread may take or return places. Invariant: at most `max_places` places
are taken, and at most `per_client` by one client.

No token has more characters than the longest token of the vocabulary. A longer text cannot fit the context, so it is
refused before a template or tokenizer spends seconds and gigabytes on it. All text that a template may write counts:
contents, thoughts, calls, tools and template arguments, with names and numbers.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import CapacityError, ConfigError, QueueFullError


class Admission:
    """Places for `rows` requests that run and `max_waiting` that wait. per_client: 0, no limit."""

    def __init__(self, rows: int, max_waiting: int, per_client: int) -> None:
        self.max_places = rows + max_waiting
        self._rows = rows
        self._max_waiting = max_waiting
        self._per_client = per_client
        self._places_of: Counter[str] = Counter()  # places that open requests of each client take
        self._lock = threading.Lock()

    @property
    def num_open(self) -> int:
        return self._places_of.total()

    def take_places(self, count: int, client: str) -> None:
        """Take `count` places. Raises QueueFullError if fewer are free, or if the client would exceed its limit."""
        with self._lock:
            self.require(count, client)
            self._places_of[client] += count

    def give_back(self, count: int, client: str) -> None:
        """Return the places of ended requests."""
        with self._lock:
            self._places_of -= Counter({client: count})  # without clients that have none

    def gained(self, sample: Any, now: float) -> None:
        """Observer method: a request that gained tokens keeps its place."""

    def ended(self, sample: Any, now: float) -> None:
        """Observer method: an ended request returns its place."""
        self.give_back(1, sample.owner.client)

    def require(self, count: int, client: str) -> None:
        """Raise ConfigError if there can never be as many places, QueueFullError if there are fewer now."""
        many = f"{count} samples at once are more than the"
        if self._per_client and count > self._per_client:
            raise ConfigError(f"{many} {self._per_client} that one client may have; ask for fewer")
        if count > self.max_places:
            raise ConfigError(
                f"{many} {self.max_places} that this engine takes in: {self._rows} run at a time and "
                f"{self._max_waiting} wait; ask for fewer, or raise max_batch_size or max_waiting"
            )
        if self._per_client and self._places_of[client] + count > self._per_client:
            more = f"{count} more would make more than the {self._per_client} that one client may have"
            raise QueueFullError(
                f"{self._places_of[client]} of your samples are open, and {more}; try again when some have ended"
            )
        if self.num_open + count > self.max_places:
            raise QueueFullError(
                f"{min(self.num_open, self._rows)} requests run and {max(0, self.num_open - self._rows)} wait, "
                f"and at most {self._max_waiting} may wait; try again later, or raise max_waiting"
            )


class TextBound:
    """The most characters that a prompt of `max_model_len` tokens can have; no limit if the vocabulary is unknown."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        vocabulary: Mapping[str, int] = getattr(tokenizer, "get_vocab", dict)()
        self.max_characters = max_model_len * max(map(len, vocabulary), default=0) or math.inf

    def require(self, prompt: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> None:
        """Raise CapacityError if a text, or messages with template arguments, have more characters than the context can
        hold. A message that is none has no text here; it is refused later."""
        parts: list[Any] = [*(options or {}).values()]
        if isinstance(prompt, str):
            parts.append(prompt)
        elif isinstance(prompt, Sequence):
            messages = [each for each in prompt if isinstance(each, Mapping)]
            parts += [value for message in messages for name, value in message.items() if name != "role"]
        count = characters(parts, self.max_characters)
        if count > self.max_characters:
            raise CapacityError(
                f"this prompt has at least {count} characters, more than the {self.max_characters} that max_model_len="
                f"{self._max_model_len} tokens can hold; shorten it"
            )


def characters(values: Sequence[Any], limit: float) -> int:
    """Lower bound on the characters that these values take: texts, names of members, and one for each other value.
    Stops above `limit`."""
    count, left = 0, list(values)
    while left and count <= limit:
        value = left.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            left += value
        elif value is not None:
            count += 1
    return count
