"""Clients of a server who do not behave: 64 of them at once, by default, for a while.

    streams       a job asked for and read to its end
    slow          the same, read in sips through a small window
    leaves        the connection closed in the middle of the request, before the answer, or in the middle of it
    malformed     what no server can answer; it must refuse it in OpenAI's shape, or with a closed connection
    oversized     a prompt, a body or a header that is too long

Every finished answer is kept by its job, for whoever knows what it should be; what a client saw that it should not have
seen is in `wrong`. Sockets are raw, so that it is known what is sent when.
"""

import asyncio
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 120.0
"""Seconds after which a client takes a server for dead."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def events(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of every server-sent event, however the bytes were cut into blocks."""
    rest = b""
    async for block in blocks:
        *whole, rest = (rest + block).split(b"\n\n")
        for each in whole:
            if each.startswith(b"data: "):
                yield each.removeprefix(b"data: ")
    assert not rest, rest


@dataclass(frozen=True, eq=False)
class Job:
    """What is asked: the same text must come back whoever else asks, and however it is read."""

    prompt: str
    chat: bool
    fields: dict[str, Any]

    @property
    def path(self) -> str:
        return CHAT if self.chat else COMPLETIONS

    def body(self, stream: bool = True) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        return {**asked, **self.fields, "stream": stream}


@dataclass
class Crowd:
    """answers: (text, finish_reason) of each job, every time it was answered. count: what the clients did."""

    url: str
    jobs: Sequence[Job]
    clients: int = 64
    seed: int = 0
    too_long: int = 1 << 16  # words of a prompt that no model here takes
    body_limit: int = 4 << 20
    answers: dict[Job, Counter[tuple[str, str]]] = field(default_factory=dict)
    count: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Until every client has ended what it was at when the time was up."""
        asyncio.run(self._run(time.monotonic() + seconds))

    async def _run(self, until: float) -> None:
        await asyncio.gather(*(self._client(number, until) for number in range(self.clients)))

    async def _client(self, number: int, until: float) -> None:
        draw = random.Random(f"{self.seed} {number}")
        kinds: list[tuple[Callable[[random.Random], Coroutine[Any, Any, None]], int]] = [
            (self._streams, 8),
            (self._whole, 2),
            (self._slow, 2),
            (self._leaves, 6),
            (self._malformed, 2),
            (self._oversized, 1),
        ]
        acts, weights = zip(*kinds, strict=True)
        while time.monotonic() < until:
            [act] = draw.choices(acts, weights)
            name = act.__name__.removeprefix("_")
            try:
                async with asyncio.timeout(PATIENCE):
                    await act(draw)
                self.count[name] += 1
            except Exception as error:
                self.wrong.append(f"client {number}, {name}: {type(error).__name__}: {error}")
                return

    # what a client does

    async def _streams(self, draw: random.Random) -> None:
        job = draw.choice(self.jobs)
        async with self._asked(job.path, job.body()) as (status, blocks):
            await self._read(job, status, blocks)

    async def _whole(self, draw: random.Random) -> None:
        """Not streamed."""
        job = draw.choice(self.jobs)
        async with self._asked(job.path, job.body(stream=False)) as (status, blocks):
            answer = json.loads(b"".join([block async for block in blocks]))
            assert status == 200, answer
            choice = answer["choices"][0]
            text = choice["message"]["content"] if job.chat else choice["text"]
            self._note(job, text, choice["finish_reason"])

    async def _slow(self, draw: random.Random) -> None:
        job = draw.choice(self.jobs)
        async with self._asked(job.path, job.body(), window=1024) as (status, blocks):

            async def sips() -> AsyncIterator[bytes]:
                async for block in blocks:
                    await asyncio.sleep(draw.uniform(0.0, 0.2))
                    yield block

            await self._read(job, status, sips())

    async def _leaves(self, draw: random.Random) -> None:
        job = draw.choice(self.jobs)
        request = self._request(job.path, json.dumps(job.body(draw.random() < 0.8)).encode())
        async with self._connection() as (reader, writer):
            moment = draw.randrange(4)
            if moment == 0:  # in the middle of the request
                writer.write(request[: draw.randrange(1, len(request))])
                await writer.drain()
                return
            writer.write(request)
            await writer.drain()
            if moment == 1:  # before the answer
                await asyncio.sleep(draw.uniform(0.0, 0.3))
                return
            for _ in range(draw.randint(1, 20)):  # in the middle of it
                if not await reader.read(200):
                    break
            if moment == 3:  # without a word: what is under way meets a reset
                linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    async def _malformed(self, draw: random.Random) -> None:
        good = draw.choice(self.jobs)
        body = good.body()
        kind = draw.randrange(8)
        if kind == 0:
            raw = json.dumps(body).encode()
            await self._refused(good.path, raw[: draw.randrange(len(raw))], {400})
        elif kind == 1:
            await self._refused(good.path, draw.randbytes(100), {400})
        elif kind == 2:
            name = draw.choice(["max_tokens", "temperature", "seed", "stop", "stream", "n", "top_p"])
            value = draw.choice([[], {"a": 1}, "many", -1.5, [["x"]], 1e400, -(1 << 70)])
            await self._refused(good.path, json.dumps({**body, name: value}).encode(), {400}, unless=(name, value))
        elif kind == 3:
            await self._refused(good.path, json.dumps({**body, "no_such_field": 1}).encode(), {400})
        elif kind == 4:
            await self._refused(good.path, json.dumps({**body, "model": "no such model"}).encode(), {404})
        elif kind == 5:
            deep = b'{"messages": ' + b"[" * 20000 + b"]" * 20000 + b"}"
            await self._refused(good.path, deep, {400})
        elif kind == 6:
            await self._refused(
                draw.choice(["/v1/nothing", "/v1/chat", "//", "/../etc/passwd"]), b"{}", {400, 404, 405}
            )
        else:  # no HTTP at all
            async with self._connection() as (reader, writer):
                writer.write(
                    draw.choice(
                        [b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01" + draw.randbytes(60), b"POST / HTTP/9\r\n\r\n"]
                    )
                )
                await writer.drain()
                writer.write_eof()
                await reader.read()

    async def _oversized(self, draw: random.Random) -> None:
        job = draw.choice(self.jobs)
        kind = draw.randrange(3)
        if kind == 0:
            long = Job("word " * self.too_long, job.chat, job.fields)
            body = json.dumps(long.body()).encode()
            await self._refused(long.path, body, {413 if len(body) > self.body_limit else 400})
        elif kind == 1:
            await self._refused(job.path, b" " * (self.body_limit + 1), {413})
        else:
            await self._refused(job.path, b"{}", {400, 431}, header="x" * 200_000)

    # how it is done

    async def _refused(
        self, path: str, body: bytes, statuses: set[int], *, unless: Any = None, header: str = ""
    ) -> None:
        """The answer is a refusal in OpenAI's shape; of what may be no mistake (`unless`) any answer will do."""
        try:
            async with self._asked(path, body, header=header) as (status, blocks):
                said = b"".join([block async for block in blocks])
        except (ConnectionError, asyncio.IncompleteReadError):
            if header:  # it did not read all of it before it answered
                return
            raise
        if unless is not None and status == 200:
            return
        assert status in statuses, (status, path, body[:200], said[:200])
        if not header:
            assert isinstance(json.loads(said)["error"]["message"], str), said

    async def _read(self, job: Job, status: int, blocks: AsyncIterator[bytes]) -> None:
        assert status == 200, (status, job, b"".join([block async for block in blocks]))
        text, finish, done = "", None, False
        async for data in events(blocks):
            if data == b"[DONE]":
                done = True
                continue
            chunk = json.loads(data)
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                text += (choice["delta"].get("content") or "") if job.chat else choice["text"]
                finish = choice["finish_reason"] or finish
        assert done and finish, f"ended early: {text!r}"
        self._note(job, text, finish)

    def _note(self, job: Job, text: str, finish: str) -> None:
        self.answers.setdefault(job, Counter())[text, finish] += 1

    def _request(self, path: str, body: bytes, header: str = "") -> bytes:
        lines = [
            f"POST {path} HTTP/1.1",
            "host: here",
            "content-type: application/json",
            f"content-length: {len(body)}",
        ]
        lines += ["connection: close", *([f"x-filler: {header}"] if header else [])]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    @asynccontextmanager
    async def _connection(self, window: int = 0) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        parts = urlsplit(self.url)
        made = socket.socket()
        if window:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, (parts.hostname, parts.port))
        reader, writer = await asyncio.open_connection(sock=made, limit=window or 1 << 16)
        try:
            yield reader, writer
        finally:
            writer.close()

    @asynccontextmanager
    async def _asked(
        self, path: str, body: bytes | dict[str, Any], *, window: int = 0, header: str = ""
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Status and body of an answer."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._connection(window) as (reader, writer):
            writer.write(self._request(path, raw, header))
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            chunked = "transfer-encoding: chunked" in head
            yield int(head[0].split()[1]), _chunks(reader) if chunked else _rest(reader)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while block := await reader.read(1 << 16):
        yield block


class Probe:
    """Asks /health over and over, on a thread of its own: `with Probe(url) as probe`. seconds: how long each took."""

    def __init__(self, url: str, every: float = 0.1) -> None:
        self.url, self.every = url, every
        self.seconds: list[float] = []
        self.bad: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> "Probe":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        import httpx

        with httpx.Client(timeout=30.0) as client:
            while not self._stop.wait(self.every):
                began = time.perf_counter()
                try:
                    response = client.get(f"{self.url}/health")
                    if response.status_code != 200:
                        self.bad.append(f"{response.status_code} {response.text}")
                except httpx.HTTPError as error:
                    self.bad.append(repr(error))
                self.seconds.append(time.perf_counter() - began)
