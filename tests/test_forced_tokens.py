"""Forced tokens in the place of a drafter's tree, on trees that can be checked by eye."""

import pytest
import torch

from specdec import DraftTree
from specdec.attention.trees.tree import BLANK, force_tokens, without_blanks

T, F = True, False


def trees() -> DraftTree:
    """0 - 1 - 3     root 5, twice
    ` 2"""
    tokens, parents = torch.tensor([[5, 6, 7, 8]] * 2), torch.tensor([[-1, 0, 0, 1]] * 2)
    return DraftTree.from_parents(tokens, parents)


def test_a_chain_where_there_are_forced_tokens_and_the_tree_where_there_are_none():
    forced = torch.tensor([[9, 4, 0, 0], [0, 0, 0, 0]])
    out = force_tokens(trees(), forced, torch.tensor([2, 0]), 4)
    assert out.tokens.tolist() == [[5, 9, 4, BLANK], [5, 6, 7, 8]]
    assert out.parents.tolist() == [[-1, 0, 1, 0], [-1, 0, 0, 1]]
    assert out.depth.tolist() == [[0, 1, 2, 1], [0, 1, 1, 2]]
    assert out.ancestors[0].tolist() == [[T, F, F, F], [T, T, F, F], [T, T, T, F], [T, F, F, T]]
    assert torch.equal(out.ancestors[1], trees().ancestors[1])
    assert not out.is_chain and without_blanks(out).tokens.tolist() == [[5, 9, 4, 0], [5, 6, 7, 8]]


def test_more_forced_tokens_than_the_draft_has_nodes():
    """A draft that is the root alone, or a tree, made wider: nodes that are left over hang at the root."""
    forced, length = torch.tensor([[9, 4, 3], [0, 0, 0]]), torch.tensor([3, 0])
    out = force_tokens(DraftTree.chain(torch.tensor([[5], [6]])), forced, length, 4)
    assert out.tokens.tolist() == [[5, 9, 4, 3], [6, BLANK, BLANK, BLANK]]
    assert out.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, 0, 0]]
    out = force_tokens(trees(), torch.zeros(2, 5, dtype=torch.int64), torch.tensor([5, 0]), 6)
    assert out.tokens.tolist() == [[5, 0, 0, 0, 0, 0], [5, 6, 7, 8, BLANK, BLANK]]
    assert out.depth.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 1, 2, 1, 1]]


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 9])
@pytest.mark.parametrize("length", [0, 1, 3, 8])
def test_forcing_tokens_gives_a_valid_tree(num_nodes, length):
    """Fields agree with the parents; only blanks are equal siblings, and these are told apart here."""
    own = trees() if num_nodes >= 4 else DraftTree.chain(torch.tensor([[5], [5]]))
    forced, most = torch.arange(20, 30).repeat(2, 1), min(length, num_nodes - 1)
    out = force_tokens(own, forced, torch.tensor([most, 0]), num_nodes)
    blanks = torch.arange(-num_nodes, 0).expand(2, -1)
    DraftTree(
        torch.where(out.tokens == BLANK, blanks, out.tokens), out.parents, out.depth, out.ancestors, num_nodes - 1
    ).check()
    assert out.tokens[0, 1 : 1 + most].tolist() == list(range(20, 20 + most))
