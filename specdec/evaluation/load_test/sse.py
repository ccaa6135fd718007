"""Server-sent events out of the bytes of an answer. Knows neither HTTP nor what is in an event.

Lines end at LF, CRLF or CR and nowhere else: U+2028 and its like are allowed inside the strings of JSON.
"""

from collections.abc import AsyncIterator


async def events(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of every event, however the bytes were cut into blocks; comments and other fields are passed over."""
    rest, data = b"", []
    async for block in blocks:
        lines = (rest + block).splitlines(keepends=True)
        # a CR at the end may be the first half of CRLF
        rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        for line in lines:
            line = line.rstrip(b"\r\n")
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
    if rest.startswith(b"data:"):  # servers that forget the empty line behind the last event
        data.append(rest.rstrip(b"\r\n").removeprefix(b"data:").removeprefix(b" "))
    if data:
        yield b"\n".join(data)
