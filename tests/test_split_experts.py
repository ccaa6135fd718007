"""Experts on several devices: a rank computes those that it has, and all get the parts of all, as of one device.

On a CPU the ranks are one device; the kernels of a share and of the exchange run in Triton's interpreter.
"""

from collections.abc import Callable

import pytest
import torch
from split_engines import answers, engine_of, target_of, use_peers

from specdec.gpu.ranks import PeerRanks, Ranks
from specdec.layers.moe.experts import Experts, apply_experts, reference_apply_experts
from specdec.layers.moe.routing import Router, Routing, reference_route, route
from specdec.layers.split.layer_shares import layer_share

CPUS = [torch.device("cpu")] * 2


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_peers(monkeypatch)


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
    ranks = kind(CPUS)
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
