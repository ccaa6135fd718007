"""Upper bound on a prompt's text: no token has more characters than the longest token of the vocabulary.

A longer text cannot fit the context, so it is refused before a template or tokenizer spends seconds and gigabytes on
it. All text that a template may write counts: contents, thoughts, calls, tools and template arguments, with names and
numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import CapacityError

NOT_COUNTED = ("role",)
"""Fields of a message whose value is one of a few words."""


class TextBound:
    """The bound of one engine."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        vocabulary: Mapping[str, int] = getattr(tokenizer, "get_vocab", dict)()
        self.max_characters = max_model_len * max(map(len, vocabulary), default=0) or None  # None: not known

    def require(self, prompt: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> None:
        """Raise CapacityError if a text, or messages with template arguments, have more characters than the context can
        hold."""
        if self.max_characters is None:
            return
        parts = [prompt] if isinstance(prompt, str) else _values(prompt)
        count = characters([*parts, *(options or {}).values()], self.max_characters)
        if count > self.max_characters:
            raise CapacityError(
                f"this prompt has at least {count} characters, more than the {self.max_characters} that max_model_len="
                f"{self._max_model_len} tokens can hold; shorten it"
            )


def _values(messages: Any) -> list[Any]:
    """The values in messages. An item that is no message has none; it is refused later."""
    found = [each for each in messages if isinstance(each, Mapping)] if isinstance(messages, Sequence) else []
    return [value for message in found for name, value in message.items() if name not in NOT_COUNTED]


def characters(values: Sequence[Any], limit: int) -> int:
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
