"""Tokens that a grammar leaves no choice for, in place of a drafter's.

    tree of the drafter      0 - 1 - 2       forced  7 8       0 - 7 - 8   3      3: blank, in no path
                             ` - 3

A row with forced tokens has a chain of them for its tree; the others keep theirs. Nodes that are left over are blank:
token -1, children of the root, which no draw is equal to.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from specdec.attention.trees.tree import DraftTree

BLANK = -1


def force_tokens(tree: DraftTree, forced: torch.Tensor, length: torch.Tensor, num_nodes: int) -> DraftTree:
    """Trees of `num_nodes` nodes, N: the first `length` [B] of forced [B, F] after the root, where there are any."""
    nodes = torch.arange(num_nodes, device=length.device)
    extra = num_nodes - tree.num_nodes
    blank_path = (nodes == 0) | (nodes[:, None] == nodes)  # [N, N]: the root and itself
    tokens = F.pad(tree.tokens, (0, extra), value=BLANK)
    parents, depth = F.pad(tree.parents, (0, extra), value=0), F.pad(tree.depth, (0, extra), value=1)
    own = F.pad(tree.ancestors, (0, extra, 0, extra))
    ancestors = torch.where((nodes < tree.num_nodes)[:, None], own, blank_path)

    on_chain, is_forced = nodes <= length[:, None], (length > 0)[:, None]  # [B, N], [B, 1]
    chain = F.pad(torch.cat([tree.tokens[:, :1], forced], dim=1), (0, num_nodes), value=BLANK)[:, :num_nodes]
    chain_path = torch.where(on_chain[:, :, None], nodes[:, None] >= nodes, blank_path)  # [B, N, N]
    return DraftTree(
        tokens=torch.where(is_forced, torch.where(on_chain, chain, BLANK), tokens),
        parents=torch.where(is_forced, torch.where(on_chain, nodes - 1, 0), parents),
        depth=torch.where(is_forced, torch.where(on_chain, nodes, 1), depth),
        ancestors=torch.where(is_forced[:, :, None], chain_path, ancestors),
    )


def without_blanks(tree: DraftTree) -> DraftTree:
    """Returns the tree with a token at every node, 0 in place of a blank, so that each can be looked up in a table."""
    return replace(tree, tokens=tree.tokens.clamp(min=0))
