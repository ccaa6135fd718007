"""Calls of DeepSeek V3 and Kimi-K2: in a section of the answer, each with a head that names the tool, and JSON.

    SECTION BEGIN head SEPARATOR {...} END BEGIN head SEPARATOR {...} END SECTION_END

Markers that end something, and that of the section, may be missing.
"""

import re

from specdec.serving.tools.character_reader import NAME, Reading, require_syntax
from specdec.serving.tools.tool_json import JsonToolParser

FENCE, LANGUAGE = "```", "json"  # of the Markdown block around the arguments
KIMI_ID = re.compile(r"(?:functions\.)?(\S+):[0-9]+")
MAX_KIMI_ID = 160
KIND = "function"


class SectionedCallParser(JsonToolParser):
    """The first five of `special` are the markers above: of the section, of a call, and the separator."""

    def _call(self) -> Reading[None]:
        section, section_ends, begins, ends, separator = self.special
        if (yield from self._sees(section)):
            yield from self._peek()
        yield from self._expect(begins)
        yield from self._peek()
        name = yield from self._called(separator)
        yield from self._peek()
        fences = [FENCE] if (yield from self._sees(FENCE)) else []
        if fences:
            yield from self._sees(LANGUAGE)
        require_syntax((yield from self._peek()) == "{")
        self._begin_call(name)
        yield from self._json_value(self._arguments)
        self._phase, mark = "closing", ends
        while mark not in (section_ends, begins):
            self._release()
            mark = yield from self._one_of(*fences, ends, section_ends, begins)
        if mark == begins:
            self._back_to(0)

    def _called(self, separator: str) -> Reading[str]:
        """Read the head of a call and the separator. Returns the name of the tool."""
        raise NotImplementedError


class DeepSeekParser(SectionedCallParser):
    """The head is NAME in DeepSeek V3.1. In V3 and R1 it is "function", and after the separator follow NAME and the
    JSON as a Markdown block."""

    special = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )

    def _called(self, separator: str) -> Reading[str]:
        name = yield from self._name()
        yield from self._peek()
        yield from self._expect(separator)
        if (yield from self._peek()) not in "{`":
            require_syntax(name == KIND)
            name = yield from self._name()
        return name


class KimiParser(SectionedCallParser):
    """The head is functions.NAME:NUMBER, the call's id in Kimi's chat template. Of a known tool NAME is enough."""

    special = (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    )

    def _called(self, separator: str) -> Reading[str]:
        head = (yield from self._text_until(separator, MAX_KIMI_ID)).rstrip()
        numbered = KIMI_ID.fullmatch(head)
        name = numbered[1] if numbered else head
        require_syntax(NAME.fullmatch(name) and (numbered or name in self._tools))
        return name
