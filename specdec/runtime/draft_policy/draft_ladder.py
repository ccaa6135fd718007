"""The draft ladder: the drafts from which each round's draft is chosen, from none to the engine's full draft.

    captured, chain of 6     none   chains of 1, 2, 3, 4, 6       few: each is captured for every batch size
    captured, tree of 60     none   chains of 1, 2, trees of 8, 16, 32, 60 nodes
    not captured             none   the full draft

A lookup next to a model adds its full draft and, if rounds are captured, a chain of half as many levels.
"""

from collections.abc import Sequence

from specdec.config import SpecConfig
from specdec.runtime.rounds.result import DraftShape
from specdec.runtime.rounds.round_shapes import NO_DRAFT, whole_draft

CHAINS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Levels of the chains. If the full draft is a tree, only the first two are used."""

TREES = (8, 16, 32, 64, 128, 256)
"""Nodes of the trees, root included."""


def draft_ladder(spec: SpecConfig, *, captured: bool, lookup: bool = False) -> Sequence[DraftShape]:
    """The ladder: no draft, the model's drafts up to the engine's full draft, then those of a lookup."""
    whole = whole_draft(spec)
    half = max(1, whole.depth // 2)
    chains, trees = (CHAINS, ()) if whole.topk == 1 else (CHAINS[:2], TREES)
    rungs = [DraftShape(depth, 1, depth + 1) for depth in chains if depth < whole.depth]
    rungs += [_tree(spec, nodes) for nodes in trees if nodes < whole.num_nodes]
    looked_up = dict.fromkeys([DraftShape(half, 1, half + 1), whole])
    if not captured:
        rungs, looked_up = [], {whole: None}
    return [NO_DRAFT, *rungs, whole, *(draft._replace(by_lookup=True) for draft in looked_up if lookup)]


def _tree(spec: SpecConfig, num_nodes: int) -> DraftShape:
    """A tree of `num_nodes` nodes. Its depth rises by one level for twice the nodes."""
    steps, most = spec.shortened(num_nodes.bit_length())
    return DraftShape(steps, spec.topk, min(num_nodes, most))
