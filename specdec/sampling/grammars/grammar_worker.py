"""The worker program of `grammar_trial`: a crash, a hang or a lack of memory while compiling ends only this process.

It is run as a file and imports nothing of this package, so that it starts in a fraction of a second. Its argument is
the size of the stack in bytes. It reads lines of JSON, and answers each with one:

    once          {"tokenizer": ..., "n_vocab": ..., "eos": ...}                  ->  {"ready": true}
    repeatedly    {"grammar": ..., "seconds": ..., "bytes": ..., "forced": ...}   ->  {"reason": ..., "bytes": ...}
"""

import json
import os
import signal
import sys
import threading
from typing import Any, BinaryIO

try:
    import resource
except ImportError:  # a system without such limits; the parent's time limit remains
    resource = None  # type: ignore[assignment]

NICE = 5
"""A lower priority than the engine of the server."""
TRIED_TOKENS = 4
"""Tokens that are tried, so that states after the first one are computed here too."""


def write(stream: BinaryIO, value: Any) -> None:
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


def held_bytes() -> tuple[int, int]:
    """Address space and resident memory of this process; zeros if the system does not report them."""
    try:
        with open("/proc/self/statm") as file:
            pages, resident = file.read().split()[:2]
    except OSError:
        return 0, 0
    return int(pages) * resource.getpagesize(), int(resident) * resource.getpagesize()


def tried(library: Any, tokenizer: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Compile a grammar. Returns the reason against it ("": none), and the memory that it takes."""
    before = held_bytes()[1]
    matcher = library.LLMatcher(tokenizer, asked["grammar"], log_level=0)
    copy = matcher.deep_copy() if not matcher.is_error() else matcher
    for _ in range(TRIED_TOKENS):
        mask = copy.compute_bitmask() if not copy.is_error() else b""
        first = next((8 * at + (byte & -byte).bit_length() - 1 for at, byte in enumerate(mask) if byte), None)
        if copy.is_error() or first is None or first in tokenizer.eos_tokens or not copy.validate_tokens([first]):
            break  # the last: a control token for the text that names it, which ordinary tokens spell
        copy.consume_token(first)
    reason = copy.get_error() if copy.is_error() else ""
    if not reason and (forced := len(matcher.compute_ff_bytes())) > asked["forced"]:
        reason = f"it begins with {forced} forced bytes, and {asked['forced']} are allowed"
    return {"reason": reason, "bytes": max(0, held_bytes()[1] - before)}


def limit(seconds: float, more_bytes: int | None) -> None:
    """Let the system end this process after these processor seconds (0: never) or with this much more memory (None: no
    limit)."""
    if resource is None:
        return  # type: ignore[unreachable]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    held = held_bytes()[0]
    most = held + more_bytes if held and more_bytes is not None else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def main() -> None:
    given, told = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints must not mix with answers
    first = given.readline()
    if not first:
        return
    begin = json.loads(first)
    import llguidance

    tokenizer = llguidance.LLTokenizer(begin["tokenizer"], n_vocab=begin["n_vocab"], eos_token=begin["eos"])
    write(told, {"ready": True})
    for asked in map(json.loads, given):
        limit(asked["seconds"], asked["bytes"])
        answer = tried(llguidance, tokenizer, asked)
        limit(0.0, None)
        write(told, answer)


if __name__ == "__main__":
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(NICE)
    threading.stack_size(int(sys.argv[1]))
    threading.Thread(target=main).start()  # an error ends it, and the process with it
