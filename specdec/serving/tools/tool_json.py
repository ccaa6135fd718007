"""Tool calls in JSON: {"name": ..., "arguments": {...}}, or a list of them, with any markers.

Values are checked and passed on character by character, so that arguments stream. Harmless mistakes are repaired: line
ends in strings, lone backslashes, a missing last brace.
"""

import ast
import json
import re
import string
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from specdec.serving.tools.answer_parser import AnswerParser
from specdec.serving.tools.character_reader import NAME, CutOff, NotACall, Reading, require_syntax
from specdec.serving.tools.schema_types import NO_TYPE, type_of

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_CHARACTERS = frozenset("+-.0123456789eE")
JSON_SPACE = frozenset(" \t\n\r")
ESCAPED = frozenset('"\\/bfnrtu')
ORDINARY = re.compile(r'[^"\\\x00-\x1f]+')
"""Characters that strings hold as they are."""
WORDS = {"t": "true", "f": "false", "n": "null"}
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
BARE = re.compile(r"[^,}\]\n]")
"""A character of a value without quotes."""
BARE_KEY = re.compile(r"[^\s,:=<>(){}\[\]]")
WITHIN_TEXT = re.compile(r"[^:<{}\[\]\n]")
LOOSE_RUN = re.compile("[^<']+")
"""Characters of a text that begin neither a quote nor a marker."""
QUOTED_KEYS = "{'"
"""Marks an object whose keys have quotes."""
MAX_JSON_DEPTH = 64
NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("id", "type", "tool_call_id")
MAX_NAME = 128
MAX_OTHER = 256
"""Most characters of such a key's value: text that is not a call is then not reread to its end again and again."""


class JsonToolParser(AnswerParser):
    """Reads calls in JSON between two markers, the first of `special`."""

    quote = ""
    """Another quote around texts, within which nothing is escaped; empty: none."""
    loose = False
    """May keys and texts have no quotes, or ' for quotes? White space between values is then not passed on."""
    bare = False
    """Are calls without markers, so that one must have arguments?"""

    def _call(self) -> Reading[None]:
        opens, closes = self.special[:2]
        yield from self._expect(opens)
        yield from self._calls()
        yield from self._close(closes)

    def _calls(self) -> Reading[None]:
        """Read what is between the markers: a call {"name": ..., "arguments": {...}}, or a list of calls."""
        if (yield from self._peek()) == "{":
            yield from self._json_call()
            return
        yield from self._expect("[")
        char = ","
        while char == ",":
            self._phase = ""
            yield from self._peek()
            yield from self._json_call()
            char = yield from self._solid()
        require_syntax(char == "]")
        self._release()

    def _json_call(self) -> Reading[None]:
        """Read a call with its members in any order."""
        yield from self._expect("{")
        name = arguments = None
        begun, char = False, (yield from self._solid())
        while char != "}":
            self._back()
            key = yield from self._json_name()
            require_syntax((yield from self._solid()) == ":")
            if key in NAME_KEYS and name is None:
                name = yield from self._json_name()
                require_syntax(NAME.fullmatch(name))
            elif key in ARGUMENT_KEYS and arguments is None:
                if name is not None and (yield from self._peek()) == "{":
                    begun = True
                    self._begin_call(name)
                    yield from self._json_value(self._arguments)
                    arguments, self._phase = "", "closing"
                else:
                    arguments = _arguments_json((yield from self._json_text()))
            else:
                require_syntax(key in OTHER_KEYS)
                yield from self._json_text(MAX_OTHER)
            char = yield from self._solid()
            if char == ",":
                char = yield from self._solid()
            elif char != "}":
                require_syntax(begun)
                self._back()  # a brace was forgotten
                break
        if not begun:
            if name is None or (self.bare and arguments is None):
                raise NotACall
            self._begin_call(name)
            self._arguments(arguments or "{}")
            self._phase = "closing"
        self._release()

    def _json_name(self) -> Reading[str]:
        """Read a short string, such as a key."""
        require_syntax((yield from self._peek()) == '"')
        return str(_parse_json((yield from self._json_text(MAX_NAME))))

    def _json_text(self, most: int = 1 << 30) -> Reading[str]:
        """Read any value as a whole. Raises NotACall if it has more than `most` characters, without quotes."""
        read, left = list[str](), most + 2

        def sink(text: str) -> None:
            nonlocal left
            read.append(text)
            left -= len(text)
            require_syntax(left >= 0)

        yield from self._json_value(sink)
        return "".join(read)

    def _json_value(self, sink: Callable[[str], None], depth: int = 0, within: str = "") -> Reading[None]:
        """Read any value and pass it on. within: "[", "{" or `QUOTED_KEYS`: the list or object that it is part of."""
        yield from self._json_solid(sink)
        self._back()
        if (yield from self._quoted(sink, within, depth)):
            return
        char = yield from self._next()
        if char in "{[" and depth < MAX_JSON_DEPTH:
            sink(char)
            yield from self._json_items(char, sink, depth + 1)
        elif self.loose:
            require_syntax(char not in "{}[],:")
            sink((yield from self._bare_value(char, within)))
        elif char in NUMBER_CHARACTERS:
            char += yield from self._while(lambda more: more in NUMBER_CHARACTERS)
            require_syntax(NUMBER.fullmatch(char))
            sink(char)
        else:
            require_syntax(char in WORDS)
            yield from self._expect(WORDS[char][1:])
            sink(WORDS[char])

    def _json_items(self, opened: str, sink: Callable[[str], None], depth: int) -> Reading[None]:
        """Read the items after a brace or bracket, and the closing one."""
        closing = "}" if opened == "{" else "]"
        char = yield from self._json_solid(sink)
        while char != closing:
            self._back()
            within = opened
            if opened == "{" and (yield from self._json_key(sink)):
                within = QUOTED_KEYS
            yield from self._json_value(sink, depth, within)
            char = yield from self._json_solid(sink)
            require_syntax(char in (",", closing))
            if char == ",":
                after = [", " if self.loose else ","]
                char = yield from self._json_solid(after.append)
                if char != closing:  # otherwise it was a trailing comma
                    self._back()
                    sink("".join(after))
                    yield from self._next()
        sink(closing)

    def _json_key(self, sink: Callable[[str], None]) -> Reading[bool]:
        """Read a key and its colon. Returns whether it has quotes."""
        has_quotes = yield from self._quoted(sink)
        if not has_quotes:
            require_syntax(self.loose)
            key = yield from self._while(lambda char: char not in ':{}[],"')
            require_syntax(key.rstrip() and (yield from self._precedes(":")))
            sink(quoted(key.rstrip()))
        require_syntax((yield from self._json_solid(sink)) == ":")
        sink(": " if self.loose else ":")
        return has_quotes

    def _quoted(self, sink: Callable[[str], None], within: str = "", depth: int = 0) -> Reading[bool]:
        """Read a text with its quotes, if one comes next; as a key, if it is within nothing."""
        char = yield from self._next()
        if char == '"':
            sink(char)
            yield from self._json_string(sink)
        elif self.loose and char in ("'", self.quote[0]):
            mark = "'" if char == "'" else self.quote
            yield from self._expect(mark[1:])
            sink('"')
            yield from self._loose_text(mark, sink, within, depth)
            sink('"')
        else:
            self._back()
            return False
        return True

    def _loose_text(self, mark: str, sink: Callable[[str], None], within: str, depth: int) -> Reading[None]:
        """Read a text up to the quote `mark` that ends it. A model may write the format's quote for those in code."""
        while True:
            if (yield from self._sees(mark)):
                if not within or (yield from self._ends_value(within, depth)):
                    return
                sink(quoted(mark if mark == "'" else '"')[1:-1])
            else:
                require_syntax(not (yield from self._sees(self.special[1])))
                text = (yield from self._next()) + self._read_run(LOOSE_RUN)
                sink(quoted(text)[1:-1])

    def _ends_value(self, within: str, depth: int) -> Reading[bool]:
        """Did a value end here? Then the next key or item follows, or the end of the object or list. Reads nothing."""
        size = self._num_held
        try:
            char = yield from self._solid()
            if within == "[":
                return char in ",]"
            if char == "}":
                return (yield from self._solid()) in ("<" if depth == 1 else ",}]")
            if char != ",":
                self._back()
                return (yield from self._sees(self.special[1]))
            char = yield from self._peek()
            if within == QUOTED_KEYS and (yield from self._sees(self.quote)):
                yield from self._text_until(self.quote, MAX_NAME)
            else:
                yield from self._while(BARE_KEY.match)
            return char == "}" or (yield from self._peek()) == ":"
        except NotACall as error:
            return isinstance(error, CutOff)
        finally:
            self._back_to(size)

    def _bare_value(self, text: str, within: str) -> Reading[str]:
        """Read the rest of a value that has no quote, or only the last one, as JSON."""
        text += yield from self._while(BARE.match)
        while within != "[" and typed(text, NO_TYPE)[0] == '"' and (yield from self._is_text_with_comma(text)):
            text += yield from self._next()
            text += yield from self._while(BARE.match)
        text = text.rstrip()
        if not text.endswith(self.quote):
            return typed(text, NO_TYPE)
        return quoted(text.removesuffix(self.quote).replace(self.quote, '"'))

    def _is_text_with_comma(self, text: str) -> Reading[bool]:
        """Does a text without its first quote go on after a comma? Then its last quote follows, and no key before it.
        Reads nothing."""
        size = self._num_held
        try:
            more = yield from self._while(WITHIN_TEXT.match, MAX_OTHER)
            is_text = more.rstrip()[-1:] not in ("", ",") and self.quote not in text
            return is_text and (yield from self._sees(self.quote))
        except NotACall:
            return False
        finally:
            self._back_to(size)

    def _json_string(self, sink: Callable[[str], None]) -> Reading[None]:
        """Read the rest of a string with its last quote, escaping what JSON requires."""
        while (char := (yield from self._next())) != '"':
            if char == "\\":
                char += yield from self._next()
                if char[1] not in ESCAPED:  # a literal backslash, as in a regular expression
                    self._back()
                    char = "\\\\"
                elif char[1] == "u":
                    for _ in range(4):
                        char += yield from self._next()
                        require_syntax(char[-1] in string.hexdigits)
            elif char >= " ":
                char += self._read_run(ORDINARY)
            sink(json.dumps(char)[1:-1] if char < " " else char)
        sink(char)

    def _json_solid(self, sink: Callable[[str], None]) -> Reading[str]:
        if self.loose:
            return (yield from self._solid())
        while (char := (yield from self._next())) in JSON_SPACE:
            sink(char)
        return char


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise NotACall from None


def _arguments_json(text: str) -> str:
    """The JSON of arguments that are an object, an object in a string, or null."""
    text = json.loads(text) if text.lstrip().startswith('"') else text.strip()
    value = _parse_json(text)
    require_syntax(value is None or isinstance(value, dict))
    return "{}" if value is None else text


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def typed(text: str, types: frozenset[str]) -> str:
    """Convert an unquoted value to JSON: of a type that its schema accepts, else of the type that it looks like."""
    written = PYTHON_WORDS.get(text, text)
    try:
        value = json.loads(written, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return quoted(text) if "string" in types else _repaired(text, types)
    fits = "string" not in types or type_of(value) in types - {"string"}
    return written if fits else quoted(text)


def _repaired(text: str, types: frozenset[str]) -> str:
    """Convert a list or object with line ends in its strings, or written as in Python, if its schema accepts it."""
    for read in (partial(json.loads, strict=False), ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            value = read(text.strip())
            if type_of(value) in types & {"array", "object"}:
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return quoted(text)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
