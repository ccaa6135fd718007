"""Engines over several ranks, which are one device on a CPU, with requests and expected answers. A plugin of
conftest.py."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import specdec.engine
from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.ngram import NgramDrafter
from specdec.gpu.ranks import PeerRanks
from specdec.models.target import TargetModel

from marks import examples
from tiny_models import VOCAB, random_eagle3

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 128}
WIDE |= {"num_key_value_heads": 4}
TREE = SpecConfig(6, 2, 8, adaptive=False)
PARAMS = [
    SamplingParams(max_new_tokens=examples(6, 10), logprobs=VOCAB, temperature=0.9 * (i % 2), seed=i, ignore_eos=True)
    for i in range(3)
]
DETERMINISTIC: dict[str, Any] = {"max_model_len": 128, "deterministic": True, "fused": True}


@pytest.fixture
def three_prompts(random_prompt: Callable[..., list[int]]) -> list[list[int]]:
    return [random_prompt(5, seed=1) * 4, random_prompt(40, seed=2), random_prompt(1, seed=3)]


def engine_of(target: TargetModel, count: int, drafter: Any = None, spec: SpecConfig = TREE, **config: Any) -> Engine:
    settings = EngineConfig(tensor_parallel=count, **{**DETERMINISTIC, **config})
    return Engine(target, drafter, spec=spec, config=settings)


def answers(engine: Engine, asked: Sequence[list[int]]) -> list[Any]:
    """Tokens, and the log-probabilities of the whole vocabulary: another bit of any logit shows."""
    with engine:
        outs = engine.generate(list(asked), PARAMS[: len(asked)])
        engine.table.check()
        return [(out.token_ids, out.logprobs) for out in outs]


def accepted_trees(
    target: TargetModel, count: int, asked: Sequence[list[int]], scripted: Any, tree_script: Any, **config: Any
) -> Engine:
    """Check that `count` ranks which accept paths of trees give the answers of one device that decodes each request
    alone. Returns the closed engine of the ranks."""
    alone = answers(engine_of(target, 1, max_batch_size=1), asked)
    truths = [prompt + tokens for prompt, (tokens, _) in zip(asked, alone, strict=True)]
    engine = engine_of(target, count, scripted(tree_script(truths)), prefill_chunk=16, **config)
    assert answers(engine, asked) == alone
    return engine


def cached_tokens_of_two_ranks(
    target: TargetModel, asked: Sequence[list[int]], alone: Sequence[Any], *, tight: int
) -> int:
    """Check that two ranks give the answers `alone` of one device: with chains, with trees of a head, preempted in
    `tight` slots, and after hits. Returns how many tokens were cached."""
    assert answers(engine_of(target, 2, NgramDrafter(), SpecConfig(3, adaptive=False)), asked) == alone
    assert answers(engine_of(target, 2, random_eagle3(target.model), TREE, max_batch_size=2), asked) == alone

    short = engine_of(target, 2, full_slots=tight, prefix_cache=False)
    assert answers(short, asked) == alone
    assert short.stats().preemptions > 0

    engine = engine_of(target, 2)
    engine.generate(list(asked), PARAMS)
    assert answers(engine, asked) == alone
    return engine.stats().cached_tokens


def use_peers(monkeypatch: pytest.MonkeyPatch) -> list[PeerRanks]:
    """Kernels run in Triton's interpreter, and engines made from now on exchange by flags and addresses. -> their
    ranks."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here; see python -m bench two-gpus")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    made: list[PeerRanks] = []

    def make(device: torch.device, count: int) -> PeerRanks:
        made.append(PeerRanks([device] * count))
        return made[-1]

    monkeypatch.setattr(specdec.engine, "make_ranks", make)
    return made
