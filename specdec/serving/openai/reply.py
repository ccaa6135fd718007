"""One choice of an answer: converts deltas to events in order, each with its tokens, and events to a chat's message,
streamed or whole.

Deltas may have any number of tokens; it knows no HTTP. Joined events do not depend on how an answer is divided.
A message has one text, one thought and a list of calls, so only the deltas show the order of several texts. Separate
texts of the answer are joined by a line end in the message; around a call they are kept as written.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from specdec.errors import StoppingError
from specdec.runtime.request_output import GenerationOutput, StreamDelta
from specdec.sampling.log_probs import TokenLogprob
from specdec.serving.tools.answer_events import CallArguments, CallBegin, CallEnd, Event, EventTokens, Text
from specdec.serving.tools.answer_parser import AnswerParser, AnswerReader
from specdec.text.detokenize import DraftColours


class Reply:
    """One choice. max_calls: further calls, and everything after them, are left out. scored: do events carry tokens?"""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        show_drafts: bool = False,
        parser: AnswerParser | None = None,
        max_calls: int | None = None,
        *,
        scored: bool = False,
    ) -> None:
        self.thought_tokens = 0
        """Number of thought tokens read so far, without markers."""
        self._last_call_complete = False
        self._scores: list[TokenLogprob] = []
        self._colours = DraftColours(tokenizer, stops) if show_drafts else None
        self._max_calls = max_calls
        plain = parser is None or not parser.written
        self._reader = None if plain and not scored else AnswerReader(tokenizer, parser or AnswerParser(), stops)
        self._begun = False

    def read(self, delta: StreamDelta) -> list[EventTokens]:
        """Events that this delta adds, in order."""
        self._scores += delta.logprobs or []
        if self._reader is None:
            if not delta.text:
                return []  # such as a part of a character
            begins, self._begun = not self._begun, True
            return [EventTokens(Text("content", delta.text, begins), range(0))]
        events = self._kept(self._reader.read(delta))
        for event, tokens in events:
            if isinstance(event, CallEnd):
                self._last_call_complete = event.whole
            elif isinstance(event, Text) and event.kind == "thought":
                self.thought_tokens += len(tokens)
        return events

    @property
    def begins(self) -> list[int]:
        """For each token read so far, the index of its first character in the text. Requires a scored reply."""
        assert self._reader is not None
        return self._reader.begins

    def colours(self, delta: StreamDelta) -> list[tuple[str, bool]] | None:
        """(text, is it from accepted drafts?) for the text that this delta adds; None: not requested."""
        return None if self._colours is None else self._colours.read(delta)

    def scores(self, tokens: range) -> list[TokenLogprob]:
        """Log-probabilities of tokens that were read; empty if not requested."""
        return self._scores[tokens.start : tokens.stop]

    def finish_reason(self, output: GenerationOutput) -> str:
        """ "stop", "length" or "tool_calls". Raises StoppingError for a request that was aborted."""
        if output.finish_reason == "abort":
            raise StoppingError("this answer was ended before its end; the server is stopping")
        return "tool_calls" if output.finish_reason == "stop" and self._last_call_complete else output.finish_reason

    def _kept(self, events: list[EventTokens]) -> list[EventTokens]:
        """The events before the first call beyond `max_calls`."""
        for at, (event, _) in enumerate(events):
            if isinstance(event, CallBegin) and self._max_calls is not None and event.index >= self._max_calls:
                self._max_calls = -1
            if self._max_calls == -1:
                return events[:at]
        return events


def whole_delta(output: GenerationOutput) -> StreamDelta:
    """A whole output as one delta."""
    return StreamDelta(output.text, output.token_ids, output.drafted, output, output.logprobs)


FIELDS = {"thought": "reasoning_content", "content": "content"}
Delta = dict[str, Any]


class MessageBuilder:
    """Builds one message from events. thoughts: include thoughts?"""

    def __init__(self, *, thoughts: bool = True) -> None:
        self._thoughts = thoughts
        self._ends: dict[str, str] = {}  # the last character of each field
        self._after_call = False

    def deltas(self, events: Iterable[EventTokens]) -> list[Delta]:
        """Deltas in OpenAI's form, with one field each; adjacent ones with the same field are joined."""
        deltas: list[Delta] = []
        for event, _ in events:
            delta = self._delta(event)
            if delta is None:
                continue
            if deltas and deltas[-1].keys() == delta.keys():
                _extend(deltas[-1], delta)
            else:
                deltas.append(delta)
        return deltas

    def _delta(self, event: Event) -> Delta | None:
        after_call, self._after_call = self._after_call, isinstance(event, CallEnd)
        match event:
            case Text():
                if not event.text or (event.kind == "thought" and not self._thoughts):
                    return None
                field, before = FIELDS[event.kind], self._ends.get(event.kind, "")
                apart = event.begins and before and not (after_call and event.kind == "content")
                self._ends[event.kind] = event.text[-1]
                return {field: "\n" * bool(apart and not (before + event.text[0]).isspace()) + event.text}
            case CallBegin():
                function = {"name": event.name, "arguments": ""}
                call = {"index": event.index, "id": event.id, "type": "function", "function": function}
                return {"tool_calls": [call]}
            case CallArguments():
                return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        return None


def whole_message(deltas: Sequence[Delta]) -> Delta:
    """Join all deltas to one message, with complete calls."""
    whole: Delta = {}
    for delta in deltas:
        _extend(whole, delta)
    for call in whole.get("tool_calls", ()):
        del call["index"]
    return whole


def _extend(delta: Delta, more: Delta) -> None:
    """Merge `more` into `delta`: parts of each call together, texts joined."""
    for field, value in more.items():
        if isinstance(value, str):
            delta[field] = delta.get(field, "") + value
            continue
        calls = delta.setdefault(field, [])
        for part in value:
            if calls and calls[-1]["index"] == part["index"]:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
            else:
                calls.append(part)
