"""A drafter that a test scripts, scripts of right drafts and of random trees, and batches to draft for.

A plugin of conftest.py.
"""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from specdec import DraftTree
from specdec.draft_models.base import DraftBatch, StatelessDrafter
from specdec.kvcache.table import Rows

from tiny_families import VOCAB


class ScriptedDrafter(StatelessDrafter):
    """A drafter that a test scripts: `script(tokens, n)` returns n draft tokens after `tokens`, and their parents.

    Parents are numbers of nodes; the root is 0. None: a chain.
    """

    name = "scripted"

    def __init__(self, script: Callable[[list[int], int], tuple[list[int], list[int] | None]]) -> None:
        self.script = script
        self.rounds = 0

    def propose(self, batch: DraftBatch) -> DraftTree:
        self.rounds += 1
        tokens, parents = [], []
        for row, length in zip(batch.history.tolist(), batch.history_len.tolist(), strict=True):
            drafts, above = self.script(row[:length], batch.num_steps)
            tokens.append([row[length - 1], *drafts])
            parents.append([-1, *(range(batch.num_steps) if above is None else above)])
        return DraftTree.from_parents(torch.tensor(tokens), torch.tensor(parents))


def following(texts: Sequence[Sequence[int]]) -> Callable[[list[int], int], tuple[list[int], None]]:
    """Make a script of right drafts, which continues the text that begins with the tokens."""

    def script(tokens: list[int], n: int) -> tuple[list[int], None]:
        text = next(text for text in texts if list(text[: len(tokens)]) == tokens)
        return list(text[len(tokens) : len(tokens) + n]), None

    return script


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedDrafter]:
    """The class `ScriptedDrafter`."""
    return ScriptedDrafter


def random_trees(
    truths: Sequence[Sequence[int]], vocab: int = VOCAB, hit: float = 0.7
) -> Callable[[list[int], int], tuple[list[int], list[int] | None]]:
    """Make a script of random trees: script(tokens, n, depth=None) returns n nodes, none deeper than `depth`.

    truths: whole sequences. A draft after a path along one of them continues it with probability `hit`, at a random
    place among its siblings. The tree depends on the tokens only, so it is the same in any batch.
    """

    def script(tokens: list[int], n: int, depth: int | None = None) -> tuple[list[int], list[int] | None]:
        rng = random.Random(str(tokens))
        paths = [list(tokens)]  # by node
        parents: list[int] = []
        while len(paths) <= n:
            deepest = len(tokens) + (n if depth is None else depth)
            newest = [i for i, path in enumerate(paths) if len(path) < deepest][-3:]
            parent = newest[rng.randrange(len(newest))]
            above = paths[parent]
            true = [t[len(above)] for t in truths if len(t) > len(above) and list(t[: len(above)]) == above]
            token = true[0] if true and rng.random() < hit else rng.randrange(vocab)
            if [*above, token] not in paths:  # siblings differ
                paths.append([*above, token])
                parents.append(parent)
        return [path[-1] for path in paths[1:]], parents

    return script


@pytest.fixture(scope="session")
def tree_script() -> Callable[..., Callable[[list[int], int], tuple[list[int], list[int] | None]]]:
    """tree_script(truths, vocab=96, hit=0.7): the function `random_trees`."""
    return random_trees


def history_batch(histories: list[list[int]], steps: int, topk: int = 1, num_nodes: int | None = None) -> DraftBatch:
    """Build a batch of requests with these texts, whose last token is the root. Padding tokens must not matter."""
    length = max(map(len, histories))
    return DraftBatch(
        rows=Rows(torch.arange(len(histories)), length),
        root=torch.tensor([h[-1] for h in histories]),
        read_history=lambda: torch.tensor([[*h, *[h[-1]] * (length - len(h))] for h in histories]),
        history_len=torch.tensor([len(h) for h in histories]),
        num_steps=steps,
        topk=topk,
        num_nodes=num_nodes or 1 + steps,
        sample=None,
        best=None,
    )
