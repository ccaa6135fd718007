"""Attention of a rank, which has some of the heads: its keys are cut as on one device, which has all of them.

How many heads there are is part of the cut (`choose_key_split`), and so of the bits: eight of 256 channels have longer
splits than four.
"""

from typing import Any

import pytest
import torch

from specdec import Engine, EngineConfig, SamplingParams
from specdec.attention.backend import TorchBackend
from specdec.attention.kernels.own_keys import own_keys
from specdec.attention.kernels.ragged_attention import ragged_attention
from specdec.attention.kernels.tree_attention import choose_key_split, tree_attention
from specdec.attention.plan import Pack, RunSlots

from tiny_models import build_target

HEADS, HEAD_DIM, LENGTH = 8, 256, 300
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.usefixtures("kernels_run")


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


def test_a_rank_cuts_the_keys_of_chains_as_one_device() -> None:
    assert choose_key_split(HEAD_DIM, 2, HEADS) != choose_key_split(HEAD_DIM, 2, HEADS // 2)
    q, k, v = text(1)
    pages = torch.arange(LENGTH - 1, device=DEVICE)[None]
    length = torch.tensor([LENGTH - 1], device=DEVICE)
    own = own_keys(pages, None, length, length[None], None, page_size=1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shares: int) -> torch.Tensor:
        places = own, pages, None, length, length[None]
        return tree_attention(q, k, v, *places, page_size=1, scaling=0.1, shares=shares)

    whole = attend(q, k, v, 1)
    assert torch.equal(by_rank(attend, q, k, v, 2), whole)
    assert not torch.equal(by_rank(attend, q, k, v, 1), whole)


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
