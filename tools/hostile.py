"""Hostile clients, one kind after the other, with good streams next to them: what does a server by itself?

    python tools/hostile.py                               `specdec serve` of the bundled pair
    python tools/hostile.py --url http://127.0.0.1:8000   any server of it, such as one with a proxy before it
    python tools/hostile.py --only "slow head" "noise" --seconds 20

Prints a line for each kind: what its clients saw, how many good streams ended with the text of the quiet server, and
the slowest /health. Returns 1 when a good stream was wrong, /health failed, or a status from 500 on was sent.
"""

import argparse
import asyncio
import functools
import json
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from bench.report import table_head, table_row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from server_process import running_server

OPTIONS = ["--batch-size", "16", "--max-model-len", "1024", "--max-waiting", "64", "--client-concurrency", "24"]
OPTIONS += ["--timeout-body", "5", "--timeout-keep-alive", "5"]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LARGE = 4_000_000  # bytes: the server takes 4 MiB
ALLOWED = {"503"}  # of the statuses from 500 on: a server may say that it is full
PATIENCE = 30.0  # seconds without a byte after which an answer is given up


class Client:
    """Sends bytes on sockets of its own, and says in a few words what came of it."""

    def __init__(self, url: str, seconds: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self.address = (parts.hostname, parts.port)
        self.seconds = seconds  # for which it holds a connection

    @asynccontextmanager
    async def connected(self, window: int = 0) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        made = socket.socket()
        if window:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, self.address)
        reader, writer = await asyncio.open_connection(sock=made, limit=window or 1 << 16)
        try:
            yield reader, writer
        finally:
            writer.close()

    def head(self, path: str, length: int | None, *headers: str, method: str = "POST") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: here", "Content-Type: application/json", *headers]
        lines += [] if length is None else [f"Content-Length: {length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def request(self, body: bytes, *headers: str, path: str = CHAT) -> bytes:
        return self.head(path, len(body), *headers) + body

    async def answer(self, raw: bytes, *, end: bool = False) -> bytes:
        """What is answered to these bytes. end: the client closes its half after them."""
        async with self.connected() as (reader, writer):
            with suppress(ConnectionError):  # it may be refused before all is sent
                writer.write(raw)
                await writer.drain()
                if end:
                    writer.write_eof()
            return await read(reader, PATIENCE)

    async def status(self, raw: bytes, *, end: bool = False) -> str:
        return status(await self.answer(raw, end=end))

    async def held(self, *pieces: bytes) -> str:
        """Send a piece now and then, the last one again and again, until the server closes or the time is over."""
        began = time.monotonic()
        async with self.connected() as (reader, writer):
            answer = asyncio.create_task(read(reader))
            step = 0
            while not answer.done() and time.monotonic() < began + self.seconds:
                with suppress(ConnectionError):
                    writer.write(pieces[min(step, len(pieces) - 1)] if pieces else b"")
                    await writer.drain()
                step += 1
                await asyncio.wait({answer}, timeout=0.3)
            took = time.monotonic() - began
            if not answer.done():
                answer.cancel()
                return f"open after {took:.0f} s"
            return f"{status(answer.result())} after {took:.0f} s"


Act = Callable[[Client], Awaitable[str]]


async def read(reader: asyncio.StreamReader, seconds: float | None = None) -> bytes:
    """All until the server closes or resets, or sends nothing for so long."""
    blocks = []
    with suppress(ConnectionError, TimeoutError):
        while block := await asyncio.wait_for(reader.read(1 << 16), seconds):
            blocks.append(block)
    return b"".join(blocks)


def status(said: bytes) -> str:
    """Status of the last answer, or "closed"."""
    return said.rpartition(b"HTTP/1.1 ")[2][:3].decode("latin-1") if b"HTTP/1.1 " in said else "closed"


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8} | fields).encode()


ENDLESS = chat(max_tokens=900, ignore_eos=True, stream=True)


# sockets


async def many_idle(client: Client) -> str:
    seen = await asyncio.gather(*(client.held() for _ in range(75)), return_exceptions=True)
    [(word, count)] = Counter(map(str, seen)).most_common(1)
    return f"{word} ({count} of {len(seen)})"


async def come_and_go(client: Client) -> str:
    for _ in range(200):
        async with client.connected():
            pass
    return "left"


def chunks(size: int, count: int) -> Act:
    """A body in this many chunks of this size."""

    async def act(client: Client) -> str:
        head = client.head(CHAT, None, "Transfer-Encoding: chunked", "Connection: close")
        return await client.status(head + b"%x\r\n%b\r\n" % (size, b" " * size) * count + b"0\r\n\r\n")

    return act


async def never_reads(client: Client) -> str:
    async with client.connected(window=1024) as (reader, writer):
        writer.write(client.request(chat(max_tokens=900, ignore_eos=True, stream=True, n=2, logprobs=True)))
        await writer.drain()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(client.seconds)
    return "left"


def each_of(make: Callable[[Client], Sequence[bytes]], *, end: bool = False) -> Act:
    """Sends each of these on a connection of its own."""

    async def act(client: Client) -> str:
        return " ".join(sorted({await client.status(raw, end=end) for raw in make(client)}))

    return act


def noise(client: Client) -> list[bytes]:
    pieces = [b"\r\n" * 5000, bytes(range(256)) * 200, b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"a: b\r\n\r\n"]
    hellos = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 99, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + b"\7" * 508]
    return pieces + hellos


def false_lengths(client: Client) -> list[bytes]:
    lengths = ("-1", "1e3", "99999999999999999999", "4, 5", "0x10", "5\r\nContent-Length: 6")
    return [client.head(CHAT, None, f"Content-Length: {each}", "Connection: close") + b"{}   " for each in lengths]


def odd_paths_and_methods(client: Client) -> list[bytes]:
    paths = ("/%0aERROR%20forged", "/" + "a" * 30_000, "/../../etc/passwd", "//", "/%00", "http://elsewhere/", "*")
    methods = ("TRACE", "CONNECT", "PUT", "X" * 5000)
    heads = [client.head(path, 0, "Connection: close") for path in paths]
    return heads + [client.head(CHAT, 0, "Connection: close", method=method) for method in methods]


async def pipelined(client: Client) -> str:
    one, last = client.head("/health", None, method="GET"), client.head("/health", None, "Connection: close")
    said = await client.answer(one * 64 + last.replace(b"POST", b"GET"))
    return f"{said.count(b'HTTP/1.1 200')} of 65 answered"


def leaves(body: bytes, sent: int | None = None, *, reset: bool = False) -> Act:
    """Sends this many bytes of a request, and leaves; of a whole one, in the middle of its answer."""

    async def act(client: Client) -> str:
        async with client.connected() as (reader, writer):
            writer.write(client.request(body)[:sent])
            await writer.drain()
            if sent is None:
                await reader.read(200)
            if reset:
                linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        return "left"

    return act


# bodies


def posts(make: Callable[[], bytes | list[bytes]], path: str = CHAT) -> Act:
    """Each of these bodies, which are made when they are first sent."""
    made = functools.cache(make)

    def requests(client: Client) -> list[bytes]:
        bodies = made()
        bodies = bodies if isinstance(bodies, list) else [bodies]
        return [client.request(body, "Connection: close", path=path) for body in bodies]

    return each_of(requests)


KINDS: dict[str, Act] = {
    "slow head": lambda client: client.held(client.head(CHAT, 9)[:-2], b"X-A: b\r\n"),
    "slow body": lambda client: client.held(client.request(b" " * 4096)[:-4096], b" "),
    "idle from the start": Client.held,
    "idle after an answer": lambda client: client.held(client.head("/health", None, method="GET"), b""),
    "75 idle connections each": many_idle,
    "connections that come and go": come_and_go,
    "a head of 200 kB": lambda client: client.status(client.request(b"{}", "X-A: " + "a" * 200_000)),
    "a body of 8 MB": lambda client: client.status(client.request(b" " * (8 << 20))),
    "a body of 8 MB in chunks": chunks(1 << 18, 32),
    "chunks of one byte": chunks(1, 50_000),
    "streams that nobody reads": never_reads,
    "half-closed clients": lambda client: client.status(client.request(chat(), "Connection: close"), end=True),
    "noise, HTTP/2, TLS": each_of(noise, end=True),
    "65 pipelined requests": pipelined,
    "streams left in the middle": leaves(ENDLESS),
    "streams reset in the middle": leaves(ENDLESS, reset=True),
    "a body half sent, then gone": leaves(b" " * (1 << 20), 1 << 19),
    "false lengths": each_of(false_lengths, end=True),
    "odd paths and methods": each_of(odd_paths_and_methods),
    "4 MB of zeros": posts(lambda: b'{"messages": [' + b"0," * (LARGE // 2) + b"0]}"),
    "nested two million deep": posts(lambda: b'{"messages": ' + b"[" * 2_000_000 + b"]" * 1_900_000 + b"}"),
    "100,000 unknown fields": posts(lambda: chat(**{f"field {number}": 0 for number in range(100_000)})),
    "a number of 4 million digits": posts(lambda: b'{"messages": [], "seed": ' + b"9" * LARGE + b"}"),
    "bad UTF-8": posts(lambda: [b"\xff" * LARGE, b"\xef\xbb\xbf{}", chat(stop="\udfff")]),
    "huge numbers": posts(lambda: [chat(n=10**9), chat(max_tokens=10**300), chat(temperature=1e999)]),
    "5,000 prompts": posts(lambda: json.dumps({"prompt": ["How many?"] * 5000}).encode(), COMPLETIONS),
    "a text of 4 MB": posts(lambda: chat(messages=[{"role": "user", "content": "ab " * (LARGE // 3)}])),
    "long prompts": posts(lambda: json.dumps({"prompt": [105] * 900, "max_tokens": 1}).encode(), COMPLETIONS),
}


# good streams next to them


class Figures(NamedTuple):
    """What was seen while one kind went on. seen: how often clients saw what. wrong: of good streams and of /health."""

    kind: str
    seen: Counter[str]
    streams: int
    wrong: list[str]
    slowest: float  # seconds of a /health

    @property
    def holds(self) -> bool:
        faults = {word for said in self.seen for word in re.findall(r"\b5\d\d\b", said)}
        return not self.wrong and faults <= ALLOWED


async def good_stream(client: Client, seed: int) -> str:
    """Text of a stream. Raises ConnectionError where it is not whole."""
    body = chat(max_tokens=24, ignore_eos=True, temperature=0.8, seed=seed, stream=True)
    said = await client.answer(client.request(body, "Connection: close"))
    head, _, events = said.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in events:
        raise ConnectionError(f"{status(said)} {events[-200:]!r}")
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def beside(client: Client, kinds: Sequence[str], clients: int, texts: Sequence[str]) -> Figures:
    """Some kinds of harm at the same time, with good streams and /health next to them."""
    figures, ended, took = Figures(" + ".join(kinds), Counter(), 0, [], 0.0), asyncio.Event(), [0.0]
    streams = 0

    async def ask(seed: int) -> None:
        nonlocal streams
        while not ended.is_set():
            try:
                text = await good_stream(client, seed)
                figures.wrong.extend([] if text == texts[seed] else [f"another text: {text!r}"])
            except (OSError, ValueError) as error:
                figures.wrong.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.5)
            streams += 1

    async def probe() -> None:
        while not ended.is_set():
            began = time.monotonic()
            said = await client.answer(client.head("/health", None, "Connection: close", method="GET"))
            took.append(time.monotonic() - began)
            figures.wrong.extend([] if status(said) == "200" else [f"/health: {said[:100]!r}"])
            await asyncio.sleep(0.1)

    async def harm(kind: str) -> str:
        try:
            return await KINDS[kind](client)
        except OSError as error:
            return type(error).__name__

    good = [asyncio.create_task(each) for each in (*map(ask, range(len(texts))), probe())]
    figures.seen.update(await asyncio.gather(*map(harm, list(kinds) * clients)))
    ended.set()
    await asyncio.gather(*good)
    return figures._replace(streams=streams, slowest=max(took))


async def run(url: str, given: argparse.Namespace) -> list[Figures]:
    """Every kind, one after the other."""
    client = Client(url, given.seconds)
    texts = [await good_stream(client, seed) for seed in range(given.streams)]
    found = []
    print(table_head(("kind", "its clients saw", "good streams", "wrong", "/health, most")))
    for kind in given.only:
        figures = await beside(client, [kind], given.clients, texts)
        found.append(figures)
        seen = ", ".join(f"{count} x {word}" for word, count in figures.seen.items())
        wrong = "; ".join(figures.wrong)[:300] or "none"
        print(table_row([kind, seen, figures.streams, wrong, f"{1e3 * figures.slowest:.0f} ms"]), flush=True)
    return found


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server; without it one is started")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--seconds", type=float, default=12.0, help="for which a connection is held")
    parser.add_argument("--clients", type=int, default=4, help="of one kind at a time")
    parser.add_argument("--streams", type=int, default=2, help="good ones at a time")
    return parser.parse_args(arguments)


def main() -> int:
    given = options(sys.argv[1:])
    if given.url:
        found = asyncio.run(run(given.url, given))
    else:
        with running_server(*OPTIONS) as server:
            found = asyncio.run(run(server.url, given))
    return int(not all(figures.holds for figures in found))


if __name__ == "__main__":
    raise SystemExit(main())
