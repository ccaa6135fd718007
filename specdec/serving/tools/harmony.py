"""GPT-OSS's format: an answer is a sequence of messages, each with a header (role, recipient, channel).

    <|start|>assistant<|channel|>analysis<|message|>TEXT<|end|>                                 a thought
    <|start|>assistant<|channel|>commentary<|message|>TEXT<|end|>                               content, before calls
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>   a call
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>                                 content

The prompt ends with "<|start|>assistant". The recipient may be in the role or after the channel. Source: OpenAI's
harmony response format.
"""

import re
from contextlib import suppress

from specdec.serving.tools.answer_events import Kind
from specdec.serving.tools.character_reader import NAME, CutOff, NotACall, Reading
from specdec.serving.tools.tool_json import JsonToolParser
from specdec.text.stop_strings import ThoughtMarks

START, ROLE, MESSAGE, CALL = "<|start|>", "assistant", "<|message|>", "<|call|>"
ENDS = ("<|end|>", "<|return|>", CALL)
WITHIN_HEADERS = ("<|channel|>", "<|constrain|>")
THOUGHT = "<|channel|>analysis"
MAX_HEADER = 257
RECIPIENT = re.compile(r"to=([^\s<]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
FUNCTIONS = "functions."


class HarmonyParser(JsonToolParser):
    """A message to "functions.NAME", or to a tool of the request, is a call; the channel decides about other
    messages."""

    special = (START, MESSAGE, *ENDS, *WITHIN_HEADERS)
    signs = ("<|channel|>", FUNCTIONS)
    thinks = True
    _text_kind: Kind = "content"  # kind of text without a header

    @property
    def thought_marks(self) -> ThoughtMarks:
        return "" if self._text_kind == "thought" else THOUGHT, ENDS[0]

    def begun_by(self, prompt_end: str, continued: str = "") -> str:
        """The header that the prompt begins."""
        return "" if continued else prompt_end[prompt_end.rfind(START) :] if START in prompt_end else ""

    def _call(self) -> Reading[None]:
        """Read a marker and what belongs to it."""
        for mark in self.special:
            if (yield from self._sees(mark)):
                try:
                    yield from self._marked_by(mark)
                except CutOff:
                    if not self._phase:
                        self._release()  # they begin a header
                    raise
                return
        raise NotACall

    def _marked_by(self, mark: str) -> Reading[None]:
        """Read the header, and the call, that begin with this marker. Raises NotACall if it is not a header; the
        characters stay held."""
        if mark in ENDS or mark == MESSAGE:
            self._release()
            self._kind, self._text_kind = None, "content"
            return
        if mark == START and (yield from self._sees(ROLE)):
            size = self._num_held
            with suppress(NotACall):
                yield from self._text_until(MESSAGE, MAX_HEADER)
            if _is_text(self._held[size:]):
                self._back_to(size)
                self._release()
                self._kind, self._text_kind = None, "content"
                return
            self._back_to(size)
        header = self._held + (yield from self._text_until(MESSAGE, MAX_HEADER))
        header = header[header.rfind(START) :] if START in header else header
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        thought = channel is not None and channel[1] == "analysis"
        self._kind, self._text_kind = None, "thought" if thought else "content"
        if recipient is not None and (name := self._called(recipient[1])):
            yield from self._peek()  # white space before a call belongs to the header
            begins = yield from self._precedes("{")
            if begins or (yield from self._precedes(CALL)):
                self._begin_call(name)
                self._text_kind = "content"
                if begins:
                    yield from self._json_value(self._arguments)
                else:
                    self._arguments("{}")
                yield from self._close(*ENDS)
        self._release()

    def _plain(self, text: str) -> None:
        self._gap = None  # here white space is text
        self._tell_text(self._text_kind, text)

    def _called(self, recipient: str) -> str:
        """The name of the called tool; "" if none."""
        name = recipient.removeprefix(FUNCTIONS)
        known = recipient.startswith(FUNCTIONS) and NAME.fullmatch(name) is not None
        return name if known or name in self._tools else ""


def _is_text(read: str) -> bool:
    """Is this, after the role, a text without a header? Models that were trained on without channels write no header.
    read: up to the mark that ends headers, if there is one."""
    begins = read.lstrip()[:3]
    no_header = MESSAGE not in read or any(mark in read for mark in ENDS)
    return no_header and not begins.startswith("<") and not "to=".startswith(begins)
