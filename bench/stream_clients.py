"""Clients of a server, in a process of their own: they ask for chats at once and read the streams to their end.

    python bench/stream_clients.py PORT COUNT CHARACTERS TOKENS

Prints JSON: when the first began and the last ended, by time.time; seconds until the first event of each answer; and
the number of events. Nothing but the standard library is imported, so that a client starts at once and costs little.
"""

import asyncio
import json
import random
import string
import sys
import time


def request(prompt: str, tokens: int) -> bytes:
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body = json.dumps({"model": "random", **chat}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


async def answer(port: int, prompt: str, tokens: int) -> tuple[float, int]:
    """Seconds until the first event, and the number of events."""
    begin, first, text = time.perf_counter(), 0.0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(prompt, tokens))
    while part := await reader.read(1 << 16):
        text += part
        if not first and b"data: " in text:
            first = time.perf_counter() - begin
    writer.close()
    if b"data: [DONE]" not in text:
        raise RuntimeError(f"an answer has no end: {text[-500:]!r}")
    return first, text.count(b"data: ")


async def answers(port: int, count: int, characters: int, tokens: int) -> dict[str, object]:
    prompts = ["".join(random.choices(string.ascii_lowercase, k=characters)) for _ in range(count)]
    begin = time.time()
    found = await asyncio.gather(*(answer(port, prompt, tokens) for prompt in prompts))
    firsts, events = zip(*found, strict=True)
    return {"begin": begin, "end": time.time(), "firsts": firsts, "events": sum(events)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(answers(*map(int, sys.argv[1:])))))
