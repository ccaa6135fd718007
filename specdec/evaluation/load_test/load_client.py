"""One request to a server that speaks OpenAI's protocol, and when which part of its answer came.

Knows HTTP and the chunks of chat and of completions, and no server in particular. Whatever a server does, `Client.ask`
returns an Answer: a whole one, or one with the kind of its fault. It raises nothing but the cancellation of its task.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.errors import shown
from specdec.evaluation.load_test.sse import events

if TYPE_CHECKING:
    import httpx

PARTS = ("content", "reasoning_content", "reasoning", "refusal")
"""Where the delta of a chat has text."""


class Chunk(NamedTuple):
    """A part of an answer: when it came, its characters, and the answer's tokens so far where the server says so."""

    at: float
    chars: int
    tokens: int | None


class Fault(Exception):
    """Why an answer is not whole: a kind to count it under, and what the server said."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind, self.message = kind, message


@dataclass(slots=True)
class Answer:
    """What came back for one request, times in seconds of one clock. chunks: those that brought text or tokens.

    due: when it was to be sent. fault: None for a whole answer.
    """

    due: float
    sent: float
    ended: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    fault: Fault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How a server is asked. url: up to and without /v1. body: fields that every request has; None takes one out."""

    url: str
    model: str
    max_new_tokens: int
    chat: bool = True
    temperature: float = 0.0
    seed: int = 0
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return f"{self.url}/v1/chat/completions" if self.chat else f"{self.url}/v1/completions"

    def request(self, number: int, prompt: str, stream_options: Mapping[str, bool] | None) -> dict[str, Any]:
        """The body of request `number`. Only what every server of this kind takes, and what the user added."""
        made: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": self.max_new_tokens}
        made |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        made["temperature"] = self.temperature
        if self.temperature > 0:
            made["seed"] = self.seed + number
        if stream_options:
            made["stream_options"] = dict(stream_options)
        return {name: value for name, value in {**made, **self.body}.items() if value is not None}


class Client:
    """Asks one server. stream_options: what it is asked to count; None, {} and others by what it understands."""

    def __init__(
        self,
        http: "httpx.AsyncClient",
        asking: Asking,
        stream_options: Mapping[str, bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._http, self._asking, self._clock = http, asking, clock
        self.stream_options = stream_options

    async def ask(self, number: int, prompt: str, due: float | None = None) -> Answer:
        """Send request `number` and read its answer to the end."""
        now = self._clock()
        answer = Answer(due=now if due is None else due, sent=now)
        body = self._asking.request(number, prompt, self.stream_options)
        import httpx

        try:
            async with self._http.stream("POST", self._asking.endpoint, json=body) as response:
                await self._read(response, answer)
        except Fault as fault:
            answer.fault = fault
        except httpx.TimeoutException as error:
            answer.fault = Fault("timeout", f"{type(error).__name__} after {self._clock() - answer.sent:.1f} s")
        except httpx.ConnectError as error:
            answer.fault = Fault("cannot connect", str(error))
        except httpx.HTTPError as error:
            answer.fault = Fault("connection closed", str(error) or type(error).__name__)
        if not answer.ended:
            answer.ended = self._clock()
        return answer

    async def _read(self, response: "httpx.Response", answer: Answer) -> None:
        if response.status_code != 200:
            raise Fault(f"HTTP {response.status_code}", error_message(await response.aread()))
        kind = response.headers.get("content-type", "")
        if "text/event-stream" not in kind:
            raise Fault("no stream", f"content-type {kind!r}, where text/event-stream was asked for")
        stream = events(response.aiter_bytes())
        async for data in stream:
            if data.strip() == b"[DONE]":
                answer.ended = self._clock()
                break
            take(answer, data, self._clock())
        if answer.finish_reason is None:
            where = "before its end" if not answer.ended else "without a finish_reason"
            raise Fault("ended early", f"the stream ended {where}, after {len(answer.chunks)} chunks of text")
        # what is left is the end of the body: with it the connection can be used again
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                async for _ in stream:
                    pass


def take(answer: Answer, data: bytes, now: float) -> None:
    """Put one event into the answer. Raises Fault where it is no chunk, or an error."""
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Fault("malformed event", f"{shown(data)} is not JSON") from error
    if not isinstance(event, dict):
        raise Fault("malformed event", f"{shown(data)} is not an object")
    if event.get("error") is not None:
        raise Fault("error in the stream", error_message(data))
    usage, choices = event.get("usage"), event.get("choices")
    if usage is not None and not isinstance(usage, dict):
        raise Fault("malformed event", f"usage is {shown(usage)}")
    if not (choices is None or (isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices))):
        raise Fault("malformed event", f"choices are {shown(choices)}")
    tokens = None
    if usage:
        tokens, prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
        answer.prompt_tokens = prompt_tokens if isinstance(prompt_tokens, int) else answer.prompt_tokens
        answer.output_tokens = tokens = tokens if isinstance(tokens, int) else answer.output_tokens
    chars = 0
    for choice in choices or ():
        chars += choice_chars(choice)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    tokens = tokens if choices else None
    before = answer.chunks[-1].tokens if answer.chunks else 0
    more = tokens is not None and before is not None and tokens > before  # tokens that are no text yet
    if chars or more:
        answer.chunks.append(Chunk(now, chars, tokens))


def choice_chars(choice: Mapping[str, Any]) -> int:
    """Characters that a chunk brings to a choice, of whatever kind."""
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    pieces = [choice.get("text"), *(delta.get(part) for part in PARTS)]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            pieces += [function.get("name"), function.get("arguments")]
    return sum(len(piece) for piece in pieces if isinstance(piece, str))


def error_message(body: bytes) -> str:
    """What a server says of an error, in OpenAI's shape or in another, at a readable length."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = body.decode(errors="replace")
    for key in ("error", "message", "detail"):  # {"error": {"message": ...}} and its relatives
        if isinstance(said, dict) and said.get(key):
            said = said[key]
    text = said if isinstance(said, str) else json.dumps(said)
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:200] + "..."
