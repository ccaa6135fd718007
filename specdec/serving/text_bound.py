"""How long a text can be at most and still fit the model: known before it is tokenised, which takes its time."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import CapacityError


class TextBound:
    """Of one engine: no token stands for more characters than the longest of the vocabulary has."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        vocabulary: Mapping[str, int] = getattr(tokenizer, "get_vocab", dict)()
        self._longest = max(map(len, vocabulary), default=0)  # 0: not known

    @property
    def most(self) -> int | None:
        """Characters; None: not known."""
        return self._max_model_len * self._longest or None

    def require(self, chat: str | Sequence[Mapping[str, Any]]) -> None:
        """Raises CapacityError for a text, or for messages with more text, than any number of tokens that fits."""
        messages: Sequence[Any] = [{"content": chat}] if isinstance(chat, str) else chat  # or what is refused later
        texts = [each.get("content") for each in messages if isinstance(each, Mapping)]
        count = sum(len(text) for text in texts if isinstance(text, str))
        if self.most is not None and count > self.most:
            raise CapacityError(
                f"this prompt has {count} characters, more than the {self.most} that max_model_len="
                f"{self._max_model_len} tokens can hold; shorten it"
            )
