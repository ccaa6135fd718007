"""Parts of an answer, in the order in which the model wrote them: thoughts, content and tool calls.

    Text("thought") ...  Text("content") ...  CallBegin CallArguments ... CallEnd  Text("content") ...

Every shape of an answer (chat, response; streamed, whole) is a fold over these events. However an answer is cut into
deltas, the events joined are the same.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["thought", "content"]


@dataclass(frozen=True, slots=True)
class Text:
    """More of a thought or of the content. begins: it is the first of its text, which goes on from none before."""

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
    """More of a call's arguments. All of them, joined, are JSON, unless the call is not whole."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call.

    whole: its arguments are complete; otherwise they were cut off, or malformed from some character on.
    """

    index: int
    whole: bool


Event = Text | CallBegin | CallArguments | CallEnd


class Piece(NamedTuple):
    """An event, and the characters [start, end) of the written text that it was read from."""

    event: Event
    start: int
    end: int


class Said(NamedTuple):
    """An event, and its tokens of the answer: each token belongs to one event, those of markup to none."""

    event: Event
    tokens: range
