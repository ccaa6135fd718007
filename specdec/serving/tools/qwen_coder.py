"""Qwen3-Coder's calls: <function=NAME><parameter=KEY>VALUE</parameter></function>. Values have no quotes or escapes:
the tool's schema decides their type, and the text after a marker decides whether it is one."""

from collections.abc import Collection
from contextlib import suppress

from specdec.serving.tools.answer_parser import AnswerParser
from specdec.serving.tools.character_reader import CutOff, Reading
from specdec.serving.tools.schema_types import ANY_TYPE, Types, parameter_types
from specdec.serving.tools.tool_json import quoted, typed

VALUE_ENDS, CALL_OPENS, CALL_ENDS, NEXT = "</parameter>", "<function=", "</function>", "<parameter="
BLOCK_ENDS = "</tool_call>"
BORDERS = (NEXT, CALL_ENDS, BLOCK_ENDS)
"""What may follow a whole value: the next parameter, or the end of the call."""


class TaggedCallParser(AnswerParser):
    """Reads such calls, for formats that have them."""

    def _tagged_call(self) -> Reading[None]:
        """Read a call. A repeated parameter is left out: the first one may have been sent."""
        yield from self._expect(CALL_OPENS)
        name = yield from self._name()
        yield from self._expect(">")
        self._begin_call(name)
        schema, given, separator = self._tools.get(name), set[str](), "{"
        while (key := (yield from self._next_key(NEXT, ">", CALL_ENDS, BLOCK_ENDS))) is not None:
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
                return (yield from self._text_until(closes))
            self._at -= len(mark) * (mark == BLOCK_ENDS)
            return None
        except CutOff:
            self._release()
            raise

    def _value(self, others: Collection[str], head: str, types: Types) -> Reading[str]:
        """Read a value up to its end marker. A marker within code does not count unless another parameter or the end of
        the call follows.

        others: parameters that may follow an unclosed one. head: the arguments before the value, if it is cut off.
        """
        self._release()
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
                    if (yield from self._precedes(*BORDERS)):
                        ends[True] = ends.get(True, size) if calls else size
                        if not calls:
                            break
                elif (yield from self._sees(CALL_OPENS)):
                    calls += 1
                elif (yield from self._sees(CALL_ENDS)):
                    if not calls and (yield from self._precedes(BLOCK_ENDS)):
                        self._back_to(size)
                        return self._take_value(size)
                    calls = max(0, calls - 1)
                elif not calls and (yield from self._precedes(*(f"{NEXT}{name}>" for name in others))):
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
        text = self._held.removeprefix("\n")
        self._arguments(head + (quoted(text)[:-1] if "string" in types else text))

    def _take_value(self, size: int) -> str:
        """The held value without the line ends around it."""
        text = self._held[:size]
        self._release()
        return text.removeprefix("\n").removesuffix("\n")


def _properties(schema: object) -> set[str]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return set(found) if isinstance(found, dict) else set()
