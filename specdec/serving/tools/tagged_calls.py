"""Calls of tags: <function=NAME><parameter=KEY>VALUE</parameter></function> of Qwen3-Coder, and those of MiniMax-M2.

Values have no quotes or escapes: the tool's schema decides their type, and the text after a marker decides whether it
is one.
"""

from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from specdec.serving.tools.answer_parser import AnswerParser
from specdec.serving.tools.character_reader import CutOff, Reading
from specdec.serving.tools.schema_types import ANY_TYPE, Types, parameter_types
from specdec.serving.tools.tool_json import MAX_OTHER, quoted, typed

VALUE_ENDS = "</parameter>"


class Tags(NamedTuple):
    """The markers of a call.

    name_ends: follows the name of a tool or parameter. block_ends: the end of the block around calls. on_lines: does a
    value stand between two line ends?
    """

    call_opens: str
    key_opens: str
    name_ends: str
    call_ends: str
    block_ends: str
    on_lines: bool

    @property
    def borders(self) -> tuple[str, str, str]:
        """What may follow a whole value: the next parameter, or the end of the call."""
        return self.key_opens, self.call_ends, self.block_ends


class TaggedCallParser(AnswerParser):
    """Reads such calls, for formats that have them."""

    tags = Tags("<function=", "<parameter=", ">", "</function>", "</tool_call>", on_lines=True)

    def _tagged_call(self) -> Reading[None]:
        """Read a call. A repeated parameter is left out: the first one may have been sent."""
        tags, ends = self.tags, self.tags.borders[1:]
        yield from self._expect(tags.call_opens)
        name = yield from self._name()
        yield from self._expect(tags.name_ends)
        yield from self._end_tag(tags.name_ends)
        self._begin_call(name)
        schema, given, separator = self._tools.get(name), set[str](), "{"
        while (key := (yield from self._next_key(tags.key_opens, tags.name_ends, *ends))) is not None:
            types = ANY_TYPE if schema is None else parameter_types(schema, key)
            text = yield from self._value(_properties(schema) - given - {key}, f"{separator}{quoted(key)}: ", types)
            if key not in given:
                self._arguments(f"{separator}{quoted(key)}: {typed(text, types)}")
            given.add(key)
            separator = ", "
        self._arguments("{}" if separator == "{" else "}")

    def _next_key(self, opens: str, closes: str, *ends: str) -> Reading[str | None]:
        """Read the key of the next argument; None: the call ends. The end of the block stays unread, and markup that is
        cut off is left out."""
        try:
            mark = yield from self._one_of(opens, *ends)
            if mark == opens:
                key = yield from self._text_until(closes)
                yield from self._end_tag(closes)
                return key
            self._at -= len(mark) * (mark == self.tags.block_ends)
            return None
        except CutOff:
            self._release()
            raise

    def _end_tag(self, name_ends: str) -> Reading[None]:
        """Read the rest of a tag after a name in quotes: some models write more attributes."""
        if not name_ends.endswith(">"):
            yield from self._text_until(">", MAX_OTHER)

    def _value(self, others: Collection[str], head: str, types: Types) -> Reading[str]:
        """Read a value up to its end marker. A marker within code does not count unless another parameter or the end of
        the call follows.

        others: parameters that may follow an unclosed one. head: the arguments before the value, if it is cut off.
        """
        self._release()
        tags = self.tags
        ends: dict[bool, int] = {}  # possible ends: before any marker, and before one at a border
        calls = 0  # open quoted calls in the value
        with suppress(CutOff):
            while True:
                if (yield from self._next()) != "<":
                    continue
                self._back()
                size = self._num_held
                if (yield from self._sees(VALUE_ENDS)):
                    ends[False] = size
                    if (yield from self._precedes(*tags.borders)):
                        ends[True] = ends.get(True, size) if calls else size
                        if not calls:
                            break
                elif (yield from self._sees(tags.call_opens)):
                    calls += 1
                elif (yield from self._sees(tags.call_ends)):
                    if not calls and (yield from self._precedes(tags.block_ends)):
                        self._back_to(size)
                        return self._take_value(size)
                    calls = max(0, calls - 1)
                elif not calls and (
                    yield from self._precedes(*(f"{tags.key_opens}{name}{tags.name_ends}" for name in others))
                ):
                    return self._take_value(size)
                else:
                    yield from self._next()
        if not ends:
            self._cut_value(head, types)
            raise CutOff
        size = ends.get(True, ends[False])
        self._back_to(size + len(VALUE_ENDS))
        return self._take_value(size)

    def _cut_value(self, head: str, types: Types) -> None:
        """Report the held part of a value that was cut off."""
        text = self._held.removeprefix("\n" * self.tags.on_lines)
        self._arguments(head + (quoted(text)[:-1] if "string" in types else text))

    def _take_value(self, size: int) -> str:
        """The held value, without the line ends around it."""
        text, line_end = self._held[:size], "\n" * self.tags.on_lines
        self._release()
        return text.removeprefix(line_end).removesuffix(line_end)


def _properties(schema: object) -> set[str]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return set(found) if isinstance(found, dict) else set()
