"""Which prompt chunks share a forward: literal cases, and every other partition as the oracle."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.rounds.chunks import ChunkGraphs
from specdec.rounds.grouping import WORTH_A_FORWARD, group_chunks, padded_size


def captured_size(counts, longest):
    return ChunkGraphs.size(None, counts, longest)


def numbers_of(*lengths, size=padded_size):
    return [group.tolist() for group in group_chunks(np.array(lengths), size)]


def test_chunks_of_a_kind_share_a_forward():
    """(300 - 20) * 3 positions of padding are worth a forward; those of 100 and 60 are not."""
    assert numbers_of(300, 280, 10, 20, 10) == [[0, 1], [3, 2, 4]]
    assert numbers_of(60, 100, 60) == [[1, 0, 2]]
    assert numbers_of(1) == [[0]]


def test_captured_forwards_come_in_sizes():
    """33 of 64 tokens: 64 rows would be too many to be captured, 32 and one are not. 7 of 100 are 8 of 128, 5 are 4 and
    one; what is too long for that is long enough for the host alone."""
    assert captured_size(np.array([1, 3, 5, 16, 17]), 100).tolist() == [128, 512, 1024, 2048, 4096]
    assert [len(group) for group in numbers_of(*[64] * 33, size=captured_size)] == [1, 32]
    assert [len(group) for group in numbers_of(*[100] * 7, size=captured_size)] == [7]
    assert [len(group) for group in numbers_of(*[100] * 5, size=captured_size)] == [1, 4]
    assert numbers_of(5000, 5000, size=captured_size) == [[0, 1]]


@pytest.mark.parametrize("size", [padded_size, captured_size])
@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=7))
def test_no_other_cut_takes_less(size, lengths):
    def takes(groups):
        return sum(int(size(np.array([len(g)]), max(g))[0]) + WORTH_A_FORWARD for g in groups)

    ordered = sorted(lengths, reverse=True)
    every = [
        [ordered[a:b] for a, b in itertools.pairwise([0, *cuts, len(ordered)])]
        for count in range(len(ordered))
        for cuts in itertools.combinations(range(1, len(ordered)), count)
    ]
    groups = [[lengths[i] for i in group] for group in numbers_of(*lengths, size=size)]
    assert [length for group in groups for length in group] == ordered
    assert takes(groups) == min(map(takes, every))
