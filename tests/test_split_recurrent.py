"""Recurrent layers on several devices: a rank has its heads' states, records and inputs, and all have the bits of one
device.

On a CPU the ranks are one device; kernels and the exchange run in Triton's interpreter.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import publish
from split_engines import PARAMS, TREE, WIDE, accepted_trees, answers, cached_tokens_of_two_ranks, engine_of, use_peers
from tape import record

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.ngram import NgramDrafter
from specdec.errors import SpecDecError
from specdec.gpu.operations import REFERENCE
from specdec.models.target import TargetModel

from marks import deep
from tiny_models import build_target, spread

HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"linear_value_head_dim": 128},  # four ranges of K in the sum after a recurrent layer
    "qwen3_next": {"num_experts": 8, "num_key_value_heads": 2},  # weights by key head; the sum by rows
    "qwen3_5_moe": {"num_experts": 8, "linear_value_head_dim": 16, "linear_num_value_heads": 4},
}
CHAIN = SpecConfig(3, adaptive=False)


@cache
def target_of(family: str) -> TargetModel:
    torch.manual_seed(0)
    model = build_target(family, **{**WIDE, **HEADS, **FAMILIES[family]})
    return TargetModel(spread(model).eval(), REFERENCE, deterministic=True)


@pytest.fixture(scope="module")
def asked(random_prompt: Callable[..., list[int]]) -> list[list[int]]:
    """Prompts whose answers cross a fold. One ends where a state is copied that no token after it has folded."""
    return [random_prompt(length, seed=length) for length in (13, 49 - PARAMS[1].max_new_tokens, 30)]


@pytest.mark.parametrize("count", [2, deep(4)])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", deep("qwen3_5_moe")])
def test_ranks_have_the_bits_of_one_device(family, count, asked, scripted, tree_script) -> None:
    """In trees and chunks, and next to others."""
    accepted_trees(target_of(family), count, asked, scripted, tree_script, page_size=4)


def test_chains_heads_preemption_and_cached_prefixes_too(asked) -> None:
    target = target_of("qwen3_5")
    alone = answers(engine_of(target, 1, max_batch_size=1), asked)
    assert cached_tokens_of_two_ranks(target, asked, alone, tight=62) == 32 + 16


def test_prompts_that_part_after_a_state_share_it(asked) -> None:
    """On several devices prefixes were kept as for a drafter with K/V of its own: by the token after them, too."""
    engine, [prompt, *_] = engine_of(target_of("qwen3_5"), 2), asked[1:]
    hits = [engine.generate([*prompt[:32], token], PARAMS[0])[0].stats.cached_tokens for token in (1, 1, 2)]
    assert hits == [0, 32, 32]


@pytest.mark.parametrize("count", [2, deep(4)])
def test_ranks_divide_states_and_records(count, asked) -> None:
    """Those of all ranks, side by side, are those of one device, and copies for cached prefixes are too."""
    one, split = (engine_of(target_of("qwen3_5"), n, prefill_chunk=16, max_batch_size=1) for n in (1, count))
    for engine in (one, split):
        engine.generate(asked, PARAMS)
    [whole], shares = one.cache.stores, split.cache.stores
    channels = [4 * 8 // count, 4 * 8 // count, 8 * 128 // count]  # queries, keys, values
    for layer, kept in whole.layers.items():
        if kept.state is None:
            continue
        assert kept.state.matrices.any(dim=-1).any(dim=-1).any(dim=-1).sum() > len(asked), "copies too"
        parts = [share.layers[layer] for share in shares]
        states = [part.state for part in parts if part.state is not None]
        assert torch.cat([state.matrices for state in states], dim=1).equal(kept.state.matrices)
        inputs = zip(*(state.inputs.split(channels, dim=2) for state in states), strict=True)
        assert torch.cat([torch.cat(part, dim=2) for part in inputs], dim=2).equal(kept.state.inputs)
        for pools in zip(kept.fields[1:], *(part.fields[1:] for part in parts), strict=True):
            assert torch.cat(pools[1:], dim=1).equal(pools[0])
    sizes = [engine.target.stored_layout.state_bytes(torch.float32) - 8 * 3 for engine in (one, split)]  # and lengths
    assert sizes[0] == count * sizes[1]


@pytest.mark.parametrize("family", ["qwen3_5", *map(deep, ("qwen3_next", "qwen3_5_moe"))])
def test_modules_of_a_hybrid_draft_the_same(family, tmp_path: Path, asked) -> None:
    """MTP modules run on the first device."""
    publish(family, tmp_path, vocab_size=96)
    found = []
    for count in (1, 2):
        config = EngineConfig(tensor_parallel=count, fused=True, deterministic=True, max_model_len=128, device="cpu")
        with Engine.from_pretrained(tmp_path, "mtp", spec=TREE, config=config) as engine:
            outs = engine.generate(asked, PARAMS)
            found.append([(out.token_ids, out.logprobs, out.stats.rounds) for out in outs])
    assert found[0] == found[1]


@pytest.mark.slow
def test_kernels_of_ranks_have_the_tokens_of_one_device(random_prompt, monkeypatch) -> None:
    """In captured chains, and after a hit, for which the states of every rank are folded and copied."""
    torch.manual_seed(0)
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "vocab_size": 96}
    target = TargetModel(spread(build_target("qwen3_5", **kinds)).eval(), REFERENCE)
    asked, params = [random_prompt(26, seed=3)], SamplingParams(max_new_tokens=7, ignore_eos=True)
    short = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=0)
    settings = {"max_batch_size": 1, "max_model_len": 64, "deterministic": False}
    with engine_of(target, 1, **settings) as engine:
        [plain] = engine.generate(asked, params)
    after = [*asked[0], *plain.token_ids, 3]
    with engine_of(target, 1, **settings, prefix_cache=False) as engine:
        [expected] = engine.generate(after, short)
    use_peers(monkeypatch)
    monkeypatch.setattr("specdec.runtime.rounds.captured_prompts.MIN_TOKENS", 4)
    monkeypatch.setattr("specdec.engine.capture_for", lambda *_: record)
    with engine_of(target, 2, NgramDrafter(), CHAIN, **settings, attention="triton") as engine:
        [out] = engine.generate(asked, params)
        assert out.token_ids == plain.token_ids
        [again] = engine.generate(after, short)
        assert again.stats.cached_tokens == 32 and again.token_ids == expected.token_ids
        scores = [torch.tensor([step.logprob for step in out.logprobs]) for out in (again, expected)]
        torch.testing.assert_close(*scores, rtol=0, atol=1e-3)
        assert engine.stats().captures.made and not engine.stats().captures.refused


# what is refused


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        (
            "qwen3_5",
            {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
            "layer 0 has 3 key heads and 6 value heads of linear attention; a number of devices must divide both",
        ),
        ("lfm2", {}, "Lfm2Model has no fused form"),
        ("granitemoehybrid", {}, "GraniteMoeHybridModel has no fused form"),
    ],
    ids=["key heads", "lfm2", "granite"],
)
def test_what_cannot_be_shared_is_refused(family, fields, said) -> None:
    """A model, and a target that is whole."""
    model, config = build_target(family, **fields).eval(), EngineConfig(fused=True, tensor_parallel=2, device="cpu")
    with pytest.raises(SpecDecError, match=said):
        Engine.from_pretrained(model, config=config)
    with pytest.raises(SpecDecError, match=said):
        Engine(TargetModel(model, REFERENCE), config=config)
