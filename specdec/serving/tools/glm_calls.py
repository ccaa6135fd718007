"""GLM's calls: NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>. As in Qwen3-Coder's, values have no quotes, and
the tool's schema decides their type."""

from specdec.serving.tools.character_reader import CutOff, Reading, require_syntax
from specdec.serving.tools.schema_types import ANY_TYPE, parameter_types
from specdec.serving.tools.tagged_calls import TaggedCallParser
from specdec.serving.tools.tool_json import quoted, typed

KEY_OPENS, KEY_ENDS, VALUE_OPENS, VALUE_ENDS = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class GlmCallParser(TaggedCallParser):
    """Reads such calls, for formats that have them."""

    def _glm_call(self) -> Reading[None]:
        """Read a call from its name on. One without arguments is a call only of a known tool."""
        block_ends = self.tags.block_ends
        name = yield from self._name()
        require_syntax((yield from self._precedes(KEY_OPENS, *([block_ends] if name in self._tools else []))))
        self._begin_call(name)
        schema, separator = self._tools.get(name), "{"
        while (key := (yield from self._next_key(KEY_OPENS, KEY_ENDS, block_ends))) is not None:
            types = ANY_TYPE if schema is None else parameter_types(schema, key)
            head = f"{separator}{quoted(key)}: "
            self._release()
            try:
                yield from self._peek()
                yield from self._sees(VALUE_OPENS)  # at times it is left out
                self._release()
                text = yield from self._text_until(VALUE_ENDS)
            except CutOff:
                self._cut_value(head, types)
                raise
            self._arguments(head + typed(text, types))
            separator = ", "
        self._arguments("{}" if separator == "{" else "}")
