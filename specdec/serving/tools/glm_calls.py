"""GLM's calls: NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>. As in Qwen3-Coder's, values have no quotes, and
the tool's schema decides their type."""

from specdec.serving.tools.character_reader import Reading, require_syntax
from specdec.serving.tools.tagged_calls import TaggedCallParser, Tags

GLM = Tags(
    "<tool_call>",
    "<arg_key>",
    "</arg_key>",
    "</tool_call>",
    "</tool_call>",
    on_lines=False,
    value_ends="</arg_value>",
    value_opens="<arg_value>",
)


class GlmCallParser(TaggedCallParser):
    """Reads such calls, for formats that have them."""

    def _glm_call(self) -> Reading[None]:
        """Read a call from its name on. One without arguments is a call only of a known tool."""
        name = yield from self._name()
        ends = [GLM.block_ends] if name in self._tools else []
        require_syntax((yield from self._precedes(GLM.key_opens, *ends)))
        self._begin_call(name)
        yield from self._tagged_arguments(name, GLM)
