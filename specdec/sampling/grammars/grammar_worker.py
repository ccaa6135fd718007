"""The program of `grammar_trial`: compiles grammars where a crash, a hang or a lack of memory ends this process alone.

It is run as a file by itself and imports nothing of this package, so that it starts in a fraction of a second. A
line of JSON each on standard input and output:

    in   {"tokenizer": ..., "n_vocab": ..., "eos": ...}   once           out  {"ready": true}
    in   {"grammar": ..., "seconds": ..., "bytes": ...}   over and over  out  {"reason": ..., "bytes": ...}
"""

import json
import os
import signal
import sys
import threading
from typing import Any, BinaryIO

try:
    import resource
except ImportError:  # a system without limits: the parent's clock is the only one
    resource = None  # type: ignore[assignment]

NICE = 5
"""The engine of the server goes first."""
STEPS = 4
"""Tokens that are tried, so that the states after the first one are made here too."""


def write(stream: BinaryIO, value: Any) -> None:
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


def held_bytes() -> tuple[int, int]:
    """Address space and resident memory of this process; zeros where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            pages, resident = file.read().split()[:2]
    except OSError:
        return 0, 0
    return int(pages) * resource.getpagesize(), int(resident) * resource.getpagesize()


def tried(library: Any, tokenizer: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """The library's reason against a grammar ("": none), and what the grammar takes in memory."""
    before = held_bytes()[1]
    matcher = library.LLMatcher(tokenizer, asked["grammar"], log_level=0)
    copy = matcher.deep_copy() if not matcher.is_error() else matcher
    for _ in range(STEPS):
        mask = copy.compute_bitmask() if not copy.is_error() else b""
        first = next((8 * at + (byte & -byte).bit_length() - 1 for at, byte in enumerate(mask) if byte), None)
        if copy.is_error() or first is None or first in tokenizer.eos_tokens or not copy.consume_token(first):
            break
    reason = copy.get_error() if copy.is_error() else ""
    if not reason and (forced := len(matcher.compute_ff_bytes())) > asked["forced"]:
        reason = f"it begins with {forced} forced bytes, and {asked['forced']} are allowed"
    return {"reason": reason, "bytes": max(0, held_bytes()[1] - before)}


def limit(seconds: float, more_bytes: int | None) -> None:
    """Seconds of work and bytes beyond which the system ends this process; 0 and None: none."""
    if resource is None:  # not everywhere
        return  # type: ignore[unreachable]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    held = held_bytes()[0]
    most = held + more_bytes if held and more_bytes is not None else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def main() -> None:
    given, told = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the library prints is no answer
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(NICE)
    first = given.readline()
    if not first:
        return
    begin = json.loads(first)
    import llguidance

    tokenizer = llguidance.LLTokenizer(begin["tokenizer"], n_vocab=begin["n_vocab"], eos_token=begin["eos"])
    write(told, {"ready": True})
    for asked in map(json.loads, given):
        answer: list[dict[str, Any]] = []

        def work(asked: dict[str, Any] = asked, answer: list[dict[str, Any]] = answer) -> None:
            limit(asked["seconds"], asked["bytes"])
            answer.append(tried(llguidance, tokenizer, asked))

        threading.stack_size(asked["stack"])
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        limit(0.0, None)
        if not answer:
            sys.exit(1)  # it ran out of memory in Python
        write(told, answer[0])


if __name__ == "__main__":
    main()
