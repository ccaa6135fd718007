"""What one choice says, delta by delta: its content, the tools that it calls, and which of its text was drafted.

    reply.read(delta)  ->  Said(content, tool_calls, drafted)

All of `content` joined, or of `drafted`, is the choice's text. It knows deltas of any number of tokens, and no HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdec.errors import StoppingError
from specdec.request import GenerationOutput, StreamDelta
from specdec.serving.tools import ContentPiece, ToolCallPiece, ToolParser, ToolReader
from specdec.text.drafts import DraftColours


class Said(NamedTuple):
    """tool_calls: as OpenAI's deltas have them. drafted: [[text, whether out of accepted drafts], ...]; None: not asked
    for."""

    content: str
    tool_calls: list[dict[str, Any]]
    drafted: list[tuple[str, bool]] | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """How the replies of a request are read. parser: of tool calls; None: all text is content."""

    tokenizer: Any
    stops: Sequence[str] = ()
    show_drafts: bool = False
    parser: type[ToolParser] | None = None
    parameter_types: dict[str, dict[str, Any]] | None = None


class Reply:
    """One choice."""

    def __init__(self, wanted: Wanted) -> None:
        self.num_calls = 0
        self._colours = DraftColours(wanted.tokenizer, wanted.stops) if wanted.show_drafts else None
        self._reader: ToolReader | None = None
        if wanted.parser is not None:
            self._reader = ToolReader(wanted.tokenizer, wanted.parser(wanted.parameter_types), wanted.stops)

    def read(self, delta: StreamDelta) -> Said:
        """What this delta adds."""
        drafted = None if self._colours is None else self._colours.read(delta)
        if self._reader is None:
            content = delta.text if drafted is None else "".join(text for text, _ in drafted)
            return Said(content, [], drafted)
        pieces = self._reader.read(delta)
        content = "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece))
        calls = [self._call(piece) for piece in pieces if isinstance(piece, ToolCallPiece)]
        return Said(content, _one_each(calls), drafted)

    def read_whole(self, output: GenerationOutput) -> Said:
        """All that an output says; calls as a message has them."""
        said = self.read(StreamDelta(output.text, output.token_ids, output.drafted, output))
        for call in said.tool_calls:
            del call["index"]
        return said

    def finish_reason(self, output: GenerationOutput) -> str:
        """ "stop", "length" or "tool_calls". Raises StoppingError for a request that somebody else ended."""
        reason = finish_reason(output)
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    def _call(self, piece: ToolCallPiece) -> dict[str, Any]:
        if piece.name is None:
            return {"index": piece.index, "function": {"arguments": piece.arguments}}
        self.num_calls += 1
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def finish_reason(output: GenerationOutput) -> str:
    """ "stop" or "length". Raises StoppingError for a request that somebody else ended."""
    if output.finish_reason == "abort":
        raise StoppingError("this answer was ended before its end; the server is stopping")
    return output.finish_reason


def _one_each(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of each call in one, in their order."""
    whole: dict[int, dict[str, Any]] = {}
    for call in calls:
        if call["index"] in whole:
            whole[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        else:
            whole[call["index"]] = call
    return list(whole.values())
