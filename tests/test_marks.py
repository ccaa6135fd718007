"""The choice of cases: every two values of two parameters meet, in a fixed order and few cases."""

import itertools
from unittest import mock

import pytest

from marks import (
    deep_cases,
    mark_deep_cases,
    pairs,
    usual_cases,
)


def test_pairs_by_eye():
    assert pairs("ab", [1, 2]) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert pairs("ab", [1, 2], "xy") == [("a", 1, "x"), ("a", 2, "y"), ("b", 1, "y"), ("b", 2, "x")]


@pytest.mark.parametrize("sizes", [(3,) * 4, (5, 3, 3), (12, 2, 2), (10, 2, 2), (2, 8, 4)], ids=str)
def test_every_two_values_meet(sizes):
    choices = [range(size) for size in sizes]
    cases = pairs(*choices)
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(case[a], case[b]) for case in cases} == set(itertools.product(choices[a], choices[b]))
    most, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert most * second <= len(cases) < 1.7 * most * second


def test_named_cases_become_deep_and_one_that_is_gone_is_an_error():
    def items():
        return [mock.Mock(nodeid=f"tests/test_a.py::x[{case}]") for case in ("1-a", "2-b")]

    config = mock.Mock(args=["tests"])
    for mark, marked in (
        (deep_cases("2-b"), [0, 1]),
        (deep_cases("1-a", "2-b"), [1, 1]),
        (usual_cases("2-b"), [1, 0]),
        (usual_cases("1-a", "2-b"), [0, 0]),
    ):
        there = items()
        for item in there:
            item.get_closest_marker.side_effect = lambda name, mark=mark: mark.mark if name == mark.name else None
        mark_deep_cases(config, there)
        assert [item.add_marker.call_count for item in there] == marked
    for mark in (deep_cases("2-b", "3-c"), usual_cases("2-b", "3-c")):
        for item in there:
            item.get_closest_marker.side_effect = lambda name, mark=mark: mark.mark if name == mark.name else None
        with pytest.raises(pytest.UsageError, match=f"{mark.name} names '3-c', which is no case of it"):
            mark_deep_cases(config, there)
    mark_deep_cases(mock.Mock(args=["tests/test_a.py::x[1-a]"]), there[:1])  # others are not there
