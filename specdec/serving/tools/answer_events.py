"""Events of an answer in the order of the model's text: thoughts, content and tool calls.

    Text("thought") ...  Text("content") ...  CallBegin CallArguments ... CallEnd  Text("content") ...

Every form of an answer (chat or response, streamed or whole) is a fold over these events. The joined events do not
depend on how the answer was cut into deltas.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["thought", "content"]


@dataclass(frozen=True, slots=True)
class Text:
    """More of a thought or of the content. begins: it starts a new text instead of continuing the previous one."""

    kind: Kind
    text: str
    begins: bool


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Tool call number `index` of the answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments. Joined, they are JSON, unless the call is incomplete."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call.

    whole: its arguments are complete; otherwise they were cut off or became malformed.
    """

    index: int
    whole: bool


Event = Text | CallBegin | CallArguments | CallEnd


class Piece(NamedTuple):
    """An event, and the characters [start, end) of the text from which it was read."""

    event: Event
    start: int
    end: int


class EventTokens(NamedTuple):
    """An event with its tokens. Each token belongs to one event; tokens of markup belong to none."""

    event: Event
    tokens: range
