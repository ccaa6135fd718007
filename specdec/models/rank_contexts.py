"""Proofs of a decoder on several ranks: each answers for its own heads, and the proof reads those of all.

divide    a context of a proof knows one device; it gives one a rank for a forward, with its share of the heads and
          what these recorded before
unite     it takes what they recorded, heads in the order of ranks
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from specdec.gpu.ranks import Ranks
from specdec.models.probe import Proof, Run


def on_ranks(run: Run, ranks: Ranks) -> Run:
    """`run` of a split decoder, from and to where the proof is."""

    def divided(tokens: torch.Tensor, positions: torch.Tensor, context: Any) -> torch.Tensor:
        shares = context.divide(ranks.devices)
        shares[0].peers = shares[1:]
        ranks.begin()
        states = run(tokens.to(ranks.devices[0]), positions.to(ranks.devices[0]), shares[0])
        context.unite(shares)
        return states.to(tokens.device)

    return divided


def difference_on_ranks(
    proof: Proof, run: Run, ranks: Ranks, head: Callable[..., torch.Tensor], plain_head: Callable[..., torch.Tensor]
) -> str | None:
    """What differs where ranks run a split decoder and its head, as the rest of a sentence."""
    home, device = proof.states.device, ranks.devices[0]
    closeness = proof.closeness if home.type == device.type else replace(proof.closeness, exact=False)
    what = replace(proof, closeness=closeness).difference(on_ranks(run, ranks))
    if what is not None:
        return what
    found = head(proof.states.to(device)).to(home)
    return None if closeness.holds(found, plain_head(proof.states), 0) else "the logits"
