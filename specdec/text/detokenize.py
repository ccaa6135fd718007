"""Token ids to text, as they come: never half a character, never a piece of a stop string.

Tokenizers decode a suffix correctly only with some context before it, so new text is the difference between two decodes
that start a few tokens back; an unfinished UTF-8 sequence (shown as U+FFFD) is held until it is complete.
"""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one request's output. Without a tokenizer all text is empty."""

    __slots__ = ("_prefix", "_read", "_streamed", "_tokenizer", "text")

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._prefix = 0  # first token of the decode context
        self._read = 0  # tokens whose text is in `text`
        self._streamed = 0  # characters of `text` handed out by `stream`
        self.text = ""

    def update(self, output_ids: Sequence[int]) -> None:
        """Extend `text` by the tokens not read yet, as far as they make whole characters."""
        if self._tokenizer is None or self._read == len(output_ids):
            return
        known = self._decode(output_ids[self._prefix : self._read])
        longer = self._decode(output_ids[self._prefix :])
        if len(longer) > len(known) and not longer.endswith(REPLACEMENT):
            self.text += longer[len(known) :]
            self._prefix, self._read = self._read, len(output_ids)

    def find_stop(self, output_ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Read the newest token; is there a stop string in the text now?"""
        self.update(output_ids)
        return any(stop in self.text for stop in stops)

    def stream(self, output_ids: Sequence[int], stops: Sequence[str], *, finished: bool) -> str:
        """Text not handed out before; what may be the start of a stop string waits until it is known not to be."""
        self.update(output_ids)
        if finished:
            text = self.final_text(output_ids, stops)
        else:
            longest = max((len(stop) for stop in stops), default=1)
            text = self.text[: max(0, len(self.text) - (longest - 1))]
        new = text[self._streamed :]
        self._streamed += len(new)
        return new

    def final_text(self, output_ids: Sequence[int], stops: Sequence[str]) -> str:
        """The whole text, cut before the first stop string."""
        if self._tokenizer is None:
            return ""
        text = self._decode(output_ids)
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text
