"""A server that speaks OpenAI's protocol as a script tells it to: answers, errors, pauses and broken connections.

The script is a function of the request's body that yields what is done next: bytes to send as one chunk of the transfer
encoding, seconds to wait, or CUT to break the connection there. It runs in a thread with a loop of its own.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

CUT = object()
GATHER_SECONDS = 30.0
"""How long a request waits for the others; then its connection is cut, and the client reports that."""
HEAD = "HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
Script = Callable[[dict[str, Any]], Iterable[Any]]


def head(status: int = 200, kind: str = "text/event-stream; charset=utf-8") -> str:
    """A str is sent as it is, bytes as a chunk."""
    return HEAD.format(status=status, kind=kind)


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chunk(text: str | None, *, usage: int | None = None, finish: str | None = None, chat: bool = True) -> bytes:
    """One chunk of an answer; usage: its completion tokens so far."""
    part = {"delta": {} if text is None else {"content": text}} if chat else {"text": text or ""}
    made: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": finish, **part}]}
    if usage is not None:
        made["usage"] = {"prompt_tokens": 7, "completion_tokens": usage}
    return event(made)


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})


def answer(
    pieces: Iterable[tuple[str, int]], *, wait: float = 0.0, counts: str = "asked", cut: int | None = None
) -> Script:
    """A script for a good answer: texts and how many tokens each is. counts: "asked" for usage as the body asks for it,
    "never", or "end" from a server that refuses to count in every chunk. cut: breaks the connection before that piece.
    """

    def script(body: dict[str, Any]) -> Iterator[Any]:
        options, chat = body.get("stream_options", {}), "messages" in body
        every = counts == "asked" and options.get("continuous_usage_stats")
        if (counts == "end" and "continuous_usage_stats" in options) or (counts == "never" and options):
            yield head(400, "application/json")
            yield json.dumps({"error": {"message": f"what are {sorted(options)}?"}}).encode()
            return
        yield head()
        if chat:
            yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        total = 0
        for i, (text, tokens) in enumerate(pieces):
            if i == cut:
                yield CUT
            if wait:
                yield wait
            total += tokens
            yield chunk(text, usage=total if every else None, chat=chat)
        yield chunk(None, finish="stop", usage=total if every else None, chat=chat)
        if options.get("include_usage"):
            yield usage(total)
        yield event(b"[DONE]")

    return script


class StandIn:
    """What it was asked, and how many requests were under way at most.

    together: requests that must be under way at the same time before any of them is answered. So the number does not
    depend on how quickly the client sends them. The first request of all is the client's warm-up and is not held.
    """

    def __init__(self, script: Script, metrics: Callable[[], str | None] = lambda: None, *, together: int = 1) -> None:
        self.script, self.metrics, self.together = script, metrics, together
        self._gathered = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.most = self._under_way = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                _, path, _ = line.decode().split()
                headers = {}
                while line := (await reader.readline()).decode().strip():
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                self.paths.append(path)
                self.headers.append(headers)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(path, json.loads(body) if body else {}, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the client has gone, or the others never came
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """-> may the connection be used again?"""
        if not path.endswith("completions"):
            page = json.dumps({"data": [{"id": "stand-in"}]}) if path == "/v1/models" else self.metrics()
            text = page or "nothing here"
            status = 200 if page else 404
            writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
            await writer.drain()
            return True
        self.bodies.append(body)
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        if self.most >= self.together:
            self._gathered.set()
        try:
            if len(self.bodies) > 1:
                await asyncio.wait_for(self._gathered.wait(), GATHER_SECONDS)
            for step in self.script(body):
                if step is CUT:
                    return False
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    writer.write(step.encode() if isinstance(step, str) else b"%x\r\n%b\r\n" % (len(step), step))
                    await writer.drain()
        finally:
            self._under_way -= 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


@contextmanager
def stand_in(
    script: Script, metrics: Callable[[], str | None] = lambda: None, *, together: int = 1
) -> Iterator[StandIn]:
    """The server, listening."""
    made = StandIn(script, metrics, together=together)
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def listen() -> None:
        server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        async with server:
            await stop.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(listen(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield made
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
