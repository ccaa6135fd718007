"""Reads text one character at a time in a generator that waits for more text and can put characters back.

    unread (to be read again)  <-  held (read, role unknown)  <-  fed

It knows no format. Readers are written as if the whole text were available, so the result cannot depend on how it is
cut.
"""

import re
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, str, T]  # waits for characters, then returns

END = ""
"""Read after the last character."""

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
        self._unread: deque[str] = deque()  # put back, to be read again
        self._held: list[str] = []  # read, role not known yet
        self._at = 0  # number of characters read, held ones included
        self._ended = False

    def _next(self) -> Reading[str]:
        """Read the next character; it becomes held."""
        char = self._unread.popleft() if self._unread else END if self._ended else (yield)
        if char == END:
            raise CutOff
        self._held.append(char)
        self._at += 1
        return char

    def _back(self) -> None:
        """Put the last character back."""
        self._unread.appendleft(self._held.pop())
        self._at -= 1

    def _back_to(self, size: int) -> None:
        """Put characters back until `size` are held."""
        while len(self._held) > size:
            self._back()

    def _sees(self, mark: str) -> Reading[bool]:
        """Does this marker come next? If so, read it. Raises CutOff at the end of the text."""
        size = len(self._held)
        for expected in mark:
            try:
                char = yield from self._next()
            except CutOff:
                if len(self._held) == size:
                    raise
                break
            if char != expected:
                break
        else:
            return True
        self._back_to(size)
        return False

    def _solid(self) -> Reading[str]:
        """Read the next character that is not white space."""
        while (char := (yield from self._next())).isspace():
            pass
        return char

    def _precedes(self, *marks: str) -> Reading[bool]:
        """Does one of these markers come next, after white space? Reads nothing."""
        size = len(self._held)
        try:
            yield from self._solid()
            self._back()
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

    def _close(self, *ends: str) -> Reading[None]:
        """Read white space and one of these strings, which ends the call."""
        self._phase = "closing"
        self._held.clear()
        read = yield from self._solid()
        while read not in ends:
            require_syntax(any(end.startswith(read) for end in ends))
            read += yield from self._next()
        self._held.clear()

    def _until(self, end: str, sink: Callable[[str], None]) -> Reading[None]:
        """Read up to and including this string; pass the characters before it to `sink`."""
        while True:
            read = yield from self._next()
            while end.startswith(read) and read != end:
                read += yield from self._next()
            if read == end:
                return
            for _ in read[1:]:
                self._back()
            sink(read[0])

    def _text_until(self, end: str, most: int = 1 << 30) -> Reading[str]:
        """Read the text before the string `end`, at most `most` characters, and the string itself."""
        read: list[str] = []

        def sink(char: str) -> None:
            require_syntax(len(read) < most)
            read.append(char)

        yield from self._until(end, sink)
        return "".join(read)

    def _name(self) -> Reading[str]:
        """Read a name, up to the first character that cannot belong to it."""
        name = ""
        while NAME.fullmatch(name + (char := (yield from self._next()))):
            name += char
        self._back()
        require_syntax(name)
        return name
