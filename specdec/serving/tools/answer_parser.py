"""Reads an answer character by character and tells thoughts, content and tool calls apart, in the order in which they
stand: what all formats have in common.

A format says in `_call` how a call is written, as if all text were there; it waits at every character that is yet to
come. So how the text is cut into pieces cannot matter. What is read is held until it is known what it is. Invariant:
every character is of a thought or content, or stands in a call's name and arguments, or is markup. What turns out to
be no call is content from the first character on that has not been handed out. White space is markup where there is
nothing else before, between or after calls, and around the markers of a thought.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from specdec.runtime.request import StreamDelta
from specdec.serving.tools.answer_events import CallArguments, CallBegin, CallEnd, Event, Kind, Piece, Said, Text
from specdec.serving.tools.character_reader import END, CharacterReader, CutOff, NotACall, Reading
from specdec.serving.tools.reasoning import ReasoningFormat
from specdec.text.token_texts import TokenTexts


class AnswerParser(CharacterReader):
    """`feed` it text as it comes, then `finish` it. One answer each. By itself it knows thoughts and no calls.

    A call that is malformed from some character on has the arguments up to there, and content begins there; one that
    is cut off has the arguments up to there.
    """

    special: tuple[str, ...] = ()
    """Special tokens that the format is written with: the text must have them. The first begins a call."""
    signs: tuple[str, ...] = ()
    """What a template that teaches the format holds, all of it; none: the first of `special`."""
    thinks = False
    """Does the format itself say what is thought?"""

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]] | None = None, thoughts: ReasoningFormat | None = None
    ) -> None:
        """tools: the JSON schema of the parameters of each tool, by its name. thoughts: how they are marked; None:
        they are not."""
        super().__init__()
        self.num_calls = 0
        self._tools = tools or {}
        self._thoughts = thoughts
        self._pieces: list[Piece] = []
        self._told = 0  # up to where they were handed out
        self._gap: str | None = ""  # white space that may be markup; None: after text, where it is not
        self._marked = False  # the gap follows the marker of a thought
        self._kind: Kind | None = None  # of the text that goes on
        self._thinking = False
        self._may_think = thoughts is not None
        self._phase = ""  # of a call: "" before it is known to be one, "arguments", "closing"
        self._open = False  # a call has begun and not ended
        self._cut = False  # by the length of the answer
        marks = [thoughts.opens, thoughts.closes] if thoughts is not None else []
        self._marks = _any_of([*self.special[:1], *marks])
        self._reading = self._parse()
        next(self._reading)

    def feed(self, text: str) -> list[Piece]:
        """Pieces that more of the text adds."""
        at = 0
        while at < len(text):
            if (end := self._plain_end(text, at)) > at:
                self._at += end - at
                self._plain(text[at:end])
                at = end
            else:
                self._reading.send(text[at])
                at += 1
        return self._take()

    def prime(self, text: str) -> None:
        """Read what the prompt has written of the answer already, such as the marker of a thought."""
        self._at = self._told = -len(text)
        self.feed(text)
        self._kind = None

    @property
    def written(self) -> tuple[str, ...]:
        """Special tokens that the text must have."""
        return self.special + (self._thoughts.special if self._thoughts is not None else ())

    def begun_by(self, prompt_end: str, continued: str = "") -> str:
        """What `prime` is to read of the end of a prompt. continued: the text of an answer that the prompt goes on
        with."""
        form = self._thoughts
        if form is None:
            return ""
        if continued:
            opened = continued.rfind(form.opens)
            return continued[opened:] if opened > continued.rfind(form.closes) else ""
        return form.opens if prompt_end.rstrip().endswith(form.opens) else ""

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """Pieces that were held back, now that the text ends. cut: the answer was not over."""
        if not self._ended:
            self._ended, self._cut = True, cut
            with suppress(StopIteration):
                self._reading.send(END)
            if self._gap and not (self._marked or self._thinking or self.num_calls):
                self._tell_text("content", self._gap)
        return self._take()

    def _call(self) -> Reading[None]:
        """Read one call, or markup. Raises NotACall where it is neither, with what was read still held."""
        yield from self._next()
        raise NotACall

    def _parse(self) -> Reading[None]:
        try:
            if self._thoughts is not None and self._thoughts.always:
                yield from self._thought(self._thoughts)
            while True:
                yield from self._markup_or_content()
        except CutOff:
            return

    def _markup_or_content(self) -> Reading[None]:
        """A thought, a call, or a character of content. Raises CutOff where nothing comes any more."""
        self._phase = ""
        try:
            if self._may_think and self._thoughts is not None and (yield from self._sees(self._thoughts.opens)):
                yield from self._thought(self._thoughts)
                return
            yield from self._call()
            self._held.clear()
            self._end_call(whole=True)
        except NotACall as error:
            in_call, whole = self._phase, self._phase != "arguments"
            if isinstance(error, CutOff) and (in_call or not self._held):
                if not whole:
                    self._arguments("".join(self._held))
                self._end_call(whole=whole)
                raise
            self._end_call(whole=whole)
            for _ in range(len(self._held) - (not in_call)):  # after a call another may begin
                self._back()
            if self._held:
                self._content(self._held.pop())

    def _thought(self, form: ReasoningFormat) -> Reading[None]:
        """Read text up to the marker that closes the thought, or up to a call in a thought that nothing closes."""
        self._held.clear()
        self._gap, self._kind, self._thinking = "", None, True
        while True:
            yield from self._next()
            self._back()  # `feed` may have read text up to here, after which the thought is silent no more
            if self._is_silent() and (yield from self._sees(form.opens)):
                self._gap = ""  # some say it although it is clear
            elif (yield from self._sees(form.closes)):
                break
            elif self.special and (yield from self._sees(self.special[0])):
                if (yield from self._ends_in_call(form)):
                    break
            else:
                yield from self._next()
                self._think(self._held.pop())
            self._held.clear()
        self._held.clear()
        self._gap, self._marked, self._kind, self._thinking = "", True, None, False
        self._may_think = form.again

    def _is_silent(self) -> bool:
        """Was nothing said yet of the text that was to come?"""
        return self._kind is None

    def _ends_in_call(self, form: ReasoningFormat) -> Reading[bool]:
        """What is held begins a call. If the thought is closed later, it is a quotation, and thought; if it never is,
        the first whole call ends the thought. -> did it end?"""
        closed = False
        with suppress(CutOff):
            while not (yield from self._sees(form.closes)):
                yield from self._next()
            closed = True
        text = "".join(self._held)
        if closed:
            quoted: int | None = len(text) - len(form.closes)
        else:
            quoted = None if self._cut else self._first_call(text)
        for _ in text[quoted:] if quoted is not None else "":
            self._back()
        self._held.clear()
        self._think(text[:quoted])
        return not closed and quoted is not None

    def _first_call(self, text: str) -> int | None:
        """Index at which the first whole call in a text begins; None: it has none."""
        at = text.find(self.special[0])
        while at >= 0:
            reader, length, pieces = type(self)(self._tools), 0, list[Piece]()
            while at + length < len(text) and not (pieces and isinstance(pieces[-1].event, Text | CallEnd)):
                pieces += reader.feed(text[at + length])
                length += 1
            pieces += reader.finish()
            if not pieces or not isinstance(pieces[0].event, CallBegin):
                length = len(self.special[0])
            elif any(isinstance(event, CallEnd) and event.whole for event, _, _ in pieces):
                return at
            at = text.find(self.special[0], at + length)  # a text within a call is not read twice
        return None

    def _plain_end(self, text: str, at: int) -> int:
        """Up to where the text from here on is nothing but text, as can be told without reading it closely."""
        if self._phase or self._held or self._unread or (self._gap is not None and not self._thinking):
            return at
        found = self._marks.search(text, at)
        return found.start() if found else len(text)

    # what is handed out

    def _plain(self, text: str) -> None:
        """The newest characters read are text that holds no mark."""
        (self._think if self._thinking else self._content)(text)

    def _content(self, text: str) -> None:
        """The newest characters read are content."""
        if self._gap is not None:
            if text.isspace():
                self._gap += text
                return
            if not self._marked:
                text = self._gap + text
            self._gap, self._marked = None, False
        self._may_think = self._thoughts is not None and self._thoughts.again
        self._tell_text("content", text)

    def _think(self, text: str) -> None:
        """The newest characters read are thought. White space at its end waits: it belongs to a marker after it."""
        text = (self._gap or "") + text
        end = text.rstrip()
        self._gap = text[len(end) :]
        if said := end if self._kind else end.lstrip():
            self._tell_text("thought", said, len(self._gap))

    def _tell_text(self, kind: Kind, text: str, later: int = 0) -> None:
        """later: characters that were read after the text."""
        begins, self._kind = self._kind != kind, kind
        self._tell(Text(kind, text, begins), self._at - later - len(text), later)

    def _begin_call(self, name: str) -> None:
        """Begin a call: the held characters are its markup up to the arguments."""
        self._end_call(whole=True)
        start = self._at - len(self._held)
        self._held.clear()
        self._gap, self._marked, self._kind, self._phase, self._open = "", False, None, "arguments", True
        self._may_think = self._thoughts is not None and self._thoughts.again
        self._tell(CallBegin(self.num_calls, self._new_id(), name), start)
        self.num_calls += 1

    def _arguments(self, text: str) -> None:
        """The next of its arguments, which is what was held."""
        self._held.clear()
        if text:
            self._tell(CallArguments(self.num_calls - 1, text), self._told)

    def _end_call(self, *, whole: bool) -> None:
        if self._open:
            self._open = False
            self._tell(CallEnd(self.num_calls - 1, whole), self._told)

    def _tell(self, event: Event, start: int, later: int = 0) -> None:
        self._told = self._at - len(self._held) - later
        self._pieces.append(Piece(event, start, self._told))

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def _take(self) -> list[Piece]:
        """Hand out the pieces, with neighbours that continue each other joined."""
        joined: list[Piece] = []
        for piece in self._pieces:
            if joined and (event := _joined(joined[-1].event, piece.event)):
                joined[-1] = Piece(event, joined[-1].start, piece.end)
            else:
                joined.append(piece)
        self._pieces = []
        return joined


def _joined(first: Event, second: Event) -> Event | None:
    """Both in one, where the second goes on with the first."""
    if isinstance(first, Text) and isinstance(second, Text) and not second.begins:
        return replace(first, text=first.text + second.text)
    if isinstance(first, CallArguments) and isinstance(second, CallArguments):
        return replace(first, text=first.text + second.text)
    return None


def _any_of(marks: list[str]) -> "re.Pattern[str]":
    """The first character of any of these."""
    first = {mark[0] for mark in marks if mark}
    return re.compile(f"[{re.escape(''.join(sorted(first)))}]" if first else r"(?!)")


class AnswerReader:
    """From an answer's tokens to its events, with a parser: one reader an answer, fed a token at a time or whole.

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
