"""From an answer's tokens to its events: one reader an answer, fed a token at a time or whole."""

from collections.abc import Sequence
from typing import Any

from specdec.runtime.request import StreamDelta
from specdec.serving.tools.answer_events import Event, Piece, Said, Text
from specdec.serving.tools.answer_parser import AnswerParser
from specdec.text.token_texts import TokenTexts


class AnswerReader:
    """Reads the deltas of one answer with a parser.

    parser: a new one; special tokens of its format are read as the text that they are.
    """

    def __init__(self, tokenizer: Any, parser: AnswerParser, stops: Sequence[str] = ()) -> None:
        self._parser = parser
        self._texts = TokenTexts(tokenizer, parser.written, stops)
        self._last: Event | None = None

    @property
    def begins(self) -> list[int]:
        """The character of the text that each token read so far begins with."""
        return self._texts.begins

    def read(self, delta: StreamDelta) -> list[Said]:
        """What one delta adds; the last one, with its output, ends it. Tokens that end a text without being in it,
        such as an end token, belong to the last event, if that is text."""
        output = delta.output
        pieces = self._parser.feed(self._texts.read(delta.token_ids, finished=output is not None))
        if output is not None:
            pieces += self._parser.finish(cut=output.finish_reason == "length")
        said = [self._said(piece) for piece in pieces]
        if output is not None and isinstance(self._last, Text | None) and (rest := self._texts.tokens_after()):
            kind = "content" if self._last is None else self._last.kind
            said.append(Said(Text(kind, "", begins=self._last is None), rest))
        return said

    def _said(self, piece: Piece) -> Said:
        self._last = piece.event
        return Said(piece.event, self._texts.tokens_in(piece.start, piece.end))
