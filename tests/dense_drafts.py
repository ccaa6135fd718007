"""Compares the drafts of an engine with the best paths of a dense forward, which keeps no state."""

from collections.abc import Sequence
from typing import Protocol

import torch

from watched_drafts import Proposal

Path = tuple[int, ...]
"""A node of a draft: the tokens from the root, without it, to the node."""


class DenseForward(Protocol):
    """A drafter by its published equations, from tokens alone."""

    def logits(self, text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        """Logits [V] of the token after `text` and `path`; the last token of `text` is the root."""


def best_paths(
    forward: DenseForward, text: Sequence[int], levels: int, topk: int, count: int
) -> tuple[dict[Path, torch.Tensor], set[Path]]:
    """Draft by definition. Each level has `topk` children of each of the best `topk` nodes above; the draft is the
    `count` nodes with the highest products of probabilities.

    Returns the logits at each node with children, level by level, and the nodes of the draft.
    """
    beam, found, drawn_from = [(0.0, ())], list[tuple[float, Path]](), dict[Path, torch.Tensor]()
    for _ in range(levels):
        grown = []
        for score, path in beam:
            drawn_from[path] = forward.logits(text, path)
            best = drawn_from[path].log_softmax(-1).topk(topk)
            grown += [(score + p, (*path, t)) for p, t in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
        beam = sorted(grown, reverse=True)[:topk]
        found += grown
    return drawn_from, {path for _, path in sorted(found, reverse=True)[:count]}


def paths_of(draft: Proposal) -> list[Path]:
    """Return the path of each node in their order. The root's, the first, is empty."""
    paths: list[Path] = [()]
    for token, parent in zip(draft.tokens[1:], draft.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def assert_best(forward: DenseForward, drafts: Sequence[Proposal], topk: int, tolerance: float) -> None:
    """Check that the drafts are the best paths, drawn from the logits of the dense forward."""
    for draft in drafts:
        paths, levels = paths_of(draft), 1 + (len(draft.logits) - 1) // topk
        drawn_from, expected = best_paths(forward, draft.text, levels, topk, len(paths) - 1)
        assert set(paths[1:]) == expected and len(expected) == len(paths) - 1, draft.text
        for want, found in zip(drawn_from.values(), draft.logits, strict=True):
            chosen = found > -torch.inf
            torch.testing.assert_close(found[chosen], want[chosen].to(found.dtype), atol=tolerance, rtol=tolerance)
