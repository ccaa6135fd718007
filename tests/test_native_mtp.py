"""Native MTP: every draft is what the published forward gives, and the output is the target's own."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import SHAPES, Published, Reference, publish

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig

CHAIN, TREE = {"num_steps": 3}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 9}


class Watched:
    """Each propose of an engine: the committed text with the root, and the tree."""

    def __init__(self, engine: Engine) -> None:
        self.seen: list[tuple[list[int], list[int], list[int]]] = []
        worker, own = engine.round.worker, engine.round.worker.propose

        def propose(batch: Any) -> Any:
            tree = own(batch)
            history = batch.history.tensor if hasattr(batch.history, "tensor") else batch.history
            for i, length in enumerate(batch.history_len.tolist()):
                if int(batch.rows.index[i]) != engine.table.padding_row:
                    self.seen.append((history[i, :length].tolist(), tree.tokens[i].tolist(), tree.parents[i].tolist()))
            return tree

        worker.propose = propose


def assert_published(reference: Reference, seen: list[tuple[list[int], list[int], list[int]]]) -> int:
    """The children of every node are the best of the published forward after it -> nodes that were compared."""
    compared = 0
    for text, tokens, parents in seen:
        for node in range(len(tokens)):
            children = [tokens[i] for i in range(1, len(tokens)) if parents[i] == node]
            if not children:
                continue
            path, at = [], node
            while at:
                path.append(tokens[at])
                at = parents[at]
            logits = reference.logits(text, path[::-1])
            best = logits.topk(len(children)).indices.tolist()
            assert set(best) == set(children), (len(text), node, text, tokens, parents, logits.tolist())
            compared += len(children)
    return compared
