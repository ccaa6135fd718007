"""Multi-head latent attention on several devices: latents are whole on each, and a rank makes the queries, keys and
values of its heads.

On a CPU the ranks are one device; the kernels of a share run in Triton's interpreter.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import publish
from split_engines import (
    DETERMINISTIC,
    TREE,
    WIDE,
    accepted_trees,
    answers,
    cached_tokens_of_two_ranks,
    engine_of,
    use_peers,
)

from specdec import Engine, EngineConfig
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpWorker
from specdec.errors import UnsupportedModelError
from specdec.gpu.operations import KERNELS, REFERENCE
from specdec.gpu.tensor_tree import map_tensors
from specdec.layers.latent import LatentParts, expand_latent
from specdec.layers.norm import Norm
from specdec.layers.packed.weight_slices import StackedWeights, place_weight
from specdec.layers.product import Product, choose_cut
from specdec.layers.rope_store import Heads
from specdec.layers.split.layer_shares import layer_share
from specdec.models.target import TargetModel

from marks import deep
from tiny_models import VOCAB, build_target, spread

SIZES: dict[str, Any] = {**WIDE, "num_key_value_heads": 8, "head_dim": 4}
RANGES = {"v_head_dim": 128}  # four ranges of K in the sum after attention
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 256}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {**RANGES, **GROUPS}),
    "no latent of queries": ("deepseek_v3", {**GROUPS, "q_lora_rank": None, "rope_interleave": False}),
    "glm4_moe_lite": ("glm4_moe_lite", RANGES),
}


@cache
def target_of(name: str) -> TargetModel:
    torch.manual_seed(0)
    family, fields = FAMILIES[name]
    return TargetModel(spread(build_target(family, **{**SIZES, **fields})).eval(), REFERENCE, deterministic=True)


@pytest.mark.parametrize("count", [2, deep(4)])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_have_the_bits_of_one_device(
    name: str,
    count: int,
    scripted: Callable[..., Any],
    tree_script: Callable[..., Any],
    three_prompts: list[list[int]],
):
    """In trees and chunks, pages of several slots, and next to others."""
    accepted_trees(target_of(name), count, three_prompts, scripted, tree_script, page_size=4)


@pytest.mark.parametrize("name", ["deepseek_v3", *map(deep, ("no latent of queries", "glm4_moe_lite"))])
def test_chains_heads_preemption_and_cached_prefixes_too(name: str, three_prompts: list[list[int]]):
    target = target_of(name)
    alone = answers(engine_of(target, 1, max_batch_size=1), three_prompts)
    assert cached_tokens_of_two_ranks(target, three_prompts, alone, tight=66) > 0


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_modules_draft_the_same_and_the_target_has_the_same_bits(
    tmp_path: Path, three_prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """MTP modules, whose attention has latents too, run on the first device."""
    publish("deepseek_v3", tmp_path, vocab_size=VOCAB)
    drafts: list[Any] = []
    propose = NativeMtpWorker.propose

    def noted(worker: NativeMtpWorker, batch: Any) -> Any:
        tree = propose(worker, batch)
        drafts.append((tree.tokens.tolist(), tree.parents.tolist()))
        return tree

    monkeypatch.setattr(NativeMtpWorker, "propose", noted)
    found = []
    for count in (1, 2):
        config = EngineConfig(tensor_parallel=count, device="cpu", **DETERMINISTIC)
        engine = Engine.from_pretrained(tmp_path, "mtp", spec=TREE, config=config)
        found.append((answers(engine, three_prompts), list(drafts)))
        drafts.clear()
    assert found[0] == found[1] and len(found[0][1]) > 3


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
        assert weight is not None and choose_cut(*weight.shape) != choose_cut(len(weight) // 2, width)
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


@pytest.mark.parametrize(
    ("fields", "count", "said"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, 4, "has 6 query heads and 6 K/V heads; a number of"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, 4, "must divide the query heads"),
        ({"n_routed_experts": 6}, 4, "has 6 experts, which 4 devices cannot share evenly"),
    ],
    ids=["heads", "fewer heads than devices", "experts"],
)
def test_what_cannot_be_shared_is_refused(fields: dict[str, Any], count: int, said: str):
    model = build_target("deepseek_v3", **{**SIZES, **fields}).eval()
    with pytest.raises(UnsupportedModelError, match=f"tensor_parallel={count} cannot split .* {said}"):
        Engine.from_pretrained(model, config=EngineConfig(fused=True, tensor_parallel=count, device="cpu"))
