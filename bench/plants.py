"""Drafts whose truth is known beforehand: right as often as a case says, never right, or hidden in a random tree."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from bench.device import DEVICE  # isort: skip - before triton
import torch

from specdec.attention.trees.tree import DraftTree
from specdec.draft_models.base import Binding, DraftBatch, Drafter, DraftWorker, StatelessDrafter
from specdec.sampling.kernel_sampler import KernelSampler
from specdec.sampling.reference_sampler import EditInputs, ReferenceSampler

Change = Callable[[DraftBatch, DraftTree], DraftTree]
FIRST_TEXT = 1000
"""Tokens below it begin prompts, and are their numbers."""


def change_drafts(drafter: Drafter, change: Change) -> Drafter:
    """In every worker of this drafter from now on: it does all its work, and its drafts are then changed."""
    bind = type(drafter).bind

    def changed_bind(binding: Binding) -> DraftWorker:
        worker = bind(drafter, binding)
        propose = worker.propose
        worker.propose = lambda batch: change(batch, propose(batch))  # type: ignore[method-assign]
        return worker

    drafter.bind = changed_bind  # type: ignore[method-assign]
    return drafter


def never_right(batch: DraftBatch, tree: DraftTree) -> DraftTree:
    """The tokens after those that were drafted."""
    tokens = tree.tokens
    tokens[:, 1:] = (tokens[:, 1:] + 1) % (int(tokens.max()) + 2)
    return DraftTree.chain(tokens)


def places(batch: DraftBatch, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of each request [B, 1], and the position of each node of a chain [B, N]."""
    position = batch.history_len[:, None] - 1 + torch.arange(tree.num_nodes, device=batch.history.device)
    return batch.history[:, :1], position


class KnownTexts:
    """What plain decoding gave after each prompt, found by the prompt's first token, which is its number."""

    def __init__(self, texts: Sequence[list[int]], room: int) -> None:
        longest = max(map(len, texts)) + room
        self.texts = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=DEVICE)

    def six_of_ten(self, batch: DraftBatch, tree: DraftTree) -> DraftTree:
        """Chains with six of ten tokens right; trees as they are."""
        if batch.topk > 1:
            return tree
        number, position = places(batch, tree)
        number = number.clamp(max=len(self.texts) - 1)
        true = self.texts[number, position.clamp(max=self.texts.shape[1] - 1)]
        right = ((number * 104_723 + position * 15_485_863) >> 3) % 10 < 6
        right[:, 0] = False  # the root is the request's own
        return DraftTree.chain(torch.where(right, true, tree.tokens))


class RandomText:
    """A text for each prompt number, which the target is taken to have drawn, and how often a draft of it is right:
    the drafter's, or a lookup's next to it.

    The target computes and draws; what it drew is replaced. So times are those of the shape, and acceptance is `right`.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.right, self.right_by_lookup = torch.zeros((2, FIRST_TEXT), device=device)

    def text(self, number: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        mixed = (number * 7919 + position * 104729 + 12345) * 2654435761
        return FIRST_TEXT + (mixed >> 7) % (self.vocab_size - FIRST_TEXT)

    def is_right(self, number: torch.Tensor, position: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        """Mixes number and position, so that no place is likelier for its neighbours: the finalizer of MurmurHash3, in
        32 bits."""
        mixed = (number * 104723 + position * 15485863 + 777) & 0xFFFFFFFF
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
        return ((mixed ^ (mixed >> 16)) % 4096) < chance * 4096

    @contextmanager
    def in_samplers(self) -> Iterator[None]:
        """Inside, what the target draws is the text."""
        plain = {kind: kind.draw for kind in (ReferenceSampler, KernelSampler)}

        def planted(sampler: ReferenceSampler, logits: Any, positions: Any, inputs: EditInputs, cap: Any) -> Any:
            drawn = plain[type(sampler)](sampler, logits, positions, inputs, cap)
            number = inputs.read_history()[:, :1].clamp(max=FIRST_TEXT - 1)
            return self.text(number, positions).where(positions > 0, drawn)

        with ExitStack() as patches:
            for kind in plain:
                patches.enter_context(patch.object(kind, "draw", planted))
            yield

    def drafts(self, batch: DraftBatch, tree: DraftTree) -> DraftTree:
        """The best path of each draft is right as often as its prompt says."""
        number = batch.history[:, :1].clamp(max=FIRST_TEXT - 1)
        position = batch.history_len[:, None] - 1 + tree.depth
        chance = (self.right_by_lookup if batch.by_lookup else self.right)[number]
        text = self.text(number, position)
        planted = torch.where(self.is_right(number + 977 * batch.by_lookup, position, chance), text, text - 1)
        tokens = torch.where(best_path(tree, batch.num_steps), planted, tree.tokens)
        return DraftTree.chain(tokens) if batch.topk == 1 else replace(tree, tokens=tokens)


def best_path(tree: DraftTree, num_steps: int) -> torch.Tensor:
    """[B, N]: is it the first child of its parent, and so are all above it, up to the root, which is not?"""
    nodes = torch.arange(tree.num_nodes, device=tree.parents.device)
    newest = torch.zeros_like(tree.parents[:, :1])
    found = torch.zeros_like(tree.parents, dtype=torch.bool)
    for _ in range(num_steps):
        is_child = (tree.parents == newest) & (nodes > 0)
        newest = torch.where(is_child.any(1, True), is_child.int().argmax(1, True), tree.num_nodes)
        found = found | (nodes == newest)
    return found


class HiddenTruth(StatelessDrafter):
    """Trees of `num_nodes` random nodes in which the true continuation is hidden, a few levels deep."""

    name = "hidden"

    def __init__(self, truths: Sequence[list[int]], vocab: int) -> None:
        self.truths, self.vocab = truths, vocab

    def propose(self, batch: DraftBatch) -> DraftTree:
        tokens, parents = [], []
        for row, length in zip(batch.history.tolist(), batch.history_len.tolist(), strict=True):
            past = row[:length]
            draw = random.Random(str(past[-8:]))
            true = next((t[length:] for t in self.truths if t[:length] == past), [])[:5]
            paths = [[past[-1]]]
            above = [-1]
            while len(paths) < batch.num_nodes:
                at = draw.choice([number for number, path in enumerate(paths) if len(path) <= batch.num_steps])
                depth = len(paths[at]) - 1
                path = [*paths[at], draw.randrange(self.vocab)]
                truth = [past[-1], *true[: depth + 1]]
                if truth[:-1] == paths[at] and truth not in paths:
                    path = truth
                if path not in paths:
                    paths.append(path)
                    above.append(at)
            tokens.append([path[-1] for path in paths])
            parents.append(above)
        where = batch.root.device
        return DraftTree.from_parents(torch.tensor(tokens, device=where), torch.tensor(parents, device=where))
