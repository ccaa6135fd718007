"""Reads an answer character by character and separates thoughts, content and tool calls, in order: the common part of
all formats.

A format's `_call` reads a call as if the whole text were available; it is a generator that waits for each missing
character. So the result cannot depend on how the text is cut into pieces. Characters are held until their role is
known. Invariant: every character belongs to a thought, to content, to a call's name or arguments, or is markup. If text
turns out not to be a call, it is content from its first unreported character on. White space is markup around the
markers of a thought, and before, between and after calls if there is nothing else.

    <think>thought</think>answer            deepseek_r1, qwen3
    <|channel>thought\nthought<channel|>    gemma4

A thought that is never closed ends at the first complete tool call in it. A call within a closed thought is a
quotation.
"""

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from specdec.errors import StoppingError
from specdec.runtime.request_output import GenerationOutput, StreamDelta
from specdec.sampling.log_probs import TokenLogprob
from specdec.serving.tools.answer_events import CallArguments, CallBegin, CallEnd, Event, EventTokens, Kind, Piece, Text
from specdec.serving.tools.character_reader import CharacterReader, CutOff, NotACall, Reading
from specdec.serving.tools.reasoning_formats import ReasoningFormat
from specdec.text.detokenize import DraftColours
from specdec.text.stop_strings import ThoughtMarks
from specdec.text.token_texts import TokenTexts


class AnswerParser(CharacterReader):
    """A parser of one answer: `feed` it text, then `finish` it. This base class knows thoughts but no calls.

    If a call becomes malformed, it keeps the arguments before that character, and content begins there. A call that is
    cut off keeps the arguments so far.
    """

    special: tuple[str, ...] = ()
    """Special tokens of the format, which the text must contain. The first one begins a call."""
    signs: tuple[str, ...] = ()
    """Strings that a chat template for the format contains (all of them); empty: the first of `special`."""
    thinks = False
    """Does the format itself mark thoughts? It then ignores other marks."""

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]] | None = None, thoughts: ReasoningFormat | None = None
    ) -> None:
        """tools: JSON schema of each tool's parameters, by name. thoughts: how thoughts are marked; None: not at
        all."""
        super().__init__()
        self.num_calls = 0
        self._tools = tools or {}
        self._thoughts = thoughts = None if self.thinks else thoughts
        self._pieces: list[Piece] = []
        self._told = 0  # number of arguments' characters reported
        self._gap: str | None = ""  # white space that may be markup; None: after text, so it is not
        self._marked = False  # the gap follows the marker of a thought
        self._kind: Kind | None = None  # kind of the current text
        self._thinking = False
        self._may_think = thoughts is not None
        self._phase = ""  # phase of a call: "" (not yet certain), "arguments", "closing"
        self._open = False  # a call has begun and not ended
        self._cut = False  # was the answer cut off by its length?
        marks = (*self.special[:1], *((thoughts.opens, thoughts.closes) if thoughts is not None else ()))
        self._marks = re.compile("|".join(re.escape(mark[0]) for mark in marks) or r"(?!)")  # first characters
        self._reading = self._parse()
        next(self._reading)

    def feed(self, text: str) -> list[Piece]:
        """Read more text. Returns the new pieces."""
        self._append(text)
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def prime(self, text: str) -> None:
        """Read the part of the answer that the prompt contains, such as the marker of a thought."""
        self._dropped = self._told = -len(text)
        self.feed(text)
        self._kind = None

    @property
    def written(self) -> tuple[str, ...]:
        """Tokens that the text must contain, whether special or not."""
        form = self._thoughts
        return self.special if form is None else (*self.special, form.opens.removesuffix("thought"), form.closes)

    @property
    def thought_marks(self) -> ThoughtMarks | None:
        """Marks of the thought at the answer's beginning, as far as the prompt has not read them; None: no thought."""
        form = self._thoughts
        if form is None or not (self._thinking or self._may_think):
            return None
        return "" if self._thinking else form.opens, form.closes

    def begun_by(self, prompt_end: str, continued: str = "") -> str:
        """The end of a prompt that `prime` must read. continued: text of an answer that the prompt continues."""
        form = self._thoughts
        if form is None:
            return ""
        marks = (form.opens, form.closes) if form.always else (form.opens,)  # a closed thought is over
        if continued:
            opened, closed = continued.rfind(form.opens), continued.rfind(form.closes)
            last = max(opened, closed)
            return continued[last:] if last >= 0 and continued.startswith(marks, last) else ""
        return next((mark for mark in marks if prompt_end.rstrip().endswith(mark)), "")

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """End the text. Returns the pieces that were held back. cut: the answer was cut off."""
        self._ended, self._cut = True, cut
        return self.feed("")

    def _call(self) -> Reading[None]:
        """Read one call, or markup. Raises NotACall if it is neither."""
        yield from ()
        raise NotACall

    def _parse(self) -> Reading[None]:
        with suppress(CutOff):
            if self._thoughts is not None and self._thoughts.always:
                yield from self._thought(self._thoughts)
            while True:
                yield from self._plain_text()
                yield from self._markup_or_content()
        if self._gap and not (self._marked or self._thinking or self.num_calls):
            self._tell_text("content", self._gap)

    def _plain_text(self) -> Reading[None]:
        """Read text up to the next character that may begin a marker. Raises CutOff at its end."""
        while self._gap is None or self._thinking:
            found = self._marks.search(self._text, self._at)
            text = self._text[self._at : found.start() if found else len(self._text)]
            self._at += len(text)
            self._release()
            if text:
                self._plain(text)
            if found:
                return
            self._require_more()
            yield

    def _markup_or_content(self) -> Reading[None]:
        """Read a thought, a call, or one character of content. Raises CutOff at the end of the text."""
        self._phase = ""
        try:
            if (form := self._thoughts) is not None and self._may_think and (yield from self._thinks(form)):
                yield from self._thought(form)
                return
            yield from self._call()
            self._release()
            self._end_call(whole=True)
        except NotACall as error:
            in_call, whole = self._phase, self._phase != "arguments"
            if isinstance(error, CutOff) and (in_call or not self._num_held):
                if not whole:
                    self._arguments(self._held)
                self._end_call(whole=whole)
                raise
            self._end_call(whole=whole)
            self._back_to(0)
            if not in_call:  # another call may begin after a call
                self._plain((yield from self._released()))

    def _thinks(self, form: ReasoningFormat) -> Reading[bool]:
        """Does a thought begin here? One without text may have its last marker alone."""
        if (yield from self._sees(form.opens)):
            return True
        return self._gap is not None and (yield from self._precedes(form.closes))

    def _thought(self, form: ReasoningFormat) -> Reading[None]:
        """Read a thought up to its closing marker, or up to a call if the thought is never closed."""
        self._release()
        self._gap, self._kind, self._thinking = "", None, True
        while True:
            yield from self._plain_text()
            if self._is_silent() and (yield from self._sees(form.opens)):
                self._gap = ""  # some models repeat the marker
            elif (yield from self._sees(form.closes)):
                break
            elif self.special and (yield from self._sees(self.special[0])):
                if (yield from self._ends_in_call(form)):
                    break
            else:
                self._think((yield from self._released()))
            self._release()
        self._release()
        self._gap, self._marked, self._kind, self._thinking = "", True, None, False
        self._may_think = form.again

    def _is_silent(self) -> bool:
        return self._kind is None  # the current text is still empty

    def _ends_in_call(self, form: ReasoningFormat) -> Reading[bool]:
        """The held characters begin a call within a thought. If the thought is closed later, the call is a quotation
        and part of the thought; otherwise the first complete call ends the thought. Returns whether it ended."""
        closed = False
        with suppress(CutOff):
            while not (yield from self._sees(form.closes)):
                yield from self._next()
            closed = True
        text = self._held
        quoted = len(text) - len(form.closes) if closed else None if self._cut else self._first_call(text)
        if quoted is not None:
            self._back_to(quoted)
        self._release()
        self._think(text[:quoted])
        return not closed and quoted is not None

    def _first_call(self, text: str) -> int | None:
        """Index of the first complete call in a text; None: there is none."""
        reader = type(self)(self._tools)
        pieces = reader.feed(text) + reader.finish()
        whole = {event.index for event, _, _ in pieces if isinstance(event, CallEnd) and event.whole}
        begun = (start for event, start, _ in pieces if isinstance(event, CallBegin) and event.index in whole)
        return next(begun, None)

    # handing out events

    def _plain(self, text: str) -> None:
        """Report the newest characters as plain text without markers."""
        (self._think if self._thinking else self._content)(text)

    def _content(self, text: str) -> None:
        """Report the newest characters as content."""
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
        """Report the newest characters as thought. White space at the end waits, since it may belong to a following
        marker."""
        text = (self._gap or "") + text
        end = text.rstrip()
        self._gap = text[len(end) :]
        if events := end if self._kind else end.lstrip():
            self._tell_text("thought", events, len(self._gap))

    def _tell_text(self, kind: Kind, text: str, later: int = 0) -> None:
        """Report text. later: number of characters read after it."""
        begins, self._kind = self._kind != kind, kind
        self._tell(Text(kind, text, begins), self._dropped + self._start - later - len(text), later)

    def _begin_call(self, name: str) -> None:
        """Begin a call. The held characters are its markup before the arguments."""
        self._end_call(whole=True)
        start = self._dropped + self._start
        self._release()
        self._gap, self._marked, self._kind, self._phase, self._open = "", False, None, "arguments", True
        self._may_think = self._thoughts is not None and self._thoughts.again
        self._tell(CallBegin(self.num_calls, self._new_id(), name), start)
        self.num_calls += 1

    def _arguments(self, text: str) -> None:
        """Report the held characters as more of the call's arguments."""
        self._release()
        if text:
            self._tell(CallArguments(self.num_calls - 1, text), self._told)

    def _close(self, *ends: str) -> Reading[None]:
        """Read white space and one of these strings, which ends the call."""
        self._phase = "closing"
        self._release()
        yield from self._one_of(*ends)
        self._release()

    def _end_call(self, *, whole: bool) -> None:
        if self._open:
            self._open = False
            self._tell(CallEnd(self.num_calls - 1, whole), self._told)

    def _tell(self, event: Event, start: int, later: int = 0) -> None:
        """Hand out an event that was read from `start` on, joined with the last one if it continues that."""
        self._told = self._dropped + self._start - later
        if self._pieces and (joined := _joined(self._pieces[-1].event, event)):
            event, start = joined, self._pieces.pop().start
        self._pieces.append(Piece(event, start, self._told))

    def _new_id(self) -> str:
        # Mistral's templates insist on nine letters and digits, of forced calls too
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _joined(first: Event, second: Event) -> Event | None:
    """Join two events if the second continues the first."""
    if isinstance(first, Text) and isinstance(second, Text) and not second.begins:
        return replace(first, text=first.text + second.text)
    if isinstance(first, CallArguments) and isinstance(second, CallArguments):
        return replace(first, text=first.text + second.text)
    return None


class AnswerReader:
    """Converts the deltas of one choice of an answer, with any number of tokens each, to events by a parser.

    parser: a new parser; special tokens of its format are read as text. max_calls: further calls, and everything after
    them, are left out. scored: do events carry tokens, even without a parser?
    """

    def __init__(
        self,
        tokenizer: Any,
        parser: AnswerParser | None = None,
        stops: Sequence[str] = (),
        *,
        max_calls: int | None = None,
        show_drafts: bool = False,
        scored: bool = False,
    ) -> None:
        self.thought_tokens = 0
        """Number of thought tokens read so far, without markers."""
        self._parser = parser or AnswerParser()
        self._texts = TokenTexts(tokenizer, self._parser.written, stops) if scored or self._parser.written else None
        self.begins: list[int] = [] if self._texts is None else self._texts.begins
        """For each token read so far, the index of its first character in the text. Requires `scored`."""
        self._colours = DraftColours(tokenizer, stops) if show_drafts else None
        self._max_calls = max_calls
        self._scores: list[TokenLogprob] = []
        self._last: Event | None = None
        self._last_call_complete = False

    def read(self, delta: StreamDelta) -> list[EventTokens]:
        """The events of one delta, in order; the last delta, with its output, ends the answer. Tokens without text at
        the end, such as an end token, belong to the last event if it is text."""
        self._scores += delta.logprobs or []
        if self._texts is not None:
            events = self._parse_delta(self._texts, delta)
        elif delta.text:
            events = [EventTokens(Text("content", delta.text, begins=self._last is None), range(0))]
        else:
            return []  # such as a part of a character
        if events:
            self._last = events[-1].event
        return self._up_to_max_calls(events)

    def colours(self, delta: StreamDelta) -> list[tuple[str, bool]] | None:
        """(text, is it from accepted drafts?) for the text that this delta adds; None: not requested."""
        return None if self._colours is None else self._colours.read(delta)

    def scores(self, tokens: range) -> list[TokenLogprob]:
        """Log-probabilities of tokens that were read; empty if not requested."""
        return self._scores[tokens.start : tokens.stop]

    def finish_reason(self, output: GenerationOutput) -> str:
        """ "stop", "length" or "tool_calls". Raises StoppingError for a request that was aborted."""
        if output.finish_reason == "abort":
            raise StoppingError("this answer was ended before its end; the server is stopping")
        return "tool_calls" if output.finish_reason == "stop" and self._last_call_complete else output.finish_reason

    def _parse_delta(self, texts: TokenTexts, delta: StreamDelta) -> list[EventTokens]:
        output = delta.output
        pieces = self._parser.feed(texts.read(delta.token_ids, finished=output is not None))
        if output is not None:
            pieces += self._parser.finish(cut=output.finish_reason == "length")
        events = [EventTokens(event, texts.tokens_in(start, end)) for event, start, end in pieces]
        last = events[-1].event if events else self._last
        if output is not None and isinstance(last, Text | None) and (rest := texts.tokens_after()):
            events.append(EventTokens(Text("content" if last is None else last.kind, "", begins=last is None), rest))
        return events

    def _up_to_max_calls(self, events: list[EventTokens]) -> list[EventTokens]:
        """The events before the first call beyond `max_calls`, which ends the answer."""
        for at, (event, tokens) in enumerate(events):
            if isinstance(event, CallBegin) and self._max_calls is not None and event.index >= self._max_calls:
                self._max_calls = -1
            if self._max_calls == -1:
                return events[:at]
            if isinstance(event, CallEnd):
                self._last_call_complete = event.whole
            elif isinstance(event, Text) and event.kind == "thought":
                self.thought_tokens += len(tokens)
        return events
