"""Replaces drafts by forced tokens: those that the grammar leaves no choice for.

    tree of the drafter      0 - 1 - 2       forced  7 8       0 - 7 - 8   3      3: blank, in no path
                             ` - 3

A row with forced tokens gets a chain of them as its tree; the other rows keep their trees. Unused nodes are blank:
children of the root with token -1, which the target never draws.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from specdec.attention.trees.tree import DraftTree

BLANK = -1


def force_tokens(tree: DraftTree, forced: torch.Tensor, length: torch.Tensor, num_nodes: int) -> DraftTree:
    """Trees of `num_nodes` nodes: the first `length` [B] tokens of forced [B, F] after the root, or the given tree if
    there are none."""
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
    """Returns the tree with token 0 at blank nodes, so that every token can be looked up in an embedding."""
    return replace(tree, tokens=tree.tokens.clamp(min=0))
