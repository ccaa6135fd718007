"""Multi-head latent attention on several devices: latents are whole on each, and a rank makes the queries, keys and
values of its heads.

On a CPU the ranks are one device; the kernels of a share run in Triton's interpreter.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from split_engines import engine_of, target_of, use_peers

from specdec.gpu.operations import KERNELS
from specdec.gpu.tensor_tree import map_tensors
from specdec.layers.gemm.product import Product, choose_split_k
from specdec.layers.latent import LatentParts, expand_latent
from specdec.layers.norm import Norm
from specdec.layers.packed.weight_slices import StackedWeights, place_weight
from specdec.layers.rope_store import Heads
from specdec.layers.split.layer_shares import layer_share


@pytest.mark.parametrize("name", ["deepseek_v3", "no latent of queries"])
def test_a_rank_has_the_latents_and_what_makes_its_heads_of_them(name: str):
    """Queries without a latent are divided, and what follows them is not."""
    target = target_of(name)
    parts = target.decoder.parts.layers[1]
    latent = parts.latent
    assert latent is not None
    for rank in range(2):
        share = layer_share(parts, rank, 2)
        own: Any = share.latent
        assert share.heads.num_q == share.heads.num_kv == 4
        queries = 0 if latent.q is not None else parts.heads.num_q * parts.heads.head_dim
        halves = parts.qkv[:queries].chunk(2)[rank], parts.qkv[queries:]
        assert torch.cat(share.qkv.parts).equal(torch.cat(halves))
        assert torch.cat(own.kv.parts).equal(latent.kv.chunk(2)[rank])
        assert own.q is None if latent.q is None else torch.cat(own.q.parts).equal(latent.q.chunk(2)[rank])
    stores = engine_of(target, 2).cache.stores
    sizes = {(layer.k.shape[1:], layer.v.shape[1:]) for store in stores for layer in store.layers.values()}
    assert sizes == {((4, parts.heads.head_dim), (4, parts.heads.v_dim))}


def test_kernels_of_a_share_make_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch):
    """Half of the rows of these weights are summed over other ranges of K by themselves."""
    use_peers(monkeypatch)
    torch.manual_seed(0)
    width, rotated = 2560, 16
    heads = Heads(2, 2, 264, last=True, narrow_v_dim=24)
    gain = Norm(torch.rand(width) + 0.5, 1e-6)
    latent = LatentParts(
        q=torch.randn(2 * 264, width) / 50,
        q_norm=gain,
        kv=torch.randn(2 * (264 - rotated + 24), width) / 50,
        kv_norm=gain,
        rotated=rotated,
        interleaved=True,
    )
    for weight in (latent.q, latent.kv):
        assert weight is not None and choose_split_k(*weight.shape) != choose_split_k(len(weight) // 2, width)
    product = Product.from_value(torch.randn(2, 2 * width + rotated))
    whole = expand_latent(product, latent, heads, KERNELS).parts[0].split(heads.sections, 1)
    layer = target_of("deepseek_v3").decoder.parts.layers[1]
    qkv, out = torch.empty(2 * width + rotated, 64), torch.empty(64, 2 * 24)
    for rank in range(2):
        share = layer_share(replace(layer, heads=heads, latent=latent, qkv=qkv, out=out), rank, 2)
        own: LatentParts = map_tensors(share.latent, partial(place_weight, put=joined), StackedWeights)
        columns = expand_latent(product, own, share.heads, KERNELS).parts[0].split(share.heads.sections, 1)
        for kind, part in zip(whole, columns, strict=True):
            assert part.equal(kind.chunk(2, 1)[rank])


def joined(pieces: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return torch.cat(list(pieces), dim)
