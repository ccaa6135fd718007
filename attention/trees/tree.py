"""The draft tree, which a drafter proposes and the target verifies. A chain is a tree too.

    node      0  1  2  3  4          0 (root: the previous bonus token, its K/V not yet written)
    parent   -1  0  0  1  3         / \
    depth     0  1  1  2  3        1   2      node n sits at position S + depth[n];
                                   |          parents come before their children;
                                   3 - 4      siblings carry distinct tokens.
"""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class DraftTree:
    """B trees of N nodes.

    tokens, parents, depth: [B, N] int64 (parents[:, 0] = -1, depth[:, 0] = 0). ancestors: [B, N, N] bool, `ancestors[b,
    i, j]`: j is i itself or an ancestor of i. max_depth: upper bound on depths; None: not known, so N - 1. is_chain:
    each node is the parent of the next.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    ancestors: torch.Tensor
    max_depth: int | None = None
    is_chain: bool = False

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @classmethod
    def chain(cls, tokens: torch.Tensor) -> "DraftTree":
        """Chains of tokens [B, N], root first."""
        batch, num_nodes = tokens.shape
        parents, depth, ancestors = _chain_fields(num_nodes, tokens.device)
        return cls(
            tokens=tokens,
            parents=parents.expand(batch, num_nodes),
            depth=depth.expand(batch, num_nodes),
            ancestors=ancestors.expand(batch, num_nodes, num_nodes),
            max_depth=num_nodes - 1,
            is_chain=True,
        )

    @classmethod
    def from_parents(cls, tokens: torch.Tensor, parents: torch.Tensor) -> "DraftTree":
        """Trees of tokens and parents [B, N]; parents must come before their children."""
        batch, num_nodes = tokens.shape
        nodes = torch.arange(num_nodes, device=tokens.device)
        ancestors = torch.eye(num_nodes, dtype=torch.bool, device=tokens.device).repeat(batch, 1, 1)
        current = parents
        for _ in range(num_nodes - 1):  # all nodes take one hop towards the root
            ancestors |= (current[:, :, None] == nodes) & (current >= 0)[:, :, None]
            current = torch.where(current > 0, parents.gather(1, current.clamp(min=0)), -1)
        return cls(tokens=tokens, parents=parents, depth=ancestors.sum(-1) - 1, ancestors=ancestors)

    def check(self) -> None:
        """Assert the rules above. Synchronises with the device; meant for tests and drafter conformance."""
        batch, num_nodes = self.tokens.shape
        nodes = torch.arange(num_nodes, device=self.tokens.device)
        assert self.parents.shape == self.depth.shape == (batch, num_nodes), (
            f"{self.parents.shape=} {self.depth.shape=}"
        )
        assert bool((self.parents[:, 0] == -1).all()) and bool((self.depth[:, 0] == 0).all()), "node 0 is not the root"
        assert bool(((self.parents[:, 1:] >= 0) & (self.parents[:, 1:] < nodes[1:])).all()), "a parent after its child"
        rebuilt = DraftTree.from_parents(self.tokens, self.parents)
        assert bool((rebuilt.depth == self.depth).all()), "depth disagrees with parents"
        assert bool((rebuilt.ancestors == self.ancestors).all()), "ancestors disagree with parents"
        assert self.max_depth is None or bool((self.depth <= self.max_depth).all()), f"deeper than {self.max_depth}"
        assert not self.is_chain or bool((self.parents == nodes - 1).all()), "is_chain, but it branches"
        same = (self.parents[:, :, None] == self.parents[:, None, :]) & (
            self.tokens[:, :, None] == self.tokens[:, None, :]
        )
        assert not bool((same & ~torch.eye(num_nodes, dtype=torch.bool, device=same.device)).any()), "equal siblings"


@cache  # never emptied: captured rounds refer to its tensors
def _chain_fields(num_nodes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parents and depth [N] and ancestors [N, N] of a chain. Made once, on the host: made on a GPU they would cost
    seven launches per round, all on one thread's stream."""
    with torch.inference_mode(False):
        steps = torch.arange(num_nodes)
        ancestors = steps[:, None] >= steps[None, :]
        return (steps - 1).to(device), steps.to(device), ancestors.to(device)
