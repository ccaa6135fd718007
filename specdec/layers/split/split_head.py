"""The head's product on several ranks: each has rows of the weight, and rank 0 gets the logits of all.

    rank r    y_r = x W_r^T     W_r [V / R, H]          every logit is one row's sum, the same as on one device
    rank 0    y = y_0 | y_1 | ..                        collected; sampling is rank 0's

It is a forward of its own: x is sent, so that it may be called between any others, and by drafters that share the head.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from specdec.gpu.operations import Operations
from specdec.gpu.ranks import Ranks
from specdec.layers.linear import linear
from specdec.layers.packed.packed_weight import Weight
from specdec.layers.packed.weight_slices import placed, rows_of
from specdec.layers.product import finish
from specdec.layers.split.layer_shares import PAIR, whole_cut


def divides_head(weight: Weight, count: int) -> bool:
    """Whether ranks can have as many rows of this weight each."""
    return len(weight) % (PAIR * count) == 0


class SplitHead(nn.Module):
    """Stands where a `FusedLinear` stood. weights: for each rank the whole weight, from wherever it takes its rows."""

    def __init__(self, weights: Sequence[Weight], bias: torch.Tensor | None, ops: Operations, ranks: Ranks) -> None:
        super().__init__()
        self.ops, self.ranks, self.cut = ops, ranks, whole_cut(weights[0])
        count = len(ranks)
        self.shares: list[tuple[Weight, torch.Tensor | None]] = []
        with torch.inference_mode(False), torch.no_grad():
            for rank, weight in enumerate(weights):
                own = rows_of(weight, [len(weight)], rank, count)
                own_bias = None if bias is None else bias.detach().chunk(count)[rank]
                put = partial(ranks.put, rank)
                self.shares.append((placed(own, put), None if own_bias is None else put([own_bias])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        self.ranks.begin()
        logits = []
        for rank, sent in enumerate(self.ranks.send(x.reshape(-1, x.shape[-1]))):
            with self.ranks.on(rank):
                weight, bias = self.shares[rank]
                logits.append(self.ops(finish)(self.ops(linear)(sent, weight, bias, self.cut)))
        whole = self.ranks.collect(logits).transpose(0, 1)  # [M, R, N / R]
        return whole.reshape(*x.shape[:-1], -1)
