"""The choice of cases: every two values of two parameters meet, in a fixed order and few cases."""

import itertools

import pytest

from marks import pairs, quick, slow


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


def test_what_is_not_wanted_is_slow():
    assert quick([(1, "a"), (2, "b")], lambda number, _: number == 1) == [(1, "a"), slow(2, "b")]
