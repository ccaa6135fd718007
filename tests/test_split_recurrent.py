"""Recurrent layers on several devices: a rank has its heads' states, records and inputs, and all have the bits of one
device.

On a CPU the ranks are one device; kernels and the exchange run in Triton's interpreter.
"""

import pytest
import torch
from split_engines import PARAMS, engine_of, target_of, use_peers
from tape import record

from specdec import SamplingParams, SpecConfig
from specdec.draft_models.lookup import NgramDrafter
from specdec.gpu.operations import REFERENCE
from specdec.models.target import TargetModel

from marks import deep, examples
from tiny_models import build_target, spread

CHAIN = SpecConfig(3, adaptive=False)


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
