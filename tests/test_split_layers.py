"""Layers on several devices: a rank has the states, latents, experts and heads that are its own, and all ranks together
have the bits of one device.

On a CPU the ranks are one device; kernels of a share, and the exchange, run in Triton's interpreter.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cpu_capture import record
from split_engines import PARAMS, answers, engine_of, target_of, use_peers

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention.backend import TorchBackend
from specdec.attention.kernels.own_keys import PathKeys, own_keys
from specdec.attention.kernels.page_table import PageTable
from specdec.attention.kernels.ragged_attention import ragged_attention
from specdec.attention.kernels.tree_attention import choose_key_split, tree_attention
from specdec.attention.plan import Pack, RunSlots
from specdec.draft_models.lookup import NgramDrafter
from specdec.gpu.operations import KERNELS, REFERENCE
from specdec.gpu.ranks import PeerRanks, Ranks, map_tensors
from specdec.layers.gemm.linear import Mlp
from specdec.layers.gemm.product import Product, choose_split_k
from specdec.layers.latent import LatentParts, LatentProduct, expand_latent
from specdec.layers.moe.experts import Experts, apply_experts, reference_apply_experts
from specdec.layers.moe.routing import Router, Routing, reference_route, route
from specdec.layers.norm import Norm
from specdec.layers.packed.weight_slices import StackedWeights, place_weight
from specdec.layers.rope_store import Heads
from specdec.layers.split.layer_shares import layer_share, obstacle
from specdec.models.target import TargetModel

from devices import DEVICE
from marks import deep, examples
from tiny_families import build_target, spread

CHAIN = SpecConfig(3, adaptive=False)
HEADS, HEAD_DIM, LENGTH = 8, 256, 300


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_peers(monkeypatch)


# recurrent layers: heads' states, records and inputs


def test_prompts_that_part_after_a_state_share_it(three_prompts) -> None:
    """On several devices prefixes were kept as for a drafter with K/V of its own: by the token after them, too."""
    engine, [_, prompt, _] = engine_of(target_of("qwen3_5"), 2), three_prompts
    one = SamplingParams(max_new_tokens=1)
    hits = [engine.generate([*prompt[:32], token], one)[0].stats.cached_tokens for token in (1, 1, 2)]
    assert hits == [0, 32, 32]


@pytest.mark.parametrize("count", [2, deep(4)])
def test_ranks_divide_states_and_records(count, three_prompts) -> None:
    """Those of all ranks, side by side, are those of one device, and copies for cached prefixes are too."""
    one, split = (engine_of(target_of("qwen3_5"), n, prefill_chunk=16, max_batch_size=1) for n in (1, count))
    for engine in (one, split):
        engine.generate(three_prompts[1:2], PARAMS[1:2])
    [whole], shares = one.cache.stores, split.cache.stores
    channels = [4 * 8 // count, 4 * 8 // count, 8 * 128 // count]  # queries, keys, values
    recurrent = {layer: kept for layer, kept in whole.layers.items() if kept.state is not None}
    for layer, kept in recurrent.items():
        assert kept.state.matrices.any(dim=-1).any(dim=-1).any(dim=-1).sum() > 1, "copies, of one request at a time"
        parts = [share.layers[layer] for share in shares]
        states = [part.state for part in parts if part.state is not None]
        assert torch.cat([state.matrices for state in states], dim=1).equal(kept.state.matrices)
        inputs = zip(*(state.inputs.split(channels, dim=2) for state in states), strict=True)
        assert torch.cat([torch.cat(part, dim=2) for part in inputs], dim=2).equal(kept.state.inputs)
        for pools in zip(kept.fields[1:], *(part.fields[1:] for part in parts), strict=True):
            assert torch.cat(pools[1:], dim=1).equal(pools[0])
    sizes = [engine.target.stored_layout.state_bytes(torch.float32) for engine in (one, split)]
    sizes = [size - 8 * len(recurrent) for size in sizes]  # lengths
    assert sizes[0] == count * sizes[1]


@pytest.mark.slow
def test_kernels_of_ranks_have_the_tokens_of_one_device(random_prompt, monkeypatch) -> None:
    """In captured chains, and after a hit, for which the states of every rank are folded and copied."""
    torch.manual_seed(0)
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "vocab_size": 96}
    target = TargetModel(spread(build_target("qwen3_5", **kinds)).eval(), REFERENCE)
    asked, params = [random_prompt(examples(14, 30), seed=3)], SamplingParams(max_new_tokens=3, ignore_eos=True)
    short = SamplingParams(max_new_tokens=2, ignore_eos=True, logprobs=0)
    settings = {"max_batch_size": 1, "max_model_len": 64, "deterministic": False}
    with engine_of(target, 1, **settings) as engine:
        [plain] = engine.generate(asked, params)
    after = [*asked[0], *plain.token_ids, 3]
    with engine_of(target, 1, **settings, prefix_cache=False) as engine:
        [expected] = engine.generate(after, short)
    use_peers(monkeypatch)
    monkeypatch.setattr("specdec.runtime.rounds.prompt_sizes.MIN_TOKENS", 4)
    monkeypatch.setattr("specdec.engine.capture_for", lambda *_: record)
    with engine_of(target, 2, NgramDrafter(), CHAIN, **settings, attention="triton") as engine:
        [out] = engine.generate(asked, params)
        assert out.token_ids == plain.token_ids
        [again] = engine.generate(after, short)
        assert again.stats.cached_tokens == examples(16, 32) and again.token_ids == expected.token_ids
        scores = [torch.tensor([step.logprob for step in out.logprobs]) for out in (again, expected)]
        torch.testing.assert_close(*scores, rtol=0, atol=1e-3)
        assert engine.stats().captures.made and not engine.stats().captures.refused


# multi-head latent attention: latents are whole on each rank, which makes queries, keys and values of its heads


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
        for whole, rows in ((latent.kv, own.kv), (latent.q, own.q)):
            assert rows is whole is None or torch.cat(rows.weight.parts).equal(whole.weight.chunk(2)[rank])
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
    weights = [torch.randn(height, width) / 50 for height in (2 * 264, 2 * (264 - rotated + 24))]
    for weight in weights:
        assert choose_split_k(*weight.shape) != choose_split_k(len(weight) // 2, width)
    latent = LatentParts(*(LatentProduct(gain, weight) for weight in weights), rotated, interleaved=True)
    product = Product.from_value(torch.randn(2, 2 * width + rotated))
    whole = expand_latent(product, latent, heads, KERNELS).parts[0].split(heads.sections, 1)
    layer = target_of("deepseek_v3").decoder.parts.layers[1]
    qkv, out = torch.empty(2 * width + rotated, 64), torch.empty(64, 2 * 24)
    for rank in range(2):
        share = layer_share(replace(layer, heads=heads, latent=latent, qkv=qkv, out=out), rank, 2)
        own: LatentParts = map_tensors(share.latent, partial(place_weight, put=torch.cat), StackedWeights)
        columns = expand_latent(product, own, share.heads, KERNELS).parts[0].split(share.heads.sections, 1)
        for kind, part in zip(whole, columns, strict=True):
            assert part.equal(kind.chunk(2, 1)[rank])


def test_columns_that_ranges_of_a_sum_do_not_fill_are_on_the_last_rank():
    """320 are 256 and 64: ranges of an MLP's width may be unequal, but not those of heads."""
    whole = torch.arange(640.0)[:, None]  # rows of the gate, then of up
    mlp = Mlp(whole.expand(-1, 64), "silu", whole[:320].T.expand(64, -1))
    parts = replace(target_of("llama").decoder.parts.layers[0], mlp=mlp, out=torch.empty(64, 320))
    for rank, own in enumerate((slice(0, 256), slice(256, 320))):
        share = layer_share(parts, rank, 2)
        assert share.split_ks.out.by_rows and not share.split_ks.down.by_rows
        assert share.mlp.down.equal(mlp.down[:, own])
        gate_up = torch.cat([mlp.gate_up[:320][own], mlp.gate_up[320:][own]])
        assert torch.cat(share.mlp.gate_up.parts).equal(gate_up)


def test_rows_and_columns_that_ranks_exchange_in_pairs_are_even():
    layer = target_of("llama").decoder.parts.layers[0]
    for rows, columns, fits in ((64, 64, True), (64, 50, False), (50, 64, False)):
        reason = obstacle(replace(layer, out=torch.empty(rows, columns)), 2)
        assert reason is None if fits else f"out weight of {rows} rows and {columns} columns" in str(reason)


# experts: a rank computes those that it has, and all get the parts of all


def test_a_rank_has_its_experts_as_views_and_the_whole_router():
    parts = target_of("gpt_oss").decoder.parts.layers[0]
    assert parts.moe is not None
    for rank in range(2):
        share = layer_share(parts, rank, 2).moe
        assert share is not None and share.router.owned == (4 * rank, 4)
        own, whole = share.experts, parts.moe.experts
        for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
            tensor, all_of_it = getattr(own, name), getattr(whole, name)
            assert tensor.equal(all_of_it[4 * rank : 4 * rank + 4])
            assert tensor.untyped_storage().data_ptr() == all_of_it.untyped_storage().data_ptr()
        assert share.router.weight is parts.moe.router.weight


def mixture() -> tuple[torch.Tensor, Router, Experts]:
    torch.manual_seed(0)
    x = torch.randn(5, 64)
    router = Router(torch.randn(6, 64), 3, normalised=False)
    return x, router, Experts(torch.randn(6, 32, 64) / 8, torch.randn(6, 64, 16) / 4, "silu")


def shares(router: Router, experts: Experts) -> list[tuple[Router, Experts]]:
    halves = zip(experts.gate_up.chunk(2), experts.down.chunk(2), strict=True)
    return [
        (router._replace(owned=(3 * rank, 3)), experts._replace(gate_up=gate_up, down=down, shared=True))
        for rank, (gate_up, down) in enumerate(halves)
    ]


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("rows", [1, 5], ids=["lone", "some"])
@pytest.mark.parametrize("few", [True, False], ids=["few", "listed"])
def test_kernels_of_a_share_compute_the_parts_of_its_experts(few: bool, rows: int):
    x, router, experts = mixture()
    x = x[:rows]
    whole = apply_experts(x, route(x, router), experts, few=few).parts
    torch.testing.assert_close(whole, reference_apply_experts(x, reference_route(x, router), experts).parts)
    owned = []
    for own_router, own in shares(router, experts):
        routing, wanted = route(x, own_router), reference_route(x, own_router)
        assert routing.experts.equal(wanted.experts)
        assert routing.weights.equal(route(x, router).weights), "those of all experts"
        parts = apply_experts(x, routing, own, few=few).parts
        mine = routing.experts.t() >= 0  # [k, T]
        assert parts[mine].equal(whole[mine])
        reference = reference_apply_experts(x, wanted, own).parts
        torch.testing.assert_close(reference[mine], whole[mine])
        owned.append(mine)
    assert (owned[0] ^ owned[1]).all()


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("kind", [Ranks, PeerRanks])
def test_every_rank_selects_each_part_from_its_owner(kind: type[Ranks]):
    ranks = kind([torch.device("cpu")] * 2)
    ranks.reserve(3 * 5 * 64)
    x, router, experts = mixture()
    whole = reference_apply_experts(x, reference_route(x, router), experts).parts
    for _ in range(2):
        ranks.begin()
        ranks.send(x)
        ranks.send(x)
        for number in range(3):
            routings = [reference_route(x, own) for own, _ in shares(router, experts)]
            mine = [(one.experts.t() >= 0)[..., None] for one in routings]
            parts = [torch.where(own, whole + number, torch.nan).contiguous() for own in mine]
            for selected in ranks.select(parts, [one.experts for one in routings]):
                assert selected.equal(whole + number)
        ranks.end()
    ranks.check()


def test_rows_beyond_the_room_of_an_exchange_are_whole_in_blocks(random_prompt: Callable[..., list[int]]):
    target = target_of("qwen3_moe")
    asked = [random_prompt(20, seed=4)] * 2
    alone = answers(engine_of(target, 1), asked)
    engine = engine_of(target, 2)
    ranks = engine.target.ranks
    assert ranks is not None
    ranks.reserve(7 * 4 * 64)  # seven rows of a sum of four parts
    assert answers(engine, asked) == alone


def test_ids_of_experts_are_counted_from_the_first_of_the_rank():
    router = Router(torch.eye(4), 2, owned=(2, 2))
    experts = reference_route(torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 4.0, 3.0], [4.0, 1.0, 0.0, 3.0]]), router)
    assert isinstance(experts, Routing) and experts.experts.tolist() == [[-1, -1], [0, 1], [-1, 1]]


# heads: their number is part of the cut of keys (`choose_key_split`), and so of the bits: eight heads of 256 channels
# have longer splits than four


def text(num_queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [1, H, N, D] of the newest tokens; K and V [LENGTH, H, D], a slot a position."""
    noise = torch.Generator().manual_seed(0)
    shapes = (1, HEADS, num_queries, HEAD_DIM), (LENGTH, HEADS, HEAD_DIM), (LENGTH, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=noise).half().to(DEVICE) for shape in shapes)
    return q, k, v


def by_rank(attend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shares: int) -> torch.Tensor:
    """What two ranks make of half of the heads each, side by side."""
    halves = zip(q.chunk(2, 1), k.chunk(2, 1), v.chunk(2, 1), strict=True)
    return torch.cat([attend(*(part.contiguous() for part in half), shares=shares) for half in halves], dim=2)


@pytest.mark.usefixtures("kernels_run")
def test_a_rank_cuts_the_keys_of_chains_as_one_device() -> None:
    assert choose_key_split(HEAD_DIM, 2, HEADS) != choose_key_split(HEAD_DIM, 2, HEADS // 2)
    q, k, v = text(1)
    pages = torch.arange(LENGTH - 1, device=DEVICE)[None]
    length = torch.tensor([LENGTH - 1], device=DEVICE)
    table = PageTable(pages, None, length, 1)
    path = PathKeys(table, own_keys(table, length[None]), length[None])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shares: int) -> torch.Tensor:
        return tree_attention(q, k, v, path, scaling=0.1, shares=shares)

    whole = attend(q, k, v, 1)
    assert torch.equal(by_rank(attend, q, k, v, 2), whole)
    assert not torch.equal(by_rank(attend, q, k, v, 1), whole)


@pytest.mark.usefixtures("kernels_run")
def test_a_rank_cuts_the_keys_of_prompts_as_one_device() -> None:
    q, k, v = text(3)
    numbers = ([0], [LENGTH - 3], [3])
    pack = Pack.from_lengths(*(torch.tensor(x, device=DEVICE) for x in numbers), 3)
    lines = RunSlots(torch.arange(LENGTH, device=DEVICE)[None], torch.zeros(1, dtype=torch.int64, device=DEVICE), None)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shares: int) -> torch.Tensor:
        return ragged_attention(q, k, v, pack, lines, scaling=0.1, exact=True, shares=shares)

    whole = attend(q, k, v, 1)
    assert torch.equal(by_rank(attend, q, k, v, 2), whole)
    assert not torch.equal(by_rank(attend, q, k, v, 1), whole)


@pytest.mark.parametrize(("count", "shares"), [(1, 1), (2, 2), (8, 4)])
def test_attention_of_every_rank_knows_in_how_many_parts_ranks_hold_the_heads(
    count: int, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four K/V heads on eight ranks are four, each on two of them."""
    seen = []
    attention = TorchBackend.attention

    def noted(backend: TorchBackend, plan: Any, group: Any, window: Any, shares: int) -> Any:
        seen.append(shares)
        return attention(backend, plan, group, window, shares)

    monkeypatch.setattr(TorchBackend, "attention", noted)
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    config = EngineConfig(fused=True, tensor_parallel=count, max_model_len=64, device="cpu")
    with Engine.from_pretrained(build_target("llama", **sizes), config=config) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=3))
    assert set(seen) == {shares}
    assert len(seen) % count == 0
