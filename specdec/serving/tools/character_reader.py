"""Text read a character at a time by a generator that waits for the next one, and puts back what it read too far.

    unread (to be read again)  <-  held (read, not known what it is)  <-  fed

It knows no format. What is read is written as if all text were there, so how the text is cut cannot matter.
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
    """The held characters are no call, or no more of it."""


class CutOff(NotACall):
    """The text ended where something was still to come."""


def require_syntax(holds: object) -> None:
    """Raise NotACall where this does not hold."""
    if not holds:
        raise NotACall


class CharacterReader:
    """Reading that all formats share."""

    def __init__(self) -> None:
        self._unread: deque[str] = deque()  # read before, and to be read again
        self._held: list[str] = []  # read, and not known what it is
        self._at = 0  # characters read, those held included
        self._ended = False

    def _next(self) -> Reading[str]:
        """The next character, which is held from now on."""
        char = self._unread.popleft() if self._unread else END if self._ended else (yield)
        if char == END:
            raise CutOff
        self._held.append(char)
        self._at += 1
        return char

    def _back(self) -> None:
        """The last character is to be read again."""
        self._unread.appendleft(self._held.pop())
        self._at -= 1

    def _sees(self, mark: str) -> Reading[bool]:
        """Is this what comes next? Only then it is read. Raises CutOff where nothing comes."""
        read = 0
        for expected in mark:
            try:
                char = yield from self._next()
            except CutOff:
                if not read:
                    raise
                break
            read += 1
            if char != expected:
                break
        else:
            return True
        for _ in range(read):
            self._back()
        return False

    def _solid(self) -> Reading[str]:
        """The next character that is no white space."""
        while (char := (yield from self._next())).isspace():
            pass
        return char

    def _expect(self, text: str) -> Reading[None]:
        for expected in text:
            require_syntax((yield from self._next()) == expected)

    def _close(self, *ends: str) -> Reading[None]:
        """One of these strings, after white space, ends the call."""
        self._phase = "closing"
        self._held.clear()
        read = yield from self._solid()
        while read not in ends:
            require_syntax(any(end.startswith(read) for end in ends))
            read += yield from self._next()
        self._held.clear()

    def _until(self, end: str, sink: Callable[[str], None]) -> Reading[None]:
        """All characters before this string, and the string itself, which is not handed on."""
        while True:
            read = yield from self._next()
            while end.startswith(read) and read != end:
                read += yield from self._next()
            if read == end:
                return
            for _ in read[1:]:
                self._back()
            sink(read[0])

    def _text_until(self, end: str, fits: Callable[[str, int], bool] = lambda char, at: True) -> Reading[str]:
        """The text before this string. fits: may character number `at` of it be this one?"""
        read: list[str] = []

        def sink(char: str) -> None:
            require_syntax(fits(char, len(read)))
            read.append(char)

        yield from self._until(end, sink)
        return "".join(read)

    def _name(self) -> Reading[str]:
        """A name, up to the first character that cannot be of one."""
        name = ""
        while NAME.fullmatch(name + (char := (yield from self._next()))):
            name += char
        self._back()
        require_syntax(name)
        return name
