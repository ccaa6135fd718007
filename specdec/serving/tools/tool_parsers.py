"""Parsers for models' formats of tool calls, and the choice of the parser by a tokenizer's chat template.

parser = tool_parser_for(tokenizer)          # a class, or None if the template has no tools
reader = AnswerReader(tokenizer, parser())   # for one answer
for delta in engine.stream(...): events = reader.read(delta)
"""

from collections.abc import Mapping
from typing import Any

from specdec.errors import require_one_of
from specdec.serving.tools.answer_parser import AnswerParser
from specdec.serving.tools.character_reader import Reading, require_syntax
from specdec.serving.tools.glm_calls import GlmCallParser
from specdec.serving.tools.harmony import HarmonyParser
from specdec.serving.tools.sectioned_calls import DeepSeekParser, KimiParser
from specdec.serving.tools.tagged_calls import TaggedCallParser, Tags
from specdec.serving.tools.tool_json import JsonToolParser


class HermesParser(JsonToolParser, GlmCallParser):
    """Hermes, Qwen, SmolLM3, Granite 4: <tool_call>{"name": ..., "arguments": {...}}</tool_call>; of Qwen3-Coder
    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, where the first marker may be
    missing; of GLM <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>."""

    special = ("<tool_call>", "</tool_call>")

    def _call(self) -> Reading[None]:
        tags = self.tags
        if not (yield from self._sees(tags.call_opens)):
            yield from super()._call()
            return
        require_syntax((yield from self._name()) in self._tools)
        yield from self._expect(tags.name_ends)
        yield from self._one_of(tags.key_opens, tags.call_ends)
        self._back_to(0)
        yield from self._tagged_call()
        if (yield from self._precedes(tags.block_ends)):
            yield from self._close(tags.block_ends)

    def _calls(self) -> Reading[None]:
        char = yield from self._peek()
        reading = self._tagged_call if char == "<" else super()._calls if char in "{[" else self._glm_call
        yield from reading()


class LlamaParser(JsonToolParser):
    """Llama 3: {"name": ..., "parameters": {...}}; ..., after <|python_tag|> or where the answer begins."""

    special = ("<|python_tag|>",)
    signs = ("<|start_header_id|>", "parameters")
    bare = True

    def _call(self) -> Reading[None]:
        if not (yield from self._sees(self.special[0])):
            require_syntax(self._gap is not None)
        if (yield from self._solid()) != ";" or not self.num_calls:
            self._back()
        yield from self._calls()


class MistralParser(JsonToolParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; later [TOOL_CALLS]NAME[ARGS]{...} for each."""

    special = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def _call(self) -> Reading[None]:
        yield from self._expect("[TOOL_CALLS]")
        if (yield from self._peek()) in "[{":
            yield from self._calls()
            return
        name = yield from self._name()
        yield from self._peek()
        if (yield from self._sees("[CALL_ID]")):
            yield from self._text_until("[")  # skip its id: a new one is made
            self._back()
        if (yield from self._sees("[ARGS]")):
            yield from self._peek()
        require_syntax((yield from self._peek()) == "{")
        self._begin_call(name)
        yield from self._json_value(self._arguments)


class GemmaParser(JsonToolParser):
    """Gemma 4: <|tool_call>call:NAME{key:<|"|>text<|"|>,count:2}<tool_call|>. Only the quotes of keys and texts differ
    from JSON."""

    quote = '<|"|>'
    special = ("<|tool_call>", "<tool_call|>", quote)
    loose = True

    def _calls(self) -> Reading[None]:
        yield from self._expect("call:")
        name = yield from self._name()
        yield from self._expect("{")
        self._back()
        self._begin_call(name)
        yield from self._json_value(self._arguments)


class FunctionGemmaParser(GemmaParser):
    """FunctionGemma: <start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>."""

    quote = "<escape>"
    special = ("<start_function_call>", "<end_function_call>", quote)


class GraniteParser(JsonToolParser):
    """Granite 3, Phi-4-mini: <|tool_call|>[{"name": ..., "arguments": {...}}, ...]."""

    special = ("<|tool_call|>", "<|/tool_call|>")


class CohereParser(JsonToolParser):
    """Cohere: <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>."""

    special = ("<|START_ACTION|>", "<|END_ACTION|>")


class MiniMaxParser(TaggedCallParser):
    """MiniMax-M2: <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>...
    </minimax:tool_call>."""

    special = ("<minimax:tool_call>", "</minimax:tool_call>")
    tags = Tags('<invoke name="', '<parameter name="', '"', "</invoke>", special[1], on_lines=False)

    def _call(self) -> Reading[None]:
        yield from self._expect(self.special[0])
        mark = self.tags.call_opens
        while mark != self.tags.block_ends:
            self._phase = ""
            yield from self._peek()
            yield from self._tagged_call()
            self._phase = "closing"
            self._release()
            mark = yield from self._one_of(self.tags.block_ends, self.tags.call_opens)
            self._back_to(0)
        yield from self._close(mark)


PARSERS: dict[str, type[AnswerParser]] = {
    "gemma4": GemmaParser,
    "functiongemma": FunctionGemmaParser,
    "mistral": MistralParser,
    "harmony": HarmonyParser,
    "cohere": CohereParser,
    "granite": GraniteParser,
    "deepseek_v3": DeepSeekParser,
    "kimi_k2": KimiParser,
    "minimax_m2": MiniMaxParser,
    "hermes": HermesParser,
    "llama": LlamaParser,
}
"""Values of `--tool-parser`, in the order in which templates are checked."""


def require_parser(name: str) -> None:
    require_one_of("tool_parser", name, ("auto", "none", *PARSERS))


def tool_parser_for(tokenizer: Any, name: str = "auto") -> type[AnswerParser] | None:
    """The parser class for a tokenizer's chat template; None if the template has no tools. Make one instance per
    answer. name: a key of `PARSERS` to choose explicitly, or "none"."""
    require_parser(name)
    if name != "auto":
        return PARSERS.get(name)
    template = getattr(tokenizer, "chat_template", None)
    texts: list[str] = list(template.values()) if isinstance(template, Mapping) else [template or ""]
    taught = (
        parser
        for text in texts
        for parser in PARSERS.values()
        if "tool" in text and all(sign in text for sign in parser.signs or parser.special[:1])
    )
    return next(taught, None)
