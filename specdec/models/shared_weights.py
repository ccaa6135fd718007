"""A target on several ranks: places each weight only on its rank, and checks the layers.

Layer by layer, a rank's slices are copied to its device. If the model is on the first device, rank 0's slices in one
piece are views. Rank 0 has the whole embeddings; the head is divided by rows. If weights are re-pointed or updated
later, the next step raises. A probe's context knows one device: `divide` makes one context per rank for a forward, with
the rank's share of the heads and of earlier records; `unite` merges their records, heads in the order of ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specdec.errors import ConfigError
from specdec.gpu.operations import Operations
from specdec.gpu.ranks import MAX_ROWS, Ranks
from specdec.layers.description.decoder_parts import DecoderParts, Unfusable
from specdec.layers.fuse import FusedLinear, describe_decoder, fuse_embedding, fuse_linear
from specdec.layers.packed.packed_modules import weight_of
from specdec.layers.split.layer_shares import PAIR, most_exchanged, require_shares
from specdec.layers.split.split_decoder import SplitDecoder, SplitHead
from specdec.models.probe import ProbeResult, Run
from specdec.modules.private_copy import private_copy


def describe_divisible(name: str, decoder: nn.Module, ops: Operations | None, ranks: Ranks) -> DecoderParts:
    """Describe a text model for `share_among`. Raises ConfigError or UnsupportedModelError if it cannot be divided."""
    try:
        if ops is None:
            raise Unfusable("it was made without operations for fused layers")
        parts = describe_decoder(decoder, unmerged=True)
    except Unfusable as reason:
        raise ConfigError(
            f"tensor_parallel={len(ranks)} splits fused layers, and {name} runs unfused: {reason}; use a family that "
            "has them (on a CPU with fused=True), or tensor_parallel=1"
        ) from reason
    require_shares(name, parts, len(ranks))
    return parts


def share_among(
    parts: DecoderParts, decoder: nn.Module, head: nn.Module, ops: Operations, ranks: Ranks
) -> tuple[SplitDecoder, nn.Module]:
    """Divide a text model, described as `parts`, and its head among ranks. The given modules may be on any device and
    are not changed."""
    needed = MAX_ROWS * most_exchanged(parts, len(ranks))
    if ranks.room < needed:  # captures hold addresses of earlier reservations
        ranks.reserve(needed)
    placed: dict[int, torch.Tensor] = {}
    source = place_module(decoder.get_input_embeddings(), ranks, placed)  # type: ignore[operator]
    split = SplitDecoder(decoder.config, parts, fuse_embedding(source, ops), ops, ranks)
    return split, share_head(head, ops, ranks, placed)


def share_head(head: nn.Module, ops: Operations, ranks: Ranks, placed: dict[int, torch.Tensor]) -> nn.Module:
    """The head divided by rows; on rank 0 if it is more than a product or its rows do not divide."""
    if not isinstance(fuse_linear(head, ops), FusedLinear) or len(weight_of(head)) % (PAIR * len(ranks)):
        return fuse_linear(place_module(head, ranks, placed), ops)
    weight = weight_of(head)
    first = placed.get(id(weight), weight)  # it may be tied to the embedding
    return SplitHead([first, *[weight] * (len(ranks) - 1)], head.bias, ops, ranks)  # type: ignore[arg-type]


@torch.inference_mode(False)
def place_module(module: nn.Module, ranks: Ranks, placed: dict[int, torch.Tensor]) -> nn.Module:
    """A private copy with its weights on rank 0. placed: those that are there, by the id of the original, so that
    shared weights stay shared."""

    def put(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in placed:
            placed[id(tensor)] = ranks.put(0, [tensor.detach()])
        return placed[id(tensor)]

    twin = private_copy(module)
    for part in twin.modules():
        part._parameters = {
            name: None if param is None else nn.Parameter(put(param), requires_grad=False)
            for name, param in part._parameters.items()
        }
        part._buffers = {name: None if value is None else put(value) for name, value in part._buffers.items()}
    return twin


def on_ranks(run: Run, ranks: Ranks) -> Run:
    """Wrap `run` of a split decoder to take and return tensors on the probe's device."""

    def divided(tokens: torch.Tensor, positions: torch.Tensor, context: Any) -> torch.Tensor:
        shares = context.divide(ranks.devices)
        shares[0].other_ranks = shares[1:]
        with ranks.turn:
            ranks.begin()
            states = run(tokens.to(ranks.devices[0]), positions.to(ranks.devices[0]), shares[0])
            context.unite(shares)
        return states.to(tokens.device)

    return divided


def difference_on_ranks(
    proof: ProbeResult,
    run: Run,
    ranks: Ranks,
    head: Callable[..., torch.Tensor],
    plain_head: Callable[..., torch.Tensor],
) -> str | None:
    """The difference if ranks run a split decoder and its head, as the end of a sentence."""
    home, device = proof.states.device, ranks.devices[0]
    tolerance = proof.tolerance if home.type == device.type else replace(proof.tolerance, exact=False)
    what = replace(proof, tolerance=tolerance).difference(on_ranks(run, ranks))
    if what is not None:
        return what
    found = head(proof.states.to(device)).to(home)
    return None if tolerance.holds(found, plain_head(proof.states), 0) else "the logits"
