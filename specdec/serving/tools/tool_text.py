"""Reads an answer character by character and tells its tool calls from its content: what all formats have in common.

A format says in `_call` how a call is written, as if all text were there; it waits at every character that is yet to
come. So how the text is cut into pieces cannot matter. What is read is held until it is known what it is. Invariant:
every character is content, or stands in a call's name and arguments, or is the markup of a call. What turns out to be
no call is content from the first character on that has not been handed out. White space is markup where there is
nothing else before, between or after calls.
"""

import re
import secrets
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")
Reading = Generator[None, str, T]  # waits for characters, then returns

END = ""
"""What is read after the last character."""

NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A part of call number `index`: first one with its id and name, then pieces of its arguments, which are JSON."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Piece = ContentPiece | ToolCallPiece


class NotACall(Exception):
    """What is held is no call, or no more of it."""


class CutOff(NotACall):
    """The text ended where something was still to come."""


def require(holds: object) -> None:
    """Raise NotACall where this does not hold."""
    if not holds:
        raise NotACall


class ToolParser:
    """`feed` it text as it comes, then `finish` it. One answer each.

    A call that is malformed from some character on has the arguments up to there, and content begins there; one that
    is cut off has the arguments up to there.
    """

    special: tuple[str, ...] = ()
    """Special tokens that the format is written with: the text must have them."""
    signs: tuple[str, ...] = ()
    """What a template that teaches the format holds, all of it; none: the first of `special`."""
    begins = "<"
    """What a call after text begins with: other characters need no closer look."""

    def __init__(self, types: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """types: of each tool, the JSON schemas of its parameters, for formats that write values without quotes."""
        self.num_calls = 0
        self._types = types or {}
        self._pieces: list[Piece] = []
        self._unread: deque[str] = deque()  # read before, and to be read again
        self._held: list[str] = []  # read, and not known what it is
        self._gap: str | None = ""  # white space that may be markup; None: after text, where it is not
        self._phase = ""  # of a call: "" before it is known to be one, "arguments", "closing"
        self._ended = False
        self._reading = self._parse()
        next(self._reading)

    def feed(self, text: str) -> list[Piece]:
        """What more of the text adds."""
        at = 0
        while at < len(text):
            if self._gap is None and not (self._phase or self._held or self._unread):
                found = text.find(self.begins, at)
                end = found if found >= 0 else len(text)
                if end > at:
                    self._content(text[at:end])
                    at = end
                    continue
            self._reading.send(text[at])
            at += 1
        return self._take()

    def finish(self) -> list[Piece]:
        """What was held back: the text ends here."""
        if not self._ended:
            self._ended = True
            with suppress(StopIteration):
                self._reading.send(END)
            if self._gap and not self.num_calls:
                self._pieces.append(ContentPiece(self._gap))
        return self._take()

    def _call(self) -> Reading[None]:
        """Read one call, or markup. Raises NotACall where it is neither, with what was read still held."""
        raise NotImplementedError

    def _parse(self) -> Reading[None]:
        while True:
            self._phase = ""
            try:
                yield from self._call()
                self._held.clear()
            except NotACall as error:
                if isinstance(error, CutOff) and (self._phase or not self._held):
                    if self._phase == "arguments":
                        self._arguments("".join(self._held))
                    return
                again = len(self._held) if self._phase else len(self._held) - 1  # after a call another may begin
                for _ in range(again):
                    self._back()
                if self._held:
                    self._content(self._held.pop())

    # what is handed out

    def _content(self, text: str) -> None:
        if self._gap is not None:
            self._gap += text
            if text.isspace():
                return
            text, self._gap = self._gap, None
        self._pieces.append(ContentPiece(text))

    def _begin_call(self, name: str) -> None:
        """What is held is a call, up to where its arguments begin."""
        self._held.clear()
        self._gap, self._phase = "", "arguments"
        self._pieces.append(ToolCallPiece(self.num_calls, self._new_id(), name, ""))
        self.num_calls += 1

    def _arguments(self, text: str) -> None:
        """The next of its arguments, which is what was held."""
        self._held.clear()
        if text:
            self._pieces.append(ToolCallPiece(self.num_calls - 1, None, None, text))

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def _take(self) -> list[Piece]:
        """What is to be handed out: neighbours of one kind as one piece, but for a call's first."""
        joined: list[Piece] = []
        for piece in self._pieces:
            last = joined[-1] if joined else None
            if isinstance(last, ContentPiece) and isinstance(piece, ContentPiece):
                joined[-1] = ContentPiece(last.text + piece.text)
            elif isinstance(last, ToolCallPiece) and isinstance(piece, ToolCallPiece) and piece.id is None is last.id:
                joined[-1] = replace(last, arguments=last.arguments + piece.arguments)
            else:
                joined.append(piece)
        self._pieces = []
        return joined

    # what is read

    def _next(self) -> Reading[str]:
        """The next character, which is held from now on."""
        char = self._unread.popleft() if self._unread else END if self._ended else (yield)
        if char == END:
            raise CutOff
        self._held.append(char)
        return char

    def _back(self) -> None:
        """The last character is to be read again."""
        self._unread.appendleft(self._held.pop())

    def _solid(self) -> Reading[str]:
        """The next character that is no white space."""
        while (char := (yield from self._next())).isspace():
            pass
        return char

    def _expect(self, text: str) -> Reading[None]:
        for expected in text:
            require((yield from self._next()) == expected)

    def _close(self, *ends: str) -> Reading[None]:
        """One of these strings, after white space, ends the call."""
        self._phase = "closing"
        self._held.clear()
        read = yield from self._solid()
        while read not in ends:
            require(any(end.startswith(read) for end in ends))
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
            require(fits(char, len(read)))
            read.append(char)

        yield from self._until(end, sink)
        return "".join(read)

    def _name(self) -> Reading[str]:
        """A name, up to the first character that cannot be of one."""
        name = ""
        while NAME.fullmatch(name + (char := (yield from self._next()))):
            name += char
        self._back()
        require(name)
        return name
