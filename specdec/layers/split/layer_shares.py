r"""What one of R ranks has of a decoder: its heads, its columns of the MLP, and everything that is narrow.

    W_qkv [q | k | v heads, H]     rows of the rank's heads       its own K/V heads, in pools of its own
    W_o [H, q heads]               columns of the rank's heads    parts of a sum, by ranges of K
    W_gate, W_up [I, H]            rows                           no sum is shared
    W_down [H, I]                  columns                        parts of a sum
    experts [E, ..]                whole experts, E / R of them   the parts of those that a token is sent to
    norms, routers, biases after sums, per-layer embeddings                the same on every rank

The ranges of K are those of the whole weight (`Cut`), and none may lie on two ranks: so a rank computes the parts that
one device would have computed, and their sum in the order of ranges has the same bits. An expert's sum over its
width is never cut, so an expert lies on one rank, which computes its part as one device would. What cannot be shared so
is refused, with the reason.
"""

from dataclasses import replace

import torch

from specdec.errors import UnsupportedModelError
from specdec.gpu.tensor_tree import map_tensors
from specdec.layers.decoder import Cuts, DecoderParts, LayerParts
from specdec.layers.linear import Mlp
from specdec.layers.moe.experts import Experts
from specdec.layers.packed.packed_weight import Weight
from specdec.layers.product import Cut, cut_of

BY_EXPERT = ("gate_up", "down", "gate_up_bias", "down_bias")


def share_of(parts: DecoderParts, rank: int, device: torch.device, count: int) -> DecoderParts:
    """The share of one of `count` ranks, on its device: copies, but for what is whole or a view on the same device."""
    layers = tuple(layer_share(layer, rank, count) for layer in parts.layers)
    whole = replace(parts, layers=layers, embeddings=None)  # which rank 0 alone computes
    share: DecoderParts = map_tensors(whole, lambda tensor: tensor.to(device))
    return share


def layer_share(parts: LayerParts, rank: int, count: int) -> LayerParts:
    """The share of one rank, of weights that `require_shares` has found to divide."""
    heads, mlp, moe = parts.heads, parts.mlp, parts.moe
    own = heads._replace(num_q=heads.num_q // count, num_kv=heads.num_kv // count)
    kinds = [heads.num_q] + ([heads.num_kv] * (1 if heads.values_are_keys else 2) if heads.num_kv else [])
    rows = [number * heads.head_dim for number in kinds]
    bias = None if parts.qkv_bias is None else _rows(parts.qkv_bias, rows, rank, count)
    if mlp is not None:
        gate_up, down = _dense(mlp.gate_up), _dense(mlp.down)
        own_columns = _own_columns(cut_of(down), rank, count)
        merged = torch.cat([half[own_columns] for half in gate_up.chunk(2)])
        mlp = Mlp(merged, mlp.activation, down[:, own_columns])
    if moe is not None:
        num_own = len(moe.experts.gate_up) // count
        router = moe.router._replace(owned=(rank * num_own, num_own))
        moe = replace(moe, router=router, experts=_experts(moe.experts, rank, count))
    down_cut = None if parts.mlp is None else cut_of(parts.mlp.down).share(count)
    return replace(
        parts,
        heads=own,
        qkv=_rows(_dense(parts.qkv), rows, rank, count),
        qkv_bias=bias,
        out=_columns(_dense(parts.out), rank, count),
        mlp=mlp,
        moe=moe,
        sinks=None if parts.sinks is None else parts.sinks.chunk(count)[rank],
        cuts=Cuts(cut_of(parts.qkv), cut_of(parts.out).share(count), down_cut),
    )


def require_shares(name: str, parts: DecoderParts, count: int) -> None:
    """Raise UnsupportedModelError where a decoder cannot be shared by so many ranks."""
    for number, layer in enumerate(parts.layers):
        if reason := obstacle(layer, count):
            raise UnsupportedModelError(f"tensor_parallel={count} cannot split {name}: layer {number} {reason}")


def obstacle(parts: LayerParts, count: int) -> str | None:
    """Why a layer cannot be shared by `count` ranks, as the end of a sentence."""
    heads = parts.heads
    weights = {"qkv": parts.qkv, "out": parts.out}
    if parts.mlp is not None:
        weights |= {"gate_up": parts.mlp.gate_up, "down": parts.mlp.down}
    if parts.moe is not None:
        experts = parts.moe.experts
        if len(experts.gate_up) % count:
            return f"has {len(experts.gate_up)} experts, which {count} devices cannot share evenly"
        weights |= {"gate_up of experts": experts.gate_up, "down of experts": experts.down}
    if not all(isinstance(weight, torch.Tensor) for weight in weights.values()):
        return "has quantised weights, which run on one device; use tensor_parallel=1, or replicas"
    if parts.wide_norms is not None:
        return "norms all heads of its queries together, which ranks would have to exchange first"
    if parts.parallel:
        return "runs its MLP next to its attention, which has not been tried on several devices"
    if heads.num_kv % count or heads.num_q % count:
        return f"has {heads.num_q} query and {heads.num_kv} key heads, which {count} devices cannot share evenly"
    for name in ("out",) if parts.mlp is None else ("out", "down"):
        cut, columns = cut_of(weights[name]), weights[name].shape[1]
        uneven = columns != cut.splits * cut.split_len and name == "out"  # ranks have as many heads each
        if cut.splits % count or uneven:
            return (
                f"sums {columns} columns of its {name} weight in {_ranges(cut, columns)}, and {count} devices "
                "cannot have whole ranges each: the bits would be others than on one device"
            )
    return None


def most_part_numbers(parts: DecoderParts) -> int:
    """Numbers that a row has in all parts of any sum that ranks share."""
    sums = [layer.out for layer in parts.layers] + [layer.mlp.down for layer in parts.layers if layer.mlp is not None]
    return max(cut_of(weight).splits * weight.shape[0] for weight in sums)


def _experts(experts: Experts, rank: int, count: int) -> Experts:
    """Views."""
    own = {
        name: value.chunk(count)[rank]
        for name, value in experts._asdict().items()
        if name in BY_EXPERT and value is not None
    }
    return experts._replace(**own, shared=True)


def _ranges(cut: Cut, columns: int) -> str:
    return f"one range of {columns}" if cut.splits == 1 else f"{cut.splits} ranges of {cut.split_len}"


def _dense(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def _rows(weight: torch.Tensor, sections: list[int], rank: int, count: int) -> torch.Tensor:
    """The rank's rows of each of these consecutive sections of rows."""
    return torch.cat([section.chunk(count)[rank] for section in weight.split(sections)])


def _own_columns(cut: Cut, rank: int, count: int) -> slice:
    """Of a weight that is cut so. The last rank may have fewer of them."""
    width = cut.share(count).splits * cut.split_len
    return slice(rank * width, (rank + 1) * width)


def _columns(weight: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    """A view."""
    return weight.chunk(count, dim=1)[rank]
