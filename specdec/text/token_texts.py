"""The text of an output, token by token: which characters each token wrote, and how much of the text can be handed out.

    tokens     0    1        2           3 4 5        6
    begins     0    5        5           12 12 12     13
               Hello (special) " wait: " (a character) "."

This file does not know what the text means. Any cut of the tokens into deltas gives the same text, and each token
begins at the same character.
"""

from bisect import bisect_left
from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from specdec.text.detokenize import REPLACEMENT, Detokenizer, ids_of, num_tokens, token_bytes, token_text


class TokenTexts:
    """One output. special: special tokens that are written out, although decoding would skip them."""

    def __init__(self, tokenizer: Any, special: Sequence[str] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._reader = Detokenizer(tokenizer, ids_of(tokenizer, num_tokens(tokenizer), tuple(special)))
        self._reach = max(map(len, stops), default=1)
        self._ids: list[int] = []
        self.begins: list[int] = []
        """Character at which each token's text begins; a token without text begins where the next does."""
        self.length = 0
        """Characters handed out."""
        self._settled = 0  # characters that no later token changes
        self._tail = ""  # the text after the settled characters, if the output ended here
        self._unfinished = b""  # the bytes of a character that the next token may continue
        self._given = 0  # tokens before this index have been assigned to a piece of text, or to none

    def read(self, token_ids: Sequence[int], *, finished: bool) -> str:
        """The text that these tokens add. finished: they are the last."""
        for token in token_ids:
            self._ids.append(token)
            pending = len(self._reader.pending)
            after = self._reader.update(self._ids, self._reach)
            self.begins.append(self._begin(token, after))
            settled = len(self._reader.pending) - pending
            self._settled += settled
            self._tail = after[settled:]
        new = self._reader.stream(self._ids, self._stops, finished=finished)
        self.length += len(new)
        return new

    def _begin(self, token: int, after: str) -> int:
        """Character at which a token begins. after: the unsettled text with it. No token begins before its neighbours:
        tokens_in searches by character."""
        added, unfinished = token_bytes(self._tokenizer, token), self._unfinished
        decoder = getincrementaldecoder("utf-8")("replace")
        decoder.decode(unfinished + added)
        self._unfinished = decoder.getstate()[0] if added else b""  # a space may be no text when decoded alone
        if unfinished and added and _may_be_text(unfinished + added[:1]):
            return self.begins[-1]  # another part of one character
        # the first part of a character can hide the characters before it until its last part is there
        in_bytes = REPLACEMENT in token_text(self._tokenizer, token)
        begin = self._settled + (len(self._tail) if in_bytes else _common(self._tail, after))
        return max([begin, *self.begins[-1:]])

    def tokens_in(self, start: int, end: int) -> range:
        """The tokens that wrote the characters [start, end), except tokens that an earlier call returned."""
        first = bisect_left(self.begins, start)
        if first and (self.begins[first] if first < len(self.begins) else self._settled + len(self._tail)) > start:
            first -= 1  # its text continues here
        last = bisect_left(self.begins, end)
        first = max(self._given, first)
        self._given = max(self._given, last)
        return range(first, self._given)

    def tokens_after(self) -> range:
        """The tokens after the end of the text: those of a stop string, and end tokens."""
        first = max(self._given, bisect_left(self.begins, self.length))
        self._given = len(self.begins)
        return range(first, self._given)


def _may_be_text(beginning: bytes) -> bool:
    """Do these bytes begin a text in UTF-8? Its last character may be unfinished."""
    try:
        getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError:
        return False
    return True


def _common(first: str, second: str) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))
