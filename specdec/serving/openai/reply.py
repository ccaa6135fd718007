"""What one choice says, delta by delta: its content, the tools that it calls, and which of its text was drafted.

All of `content` joined, or of `drafted`, is the choice's text, apart from what it thought and called. It knows deltas
of any number of tokens, and no HTTP.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specdec.errors import StoppingError
from specdec.runtime.request import GenerationOutput, StreamDelta
from specdec.serving.tools.reasoning import ReasoningFormat, ReasoningReader
from specdec.serving.tools.tool_parsers import ContentPiece, MarkedText, Piece, ToolCallPiece, ToolParser
from specdec.text.detokenize import DraftColours


class ReplyDelta(NamedTuple):
    """tool_calls: as OpenAI's deltas have them. drafted: (text, out of accepted drafts?) each; None: not asked for."""

    content: str
    tool_calls: list[dict[str, Any]]
    drafted: list[tuple[str, bool]] | None
    reasoning: str = ""


class Reply:
    """One choice. parser: of tool calls; None: all text is content. max_calls: those beyond, and what follows, are left
    out. reasoning: how thoughts are written; None: they are content. opened: the prompt ends within a thought."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        show_drafts: bool = False,
        parser: type[ToolParser] | None = None,
        parameter_types: dict[str, dict[str, Any]] | None = None,
        max_calls: int | None = None,
        reasoning: ReasoningFormat | None = None,
        opened: bool = False,
    ) -> None:
        self.num_calls = 0
        self._colours = DraftColours(tokenizer, stops) if show_drafts else None
        self._max_calls = max_calls
        self._parser = None if parser is None else parser(parameter_types)
        self._reasoning = None if reasoning is None else ReasoningReader(reasoning, opened=opened)
        special = (() if parser is None else parser.special) + (() if reasoning is None else reasoning.special)
        self._text = MarkedText(tokenizer, special, stops) if special else None

    def read(self, delta: StreamDelta) -> ReplyDelta:
        """What this delta adds."""
        drafted = None if self._colours is None else self._colours.read(delta)
        if self._text is None:
            content = delta.text if drafted is None else "".join(text for text, _ in drafted)
            return ReplyDelta(content, [], drafted)
        content, reasoning, finished = self._text.read(delta), "", delta.output is not None
        if self._reasoning is not None:
            reasoning, content = self._reasoning.feed(content, finished=finished)
        if self._parser is None:
            return ReplyDelta(content, [], drafted, reasoning)
        pieces = self._kept(self._parser.feed(content) + (self._parser.finish() if finished else []))
        content = "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece))
        calls = [self._call(piece) for piece in pieces if isinstance(piece, ToolCallPiece)]
        return ReplyDelta(content, _one_each(calls), drafted, reasoning)

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        """Those before the first call that is one too many."""
        for at, piece in enumerate(pieces):
            if isinstance(piece, ToolCallPiece) and self._max_calls is not None and piece.index >= self._max_calls:
                self._max_calls = -1
            if self._max_calls == -1:
                return pieces[:at]
        return pieces

    def read_output(self, output: GenerationOutput) -> ReplyDelta:
        """All that an output says, as one delta."""
        return self.read(StreamDelta(output.text, output.token_ids, output.drafted, output))

    def read_whole(self, output: GenerationOutput) -> ReplyDelta:
        """All that an output says; calls as a message has them."""
        said = self.read_output(output)
        for call in said.tool_calls:
            del call["index"]
        return said

    def finish_reason(self, output: GenerationOutput) -> str:
        """ "stop", "length" or "tool_calls". Raises StoppingError for a request that was aborted."""
        if output.finish_reason == "abort":
            raise StoppingError("this answer was ended before its end; the server is stopping")
        return "tool_calls" if output.finish_reason == "stop" and self.num_calls else output.finish_reason

    def _call(self, piece: ToolCallPiece) -> dict[str, Any]:
        if piece.name is None:
            return {"index": piece.index, "function": {"arguments": piece.arguments}}
        self.num_calls += 1
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


MakeReply = Callable[[], Reply]
"""Of one request: how its replies are read."""


def _one_each(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of each call in one, in their order."""
    whole: dict[int, dict[str, Any]] = {}
    for call in calls:
        first = whole.setdefault(call["index"], call)
        if first is not call:
            first["function"]["arguments"] += call["function"]["arguments"]
    return list(whole.values())
