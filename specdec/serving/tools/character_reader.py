"""Reads text one character at a time in a generator that waits for more text and can put characters back.

    handed out or dropped | held (read, role unknown) | unread |
                          _start                      _at      len(_text)

It knows no format. Readers are written as if the whole text were available, so the result cannot depend on how it is
cut.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # waits for text, then returns

NAME = re.compile(r"[\w.:/-]{1,128}")


class NotACall(Exception):
    """The held characters are not a call, or not its continuation."""


class CutOff(NotACall):
    """The text ended where more was required."""


def require_syntax(holds: object) -> None:
    """Raise NotACall unless this holds."""
    if not holds:
        raise NotACall


class CharacterReader:
    """Reading functions common to all formats."""

    def __init__(self) -> None:
        self._text = ""
        self._start = 0
        self._at = 0
        self._dropped = 0  # number of characters before `_text`
        self._ended = False

    def _append(self, text: str) -> None:
        """Add more text after the unread characters, and drop those before the held ones."""
        self._text = self._text[self._start :] + text
        self._dropped += self._start
        self._at -= self._start
        self._start = 0

    @property
    def _num_held(self) -> int:
        return self._at - self._start

    @property
    def _held(self) -> str:
        return self._text[self._start : self._at]

    def _release(self) -> None:
        """The role of the held characters is known."""
        self._start = self._at

    def _require_more(self) -> None:
        """Raise CutOff at the end of the text. Otherwise the caller yields to get more."""
        if self._ended:
            raise CutOff

    def _next(self) -> Reading[str]:
        """Read the next character; it becomes held."""
        while self._at == len(self._text):
            self._require_more()
            yield
        self._at += 1
        return self._text[self._at - 1]

    def _released(self) -> Reading[str]:
        """Read the next character, whose role is known."""
        char = yield from self._next()
        self._release()
        return char

    def _back(self) -> None:
        """Put the last character back."""
        self._at -= 1

    def _back_to(self, size: int) -> None:
        """Put characters back until at most `size` are held."""
        self._at = min(self._at, self._start + size)

    def _sees(self, mark: str) -> Reading[bool]:
        """Does this marker come next? If so, read it. Raises CutOff at the end of the text."""
        while (part := self._text[self._at : self._at + len(mark)]) != mark and mark.startswith(part):
            if part and self._ended:
                break
            self._require_more()
            yield
        if part == mark:
            self._at += len(mark)
        return part == mark

    def _while(self, fits: Callable[[str], object], most: int = 1 << 30) -> Reading[str]:
        """Read all characters, at most `most`, up to one that does not fit."""
        text = ""
        while fits(char := (yield from self._next())):
            text += char
            require_syntax(len(text) <= most)
        self._back()
        return text

    def _read_run(self, run: re.Pattern[str]) -> str:
        """Read the characters that this pattern matches and that are there."""
        if found := run.match(self._text, self._at):
            self._at = found.end()
        return found[0] if found else ""

    def _solid(self) -> Reading[str]:
        """Read the next character that is not white space."""
        yield from self._while(str.isspace)
        return (yield from self._next())

    def _peek(self) -> Reading[str]:
        """Read white space. Returns the next character after it, which stays unread."""
        char = yield from self._solid()
        self._back()
        return char

    def _precedes(self, *marks: str) -> Reading[bool]:
        """Does one of these markers come next, after white space? Reads nothing."""
        size = self._num_held
        try:
            yield from self._peek()
            for mark in marks:
                if (yield from self._sees(mark)):
                    return True
            return False
        except CutOff:
            return False
        finally:
            self._back_to(size)

    def _expect(self, text: str) -> Reading[None]:
        for expected in text:
            require_syntax((yield from self._next()) == expected)

    def _one_of(self, *marks: str) -> Reading[str]:
        """Read white space and one of these strings. Returns the string."""
        read = yield from self._solid()
        while read not in marks:
            require_syntax(any(mark.startswith(read) for mark in marks))
            read += yield from self._next()
        return read

    def _text_until(self, end: str, most: int = 1 << 30) -> Reading[str]:
        """Read the text before the string `end`, at most `most` characters, and the string itself."""
        text = ""
        while not (yield from self._sees(end)):
            require_syntax(len(text) < most)
            text += yield from self._next()
        return text

    def _name(self) -> Reading[str]:
        """Read a name, up to the first character that cannot belong to it."""
        name = yield from self._while(NAME.match)
        require_syntax(NAME.fullmatch(name))
        return name
