"""Chooses the cases of a test, and marks those that `make test` and `make test-fast` leave out.

`deep` marks a case that other cases imply: only `make test-deep` runs it. `slow` marks a case that no other implies and
that takes a second: `make test-fast` leaves it out.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings


def slow(*values: Any) -> Any:
    """A case that `make test-fast` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def deep(*values: Any) -> Any:
    """A case that `make test-deep` alone runs."""
    return pytest.param(*values, marks=pytest.mark.deep)


def deep_cases(*ids: str) -> Any:
    """A decorator: the cases of a parametrized test with these ids run in `make test-deep` only."""
    return pytest.mark.deep_cases(*ids)


def usual_cases(*ids: str) -> Any:
    """A decorator: the cases of a parametrized test with other ids run in `make test-deep` only."""
    return pytest.mark.usual_cases(*ids)


def examples(count: int, in_depth: int) -> int:
    """Number of examples of a property: `count`, or `in_depth` with `make test-deep`."""
    return in_depth if is_deep() else count


def is_deep() -> bool:
    """True with `make test-deep`. For a test whose cases are not parameters."""
    return settings.get_current_profile_name() == "deep"


def quick(cases: Iterable[tuple[Any, ...]], wanted: Callable[..., bool]) -> list[Any]:
    """Mark the cases that are not wanted in `make test-fast` slow."""
    return [case if wanted(*case) else slow(*case) for case in cases]


def usual(cases: Iterable[Any], wanted: Callable[..., bool]) -> list[Any]:
    """Mark the cases that are not wanted in `make test` deep."""
    return [case if wanted(*_values(case)) else deep(*_values(case)) for case in cases]


def each_value(cases: Iterable[Any]) -> list[Any]:
    """Keep a few cases that together have every value of every parameter, and mark the others deep."""
    cases = list(cases)
    every = [list(enumerate(map(repr, _values(case)))) for case in cases]
    met: Counter[tuple[int, str]] = Counter()
    kept: set[int] = set()

    def worth(number: int) -> tuple[int, bool, int]:
        return (
            sum(not met[value] for value in every[number]),
            _is_quick(cases[number]),
            -sum(map(met.__getitem__, every[number])),
        )

    while worth(best := max(range(len(cases)), key=worth))[0]:
        kept.add(best)
        met.update(every[best])
    return [case if number in kept else deep(*_values(case)) for number, case in enumerate(cases)]


def _is_quick(case: Any) -> bool:
    return not getattr(case, "marks", ())


def _values(case: Any) -> tuple[Any, ...]:
    """Values of a case, which is a tuple or a `pytest.param`."""
    return case.values if hasattr(case, "marks") else case


def pairs(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Choose cases in which each pair of values of two parameters occurs: far fewer than all combinations."""
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


def mark_deep_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases deep that `deep_cases` names, and those that `usual_cases` does not name.

    An id without a case is an error.
    """
    cases: dict[str, set[str]] = {}
    named: dict[str, tuple[str, set[str]]] = {}
    for item in items:
        for name in ("deep_cases", "usual_cases"):
            if mark := item.get_closest_marker(name):
                test, _, case = item.nodeid.partition("[")
                cases.setdefault(test, set()).add(case.removesuffix("]"))
                named[test] = name, set(mark.args)
                if (case.removesuffix("]") in mark.args) == (name == "deep_cases"):
                    item.add_marker("deep")
    if any("::" in argument for argument in config.args):
        return  # some cases of a test are not there
    for test, (name, ids) in named.items():
        if gone := sorted(ids - cases[test]):
            raise pytest.UsageError(f"{test}: {name} names {gone[0]!r}, which is no case of it: give the id it has now")


def leave_out_deep(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases marked `deep`, unless with `--deep`, an -m that names the mark, or a case's full id."""
    if config.getoption("--deep") or "deep" in config.option.markexpr:
        return
    named = set(config.args)
    deep = [item for item in items if item.get_closest_marker("deep") and item.nodeid not in named]
    if deep:
        config.hook.pytest_deselected(items=deep)
        left_out = set(deep)
        items[:] = [item for item in items if item not in left_out]
