"""Which cases of a test there are, and which of them `make test-fast` leaves out."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that `make test-fast` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def quick(cases: Iterable[tuple[Any, ...]], wanted: Callable[..., bool]) -> list[Any]:
    """The cases; those that are not wanted in `make test-fast` are slow."""
    return [case if wanted(*case) else slow(*case) for case in cases]


def pairs(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases among which any value of a parameter meets any value of any other: far fewer than all combinations."""
    axes = list(itertools.combinations(range(len(choices)), 2))
    cases = {
        case: {(a, case[a], b, case[b]) for a, b in axes}
        for case in itertools.product(*(range(len(choice)) for choice in choices))
    }
    left = set().union(*cases.values())
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(cases[case] & left))
        left -= cases[best]
        chosen.append(tuple(choice[i] for choice, i in zip(choices, best, strict=True)))
    return chosen
