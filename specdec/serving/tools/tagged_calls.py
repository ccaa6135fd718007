"""Calls of tags: <function=NAME><parameter=KEY>VALUE</parameter></function> of Qwen3-Coder, and those of MiniMax-M2 and
GLM.

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


class Tags(NamedTuple):
    """The markers of a call.

    name_ends: follows the name of a tool or parameter. block_ends: the end of the block around calls. on_lines: does a
    value stand between two line ends? value_opens: may precede a value.
    """

    call_opens: str
    key_opens: str
    name_ends: str
    call_ends: str
    block_ends: str
    on_lines: bool
    value_ends: str = "</parameter>"
    value_opens: str = ""

    @property
    def borders(self) -> tuple[str, str, str]:
        """What may follow a whole value: the next parameter, or the end of the call."""
        return self.key_opens, self.call_ends, self.block_ends


class TaggedCallParser(AnswerParser):
    """Reads such calls, for formats that have them."""

    tags = Tags("<function=", "<parameter=", ">", "</function>", "</tool_call>", on_lines=True)

    def _tagged_call(self) -> Reading[None]:
        tags = self.tags
        yield from self._expect(tags.call_opens)
        name = yield from self._name()
        yield from self._expect(tags.name_ends)
        yield from self._end_tag(tags.name_ends)
        self._begin_call(name)
        yield from self._tagged_arguments(name, tags)

    def _tagged_arguments(self, name: str, tags: Tags) -> Reading[None]:
        """Read a call's arguments. A repeated parameter is left out: the first one may have been sent."""
        schema, given, separator = self._tools.get(name), set[str](), "{"
        while (key := (yield from self._next_key(tags))) is not None:
            types = ANY_TYPE if schema is None else parameter_types(schema, key)
            head = f"{separator}{quoted(key)}: "
            text = yield from self._value(tags, _properties(schema) - given - {key}, head, types)
            if key not in given:
                self._arguments(head + typed(text, types))
            given.add(key)
            separator = ", "
        self._arguments("{}" if separator == "{" else "}")

    def _next_key(self, tags: Tags) -> Reading[str | None]:
        """Read the key of the next argument; None: the call ends. The end of the block stays unread, and markup that is
        cut off is left out."""
        try:
            mark = yield from self._one_of(*tags.borders)
            if mark == tags.key_opens:
                key = yield from self._text_until(tags.name_ends)
                yield from self._end_tag(tags.name_ends)
                return key
            self._at -= len(mark) * (mark == tags.block_ends)
            return None
        except CutOff:
            self._release()
            raise

    def _end_tag(self, name_ends: str) -> Reading[None]:
        """Read the rest of a tag after a name in quotes: some models write more attributes."""
        if not name_ends.endswith(">"):
            yield from self._text_until(">", MAX_OTHER)

    def _value(self, tags: Tags, others: Collection[str], head: str, types: Types) -> Reading[str]:
        """Read a value up to its end marker. A marker within code does not count unless another parameter or the end of
        the call follows. A value without end marker ends at another parameter or at the end of the call.

        others: parameters that may follow an unclosed one. head: the arguments before the value, if it is cut off.
        """
        self._release()
        ends: dict[bool, int] = {}  # possible ends: before any marker, and before one at a border
        unclosed: int | None = None  # the value's end if none of its own follows
        calls = 0  # open quoted calls in the value
        with suppress(CutOff):
            if tags.value_opens:
                yield from self._peek()
                yield from self._sees(tags.value_opens)  # at times it is left out
                self._release()
            while True:
                if (yield from self._next()) != "<":
                    continue
                self._back()
                size = self._num_held
                if (yield from self._sees(tags.value_ends)):
                    ends[False] = size
                    if (yield from self._precedes(*tags.borders)):
                        ends[True] = ends.get(True, size) if calls else size
                        if not calls:
                            break
                elif (yield from self._sees(tags.call_opens)):
                    calls += 1
                elif (yield from self._sees(tags.call_ends)):
                    if not calls and (yield from self._precedes(tags.block_ends, tags.call_opens)):
                        return self._take_value(tags, size)
                    unclosed = size if unclosed is None and not calls else unclosed
                    calls = max(0, calls - 1)
                elif unclosed is None and not calls and (yield from self._sees(tags.block_ends)):
                    unclosed = size
                elif not calls and (
                    yield from self._precedes(*(f"{tags.key_opens}{name}{tags.name_ends}" for name in others))
                ):
                    return self._take_value(tags, size)
                else:
                    yield from self._next()
        if ends:
            return self._take_value(tags, ends.get(True, ends[False]), tags.value_ends)
        if unclosed is None or self._cut:
            self._cut_value(tags, head, types)
            raise CutOff
        return self._take_value(tags, unclosed)

    def _cut_value(self, tags: Tags, head: str, types: Types) -> None:
        """Report the held part of a value that was cut off."""
        text = self._held.removeprefix("\n" * tags.on_lines)
        self._arguments(head + (quoted(text)[:-1] if "string" in types else text))

    def _take_value(self, tags: Tags, size: int, end: str = "") -> str:
        """The first `size` held characters, without the line ends around them. end: the marker after them, read too."""
        text, line_end = self._held[:size], "\n" * tags.on_lines
        self._back_to(size + len(end))
        self._release()
        return text.removeprefix(line_end).removesuffix(line_end)


def _properties(schema: object) -> set[str]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return set(found) if isinstance(found, dict) else set()
