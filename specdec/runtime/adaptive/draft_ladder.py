"""The drafts that a round may have, few, since each is captured for every batch size: from none to the whole one.

chain of 6      none   chains of 1, 2, 3, 4, 6
tree of 60      none   chains of 1, 2, 4, trees of 8, 16, 32, 60 nodes

Where a lookup drafts in a model's place, two more: its whole draft, and a chain of half as many levels.
"""

from collections.abc import Sequence

from specdec.config import SpecConfig
from specdec.runtime.rounds.result import DraftShape
from specdec.runtime.rounds.round_shapes import NO_DRAFT, whole_draft

CHAINS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CHAINS_BESIDE_TREES = (1, 2, 4)
TREES = (8, 16, 32, 64, 128, 256)
"""Nodes, the root included."""


def draft_ladder(spec: SpecConfig, *, lookup: bool = False) -> Sequence[DraftShape]:
    """No draft first, the engine's whole draft last, in between what is shallower or has fewer nodes; lookup: and what
    a lookup drafts in its place."""
    whole = whole_draft(spec)
    chains = CHAINS if whole.topk == 1 else CHAINS_BESIDE_TREES
    rungs = [DraftShape(depth, 1, depth + 1) for depth in chains if depth < whole.depth]
    if whole.topk > 1:
        rungs += [_tree(spec, nodes) for nodes in TREES if nodes < whole.num_nodes]
    looked_up: list[DraftShape] = []
    if lookup:
        half = max(1, whole.depth // 2)
        drafts = dict.fromkeys([DraftShape(half, 1, half + 1), whole])
        looked_up = [draft._replace(by_lookup=True) for draft in drafts]
    return [NO_DRAFT, *rungs, whole, *looked_up]


def _tree(spec: SpecConfig, num_nodes: int) -> DraftShape:
    """A tree as deep as pays where every second node is on the best path: one level deeper for twice the nodes."""
    steps, most = spec.shortened(num_nodes.bit_length())
    return DraftShape(steps, spec.topk, min(num_nodes, most))
