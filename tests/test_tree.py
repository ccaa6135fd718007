"""Draft trees, and the walk that accepts a path of one, as matrices and token lists to check by eye."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.attention.trees.tree import DraftTree
from specdec.attention.trees.tree import reference_accept as accept

from marks import examples

QUICK = settings(max_examples=examples(60, 300), deadline=None, derandomize=True, database=None)


def matrix(*rows: str) -> torch.Tensor:
    """ "TF FT" style rows of ancestors."""
    return torch.tensor([[letter == "T" for letter in row] for row in rows])[None]


def long(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def worked() -> DraftTree:
    """The tree in the docstring of attention/trees/tree.py."""
    return DraftTree.from_parents(long([[10, 11, 12, 13, 14]]), long([[-1, 0, 0, 1, 3]]))


def test_worked_tree():
    tree = worked()
    assert tree.depth.tolist() == [[0, 1, 1, 2, 3]]
    assert torch.equal(tree.ancestors, matrix("TFFFF", "TTFFF", "TFTFF", "TTFTF", "TTFTT"))
    assert tree.num_nodes == 5
    tree.check()


def test_chain():
    tree = DraftTree.chain(long([[5, 6, 7], [5, 5, 5]]))
    assert tree.parents.tolist() == [[-1, 0, 1]] * 2
    assert tree.depth.tolist() == [[0, 1, 2]] * 2
    assert torch.equal(tree.ancestors, matrix("TFF", "TTF", "TTT").expand(2, 3, 3))
    tree.check()


def test_chains_of_one_length_share_what_their_tokens_do_not_say():
    first, second = DraftTree.chain(long([[5, 6, 7]])), DraftTree.chain(long([[1, 2, 3], [4, 5, 6]]))
    for name in ("parents", "depth", "ancestors"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr(), name


def changed(**fields: torch.Tensor) -> DraftTree:
    tree = worked()
    names = ("tokens", "parents", "depth", "ancestors")
    return DraftTree(**{name: fields.get(name, getattr(tree, name)) for name in names})


def flipped(i: int, j: int) -> torch.Tensor:
    ancestors = worked().ancestors.clone()
    ancestors[0, i, j] ^= True
    return ancestors


FAULTS = {
    "root-with-parent": (changed(parents=long([[0, 0, 0, 1, 3]])), "node 0 is not the root"),
    "root-with-depth": (changed(depth=long([[1, 1, 1, 2, 3]])), "node 0 is not the root"),
    "parent-after": (changed(parents=long([[-1, 0, 3, 1, 3]])), "a parent after its child"),
    "own-parent": (changed(parents=long([[-1, 0, 2, 1, 3]])), "a parent after its child"),
    "two-roots": (changed(parents=long([[-1, 0, -1, 1, 3]])), "a parent after its child"),
    "shape": (changed(parents=long([[-1, 0, 0, 1]])), "shape"),
    "depth": (changed(depth=long([[0, 1, 1, 2, 2]])), "depth disagrees with parents"),
    "missing-ancestor": (changed(ancestors=flipped(4, 1)), "ancestors disagree with parents"),
    "false-ancestor": (changed(ancestors=flipped(4, 2)), "ancestors disagree with parents"),
    "not-its-own-ancestor": (changed(ancestors=flipped(2, 2)), "ancestors disagree with parents"),
    "equal-siblings": (changed(tokens=long([[10, 11, 11, 13, 14]])), "equal siblings"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds(fault: str):
    tree, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=message):
        tree.check()


# accept


@pytest.mark.parametrize(
    ("drawn", "path", "emitted"),
    [
        ([99, 99, 99, 99, 99], [0], [99]),
        ([11, 99, 99, 99, 99], [0, 1], [11, 99]),
        ([12, 13, 99, 99, 99], [0, 2], [12, 99]),  # node 2 is a leaf: what node 1 draws is of no account
        ([11, 13, 99, 99, 14], [0, 1, 3], [11, 13, 99]),
        ([11, 13, 99, 14, 77], [0, 1, 3, 4], [11, 13, 14, 77]),
        ([99, 13, 99, 14, 77], [0], [99]),  # a matching tail after a rejected node
        ([11, 99, 99, 14, 77], [0, 1], [11, 99]),
        ([10, 10, 10, 10, 10], [0], [10]),  # the root's own token is no draft
    ],
)
def test_accept_on_the_worked_tree(drawn: list[int], path: list[int], emitted: list[int]):
    accepted = accept(worked(), long([drawn]))
    length = len(path)
    assert accepted.length.tolist() == [length]
    assert accepted.path.tolist() == [path + [0] * (5 - length)]
    assert accepted.tokens[0, :length].tolist() == emitted


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """tokens, parents and drawn tokens of a tree over few tokens, so that long paths are common."""
    size = draw(st.integers(1, 9))
    tokens, parents = [draw(st.integers(0, 3))], [-1]
    while len(tokens) < size:
        parent = draw(st.integers(0, len(tokens) - 1))
        taken = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
        tokens.append(draw(st.sampled_from([t for t in range(10) if t not in taken])))
        parents.append(parent)
    children = [[t for t, p in zip(tokens, parents, strict=True) if p == node] for node in range(size)]
    drawn = [draw(st.sampled_from([*kids, 11]) | st.integers(0, 10)) for kids in children]
    return tokens, parents, drawn


def walk(tokens: list[int], parents: list[int], drawn: list[int]) -> tuple[list[int], list[int]]:
    path, emitted = [0], [drawn[0]]
    while True:
        following = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == emitted[-1]]
        if not following:
            return path, emitted
        path.append(following[0])
        emitted.append(drawn[following[0]])


@pytest.mark.slow
@given(st.lists(trees(), min_size=1, max_size=4))
@QUICK
def test_fields_and_accepted_paths_against_plain_walks(cases: list[tuple[list[int], list[int], list[int]]]):
    size = min(len(case[0]) for case in cases)  # a prefix of a tree is a tree
    cases = [(tokens[:size], parents[:size], drawn[:size]) for tokens, parents, drawn in cases]
    tree = DraftTree.from_parents(long([c[0] for c in cases]), long([c[1] for c in cases]))
    tree.check()
    accepted = accept(tree, long([c[2] for c in cases]))
    for b, case in enumerate(cases):
        for node in range(size):
            line = [node]
            while case[1][line[-1]] >= 0:
                line.append(case[1][line[-1]])
            assert torch.nonzero(tree.ancestors[b, node]).flatten().tolist() == sorted(line)
            assert tree.depth[b, node] == len(line) - 1
        path, emitted = walk(*case)
        length = len(path)
        assert accepted.length[b] == length
        assert accepted.path[b].tolist() == path + [0] * (size - length)
        assert accepted.tokens[b, :length].tolist() == emitted
