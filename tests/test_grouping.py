"""Which prompt chunks share a forward: literal cases, and every other partition as the oracle."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.runtime.rounds.captured_prompts import NEW_SHAPE, UNCAPTURED, ChunkGraphs, ChunkShape
from specdec.runtime.rounds.grouping import WORTH_A_FORWARD, group_chunks, padded_size


def captured_size(*known):
    """Of chunks whose shapes (rows, width) have been met."""
    graphs = ChunkGraphs.__new__(ChunkGraphs)
    graphs._programs = {ChunkShape(batch, width, 0): None for batch, width in known}
    return graphs.size


EVERY = [(1 << i, 16 * width) for i in range(8) for width in (1, 2, 4, 8, 16, 32, 64)]


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
    size = captured_size(*EVERY)
    assert size(np.array([1, 3, 5, 16, 17]), 100).tolist() == [128, 512, 1024, 2048, UNCAPTURED]
    assert [len(group) for group in numbers_of(*[64] * 33, size=size)] == [1, 32]
    assert [len(group) for group in numbers_of(*[100] * 7, size=size)] == [7]
    assert [len(group) for group in numbers_of(*[100] * 5, size=size)] == [1, 4]
    assert numbers_of(5000, 5000, size=size) == [[0, 1]]


def test_shapes_that_have_been_met_are_met_again():
    """Three rows of 64 fit 4 x 64: more than 2 x 64 and 1 x 64, but those would be captured first."""
    assert captured_size((4, 64))(np.array([1, 2, 3]), 64).tolist() == [64 + NEW_SHAPE, 128 + NEW_SHAPE, 256]
    assert numbers_of(600, 600, 600, size=captured_size((1, 768), (2, 768))) == [[0], [1, 2]]
    assert numbers_of(20, 20, 20, 60, size=captured_size((4, 64))) == [[3, 0, 1, 2]]


@pytest.mark.parametrize("size", [padded_size, captured_size(), captured_size(*EVERY)])
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
