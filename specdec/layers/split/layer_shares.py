r"""The share of one of R ranks in a decoder: its heads, its columns of the MLP, and copies of all narrow tensors.

    W_qkv [q | k | v heads, H]     rows of the rank's heads       its own K/V heads, in its own pools
    fewer K/V heads than ranks     rows of one head               each K/V head is stored on R / heads ranks
    W_q, W_kv of latents           rows of the rank's heads       latents are whole on every rank (`layers/latent.py`)
    recurrent layers               the rank's key heads and value heads, their channels and rows (`DeltaMixer.share`)
    W_o [H, q heads]               columns of the rank's heads    parts of a sum, by ranges of K
    W_gate, W_up [I, H]            rows                           no sum is divided
    W_down [H, I]                  columns                        parts of a sum
    W_o, W_down otherwise          rows                           ranks exchange their columns of x, then of y
    experts [E, ..]                E / R whole experts            the parts of the token's chosen experts
    norms, routers, biases after sums                                      the same on every rank
    per-layer embeddings           columns of the rank's layers            put side by side once a forward

The ranges of K are those of the whole weight (`SplitK`). If no range is split between ranks, a rank computes the same
parts as a single device, and their sum in the order of ranges has the same bits. Other weights are divided by rows, and
so are packed weights, whose ranges depend on their number of rows: one rank then computes a row's whole sum. An
expert's sum over its width is never cut, so an expert is on one rank, which computes its part like a single device. A
model that cannot be divided is refused, with the reason.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specdec.errors import UnsupportedModelError
from specdec.gpu.ranks import map_tensors
from specdec.layers.description.decoder_parts import DecoderParts, LayerParts, SplitKs, SumShare
from specdec.layers.gemm.product import split_k_of
from specdec.layers.latent import LatentParts, LatentProduct
from specdec.layers.moe.experts import Experts
from specdec.layers.packed.packed_weight import PackedWeight, Weight
from specdec.layers.packed.weight_slices import Put, StackedWeights, place_weight, range_of, rank_rows
from specdec.layers.per_layer_embedding import EmbeddingParts

PAIR = 2
"""Ranks exchange 16-bit columns as 32-bit numbers."""


def share_of(parts: DecoderParts, rank: int, count: int, put: Put) -> DecoderParts:
    """The share of one of `count` ranks, placed weight by weight. Only the share is placed on a device."""
    layers = tuple(layer_share(layer, rank, count) for layer in parts.layers)
    embeddings = None if parts.embeddings is None else embedding_share(parts.embeddings, rank, count)
    views = replace(parts, layers=layers, embeddings=embeddings)
    share: DecoderParts = map_tensors(views, partial(place_weight, put=put), StackedWeights)
    return share


def layer_share(parts: LayerParts, rank: int, count: int) -> LayerParts:
    """The share of one rank, as views in pieces (`StackedWeights`). `require_shares` has checked that the weights
    divide."""
    mlp, moe = parts.mlp, parts.moe
    out = sum_share(parts.out, count, even=True)
    down = None if mlp is None else sum_share(mlp.down, count, even=False)
    if parts.mixer is None:
        pieces = _attention_share(parts, rank, count)
    else:
        mixer = parts.mixer.share(rank, count)
        pieces = {"qkv": rank_rows(parts.qkv, parts.mixer.sections, rank, count), "mixer": mixer}
    pieces["out"] = _share_of_sum(parts.out, out, rank, count)
    if parts.out_bias is not None and out.by_rows:
        pieces["out_bias"] = rank_rows(parts.out_bias, [len(parts.out_bias)], rank, count)
    if mlp is not None and down is not None:
        own, half = _own_columns(mlp.down, down, rank, count), len(mlp.gate_up) // 2
        rows = own, slice(half + own.start, half + own.stop)  # rows of the gate, and of up
        gate_up: Any = StackedWeights([piece for some in rows for piece in range_of(mlp.gate_up, some)])
        pieces["mlp"] = mlp._replace(gate_up=gate_up, down=_share_of_sum(mlp.down, down, rank, count))
    if moe is not None:
        num_own = len(moe.experts.gate_up) // count
        router = moe.router._replace(owned=(rank * num_own, num_own))
        experts: Experts = map_tensors(moe.experts, lambda tensor: tensor.chunk(count)[rank])
        pieces["moe"] = replace(moe, router=router, experts=experts._replace(shared=True))
    first = parts.qkv.parts[0] if isinstance(parts.qkv, StackedWeights) else parts.qkv
    return replace(parts, split_ks=SplitKs(split_k_of(first, parts.qkv.shape), out, down), **pieces)


def _attention_share(parts: LayerParts, rank: int, count: int) -> dict[str, Any]:
    """The fields of `LayerParts` that are attention's, but for its last product."""
    heads = parts.heads
    kv_shares = min(heads.num_kv, count)
    sections, shares = _first_rows(parts, count)
    own = heads._replace(num_q=heads.num_q // count, num_kv=-(-heads.num_kv // count))  # one head may be on several
    pieces: dict[str, Any] = {"heads": own, "qkv": rank_rows(parts.qkv, sections, rank, count, shares)}
    if parts.qkv_bias is not None:
        pieces["qkv_bias"] = rank_rows(parts.qkv_bias, sections, rank, count, shares)
    if parts.latent is not None:
        pieces["latent"] = _latent_share(parts.latent, rank, count)
    if parts.wide_norms is not None:
        pieces["wide_norms"] = parts.wide_norms._replace(rank=rank, num_ranks=count, kv_shares=kv_shares)
    if parts.head_gates is not None:  # it has so few rows that the share's cut equals the whole's
        pieces["head_gates"] = rank_rows(parts.head_gates, [heads.num_q], rank, count)
    if parts.sinks is not None:
        pieces["sinks"] = parts.sinks.chunk(count)[rank]
    return pieces


def _first_rows(parts: LayerParts, count: int) -> tuple[list[int], list[int]]:
    """Sections of rows of a layer's first weight, and how many parts each is divided into. Latents are not divided."""
    heads = parts.heads
    if parts.latent is None:
        return heads.sections, [count] + [min(heads.num_kv, count)] * (len(heads.sections) - 1)
    queries = [heads.num_q * heads.head_dim] if parts.latent.q is None else []
    return [*queries, len(parts.qkv) - sum(queries)], [count] * len(queries) + [1]


def _latent_share(latent: LatentParts, rank: int, count: int) -> LatentParts:
    """The weights that make the queries, keys and values of one rank's heads."""

    def own(product: LatentProduct) -> LatentProduct:
        rows: Any = rank_rows(product.weight, [len(product.weight)], rank, count)
        return product._replace(weight=rows, split_k=split_k_of(product.weight))

    return latent._replace(q=None if latent.q is None else own(latent.q), kv=own(latent.kv))


def embedding_share(parts: EmbeddingParts, rank: int, count: int) -> EmbeddingParts:
    """The per-layer embeddings of one rank's layers, as views. Ranks have equally many layers; the last ones may have
    fewer."""
    each = parts.width * -(-parts.table.shape[1] // (parts.width * count))
    own = slice(rank * each, (rank + 1) * each)
    return replace(parts, table=parts.table[:, own], columns=own)


def require_shares(name: str, parts: DecoderParts, count: int) -> None:
    """Raise UnsupportedModelError if a decoder cannot be divided among this number of ranks."""
    for number, layer in enumerate(parts.layers):
        if reason := obstacle(layer, count):
            raise UnsupportedModelError(f"tensor_parallel={count} cannot split {name}: layer {number} {reason}")


def obstacle(parts: LayerParts, count: int) -> str | None:
    """Why a layer cannot be divided among `count` ranks, as the end of a sentence."""
    heads = parts.heads
    if parts.moe is not None and len(parts.moe.experts.gate_up) % count:
        return f"has {len(parts.moe.experts.gate_up)} experts, which {count} devices cannot share evenly"
    if parts.mixer is not None:
        if reason := parts.mixer.obstacle(count):
            return reason
    elif heads.num_q % count or (heads.num_kv % count and count % heads.num_kv):
        return (
            f"has {heads.num_q} query heads and {heads.num_kv} K/V heads; a number of devices must divide the query "
            "heads, and divide the K/V heads or be a multiple of them; use such a number, or replicas"
        )
    sums = {"out": parts.out} if parts.mlp is None else {"out": parts.out, "down": parts.mlp.down}
    for name, weight in sums.items():
        rows, columns = weight.shape
        if sum_share(weight, count, even=name == "out").by_rows and (rows % (PAIR * count) or columns % (PAIR * count)):
            return (
                f"has a {name} weight of {rows} rows and {columns} columns, and {count} devices cannot have as many "
                "of them each; use a number that divides both into even parts, or replicas"
            )
    return None


def most_exchanged(parts: DecoderParts, count: int) -> int:
    """32-bit numbers per row, over all ranks, in the largest exchange."""
    most = 0
    for layer in parts.layers:
        if layer.wide_norms is not None:
            heads = layer.heads
            most = max(most, (heads.num_q + 2 * max(heads.num_kv, count)) * heads.head_dim)
        for weight, even in [(layer.out, True)] + ([(layer.mlp.down, False)] if layer.mlp is not None else []):
            share, (rows, columns) = sum_share(weight, count, even=even), weight.shape
            most = max(most, rows, columns) if share.by_rows else max(most, split_k_of(weight).splits * rows)
    return most


def sum_share(weight: Weight, count: int, *, even: bool) -> SumShare:
    """How ranks divide a weight by the columns over which its product sums. even: all ranks get equally many
    columns."""
    split_k, columns = split_k_of(weight), weight.shape[1]
    uneven = columns != split_k.splits * split_k.split_len and even
    if isinstance(weight, PackedWeight) or split_k.splits % count or uneven:
        return SumShare(split_k, by_rows=True)
    return SumShare(split_k.share(count), by_rows=False)


def _share_of_sum(weight: Weight, share: SumShare, rank: int, count: int) -> Any:
    if share.by_rows:
        return rank_rows(weight, [len(weight)], rank, count)
    assert isinstance(weight, torch.Tensor), "a packed weight is shared by rows"
    return weight[:, _own_columns(weight, share, rank, count)].detach()


def _own_columns(weight: Weight, share: SumShare, rank: int, count: int) -> slice:
    """The columns of a rank. The last rank may have fewer, unless ranks divide the weight by rows."""
    columns = weight.shape[1]
    width = columns // count if share.by_rows else share.split_k.splits * share.split_k.split_len
    return slice(rank * width, min((rank + 1) * width, columns))
