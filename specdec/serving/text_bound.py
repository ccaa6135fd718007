"""Upper bound on the text of one prompt: no token stands for more characters than the longest one of the vocabulary.

A longer text fits no context, and is refused before a template or a tokenizer takes seconds and gigabytes for it. All
text that a template may write counts: contents, thoughts, calls, tools and its arguments, with names and numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import CapacityError

NOT_COUNTED = ("role",)
"""Parts of a message that are one of a few words."""


class TextBound:
    """The bound of one engine."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        vocabulary: Mapping[str, int] = getattr(tokenizer, "get_vocab", dict)()
        self.max_characters = max_model_len * max(map(len, vocabulary), default=0) or None  # None: not known

    def require(self, prompt: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> None:
        """Raises CapacityError for a text, or for messages with their template's arguments, that has more characters
        than any number of tokens that fits."""
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
    """Values in messages; none for an item that is no message, which is refused later."""
    found = [each for each in messages if isinstance(each, Mapping)] if isinstance(messages, Sequence) else []
    return [value for message in found for name, value in message.items() if name not in NOT_COUNTED]


def characters(values: Sequence[Any], limit: int) -> int:
    """Characters of these values, as far as they are written at least: texts, names of members, and one for every other
    value. Stops where there are more than `limit`."""
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
