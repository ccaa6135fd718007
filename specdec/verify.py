"""Sample and match: accept the path on which every draft is what the target itself draws there.

`target_tokens[b, n]` is the token that the target's sampler draws after node n. A node is accepted when it carries the
token drawn at its parent and its parent is accepted; siblings differ, so accepted nodes form one path from the root.
The token drawn at the end of it is the bonus. There is no acceptance ratio and no residual: the output is what plain
decoding draws, token for token.

    tree   0 [the] - 1 [cat] - 3 [sat]     target draws after 0: cat, after 1: ran
                   \\ 2 [dog]               path [0, 1], length 2, emitted [cat, ran]
"""

from typing import NamedTuple

import torch

from specdec.attention.tree import DraftTree


class Accepted(NamedTuple):
    """path [B, N]: accepted nodes in order, root first, then 0s; length [B]: how many.

    tokens [B, N]: tokens[:, i] is drawn after path[:, i]; the first `length` are emitted, the last is the bonus.
    """

    path: torch.Tensor
    length: torch.Tensor
    tokens: torch.Tensor


def accept(tree: DraftTree, target_tokens: torch.Tensor) -> Accepted:
    """Walk B trees at once: target_tokens [B, N] -> the accepted path of each."""
    batch, num_nodes = tree.tokens.shape
    drawn_at_parent = target_tokens.gather(1, tree.parents.clamp(min=0))
    matches = (tree.tokens == drawn_at_parent) | (tree.parents < 0)  # the root is given
    accepted = (matches[:, None, :] | ~tree.ancestors).all(dim=-1)  # [B, N]: itself and all its ancestors
    nodes = torch.arange(num_nodes, device=target_tokens.device).expand(batch, num_nodes)
    by_depth = torch.where(accepted, tree.depth, num_nodes)  # column num_nodes takes the rejected
    path = nodes.new_zeros((batch, num_nodes + 1)).scatter_(1, by_depth, nodes)[:, :num_nodes]
    return Accepted(path, accepted.sum(dim=-1), target_tokens.gather(1, path))
