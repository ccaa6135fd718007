"""Calls of kernels as data: what computes, its reference, the bytes that it must read; checked and timed one way."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from bench.clock import copies_of, graph_seconds, timed_row
from bench.report import Row
from bench.verify import attempt, distance, require_same

EXACT = 0.0
"""The limit of a kernel that must have the reference's bits."""


class Call(NamedTuple):
    """A kernel on inputs of its own. reference: the same in plain torch. limit: how far they may be apart. num_bytes:
    0 where a floor says nothing."""

    run: Callable[[], Any]
    reference: Callable[[], Any]
    num_bytes: float = 0.0
    limit: float = EXACT


Make = Callable[[int], Call]
"""seed -> a call."""


def check_calls(calls: Iterable[tuple[str, Make]]) -> Iterator[Row]:
    """Each against its reference."""
    for name, make in calls:
        yield attempt(name, _check, name, make(0))


def _check(name: str, call: Call) -> Row:
    got, want = call.run(), call.reference()
    if call.limit == EXACT:
        require_same(name, got, want)
        return Row(name, "equal")
    pairs = [(a, b) for a, b in zip(_parts(got), _parts(want), strict=True) if a is not None and b is not None]
    worst = max(distance(a, b) for a, b in pairs)
    return Row(name, f"{worst:.1e}", ok=worst < call.limit)


def _parts(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def time_calls(calls: Iterable[tuple[str, Make]], copies: int | None = None, peers: bool = True) -> Iterator[Row]:
    """Each with a cold L2: on several inputs in turn. peers: next to its reference."""
    for name, make in calls:
        first = make(0)
        count = copies or copies_of(first.num_bytes, 24)
        made = [first, *(make(seed) for seed in range(1, count))]
        turns = made * max(1, 32 // count)  # of one short call the launch of the graph would be most
        us = graph_seconds([each.run for each in turns]) * 1e6
        peer = graph_seconds([each.reference for each in made], 4) * 1e6 if peers else None
        yield timed_row(name, us, first.num_bytes, peer)
