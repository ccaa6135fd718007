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
from specdec.attention.tree_walk import accept_walk, reference_accept_walk


class Accepted(NamedTuple):
    """path [B, N]: accepted nodes in order, root first, then 0s; length [B]: how many.

    tokens [B, N]: tokens[:, i] is drawn after path[:, i]; the first `length` are emitted, the last is the bonus.
    """

    path: torch.Tensor
    length: torch.Tensor
    tokens: torch.Tensor


def accept(tree: DraftTree, target_tokens: torch.Tensor, *, kernels: bool = False) -> Accepted:
    """Walk B trees at once: target_tokens [B, N] -> the accepted path of each."""
    return Accepted(*(accept_walk if kernels else reference_accept_walk)(tree, target_tokens))
