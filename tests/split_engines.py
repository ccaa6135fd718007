"""Engines over several ranks (one device on a CPU), with requests and expected answers. A plugin of conftest.py."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

import specdec.engine
from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.gpu.operations import REFERENCE
from specdec.gpu.ranks import PeerRanks
from specdec.models.target import TargetModel

from marks import examples, is_deep
from proved_models import SHARED
from tiny_families import FULL, LINEAR, SLIDING, TWO_OWNERS, VOCAB, build_target, spread

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 128}
WIDE |= {"num_key_value_heads": 4}  # four ranges of K in every sum
GLOBAL: dict[str, Any] = {"num_global_key_value_heads": 2, "global_head_dim": 128}
LATENTS: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 4}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 256}
RECURRENT = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
ONE_HEAD = {**GLOBAL, "num_key_value_heads": 1, "num_global_key_value_heads": 1}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma4-31b": ("gemma4-31b", GLOBAL),  # on 4 ranks heads of some layers are divided, others repeated
    "gemma4-e2b": ("gemma4-e2b", {**GLOBAL, "num_global_key_value_heads": 4, **TWO_OWNERS}),
    "one head": ("gemma4-e2b", ONE_HEAD),  # for all, of some layers another layer's
    "cohere": ("cohere", {}),  # the MLP next to attention
    "olmo2": ("olmo2", {"num_key_value_heads": 2}),  # norms over the heads of all ranks
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),  # biases
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}),
    # ranges of 256, the last of 132: ranks have other numbers of columns
    "gemma4-moe": ("gemma4-moe", {**GLOBAL, "num_experts": 8, "top_k_experts": 3, "intermediate_size": 900}),
    "mixtral": ("mixtral", {}),
    "glm4_moe": ("glm4_moe", {"moe_intermediate_size": 256}),  # a shared expert whose columns ranks divide
    "step3p7": ("step3p7", {"num_sliding_attention_heads": 12, "n_routed_experts": 8}),  # gates by head
    # v_head_dim: four ranges of K in the sum after attention
    "deepseek_v3": ("deepseek_v3", {**LATENTS, **GROUPS, "v_head_dim": 128}),
    "no latent of queries": ("deepseek_v3", {**LATENTS, **GROUPS, "q_lora_rank": None, "rope_interleave": False}),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENTS, "v_head_dim": 128}),
    "qwen3_5": ("qwen3_5", {**RECURRENT, "linear_value_head_dim": 128}),  # four ranges after a recurrent layer
    "qwen3_next": ("qwen3_next", {**RECURRENT, "num_experts": 8, "num_key_value_heads": 2}),  # weights by key head
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {**RECURRENT, "linear_num_value_heads": 4, "linear_value_head_dim": 16, "num_experts": 8},
    ),
}
FEWER_LAYERS: dict[str, dict[str, Any]] = {  # but with `make test-deep`: one of each kind
    "olmo2": {"num_hidden_layers": 2},
    "qwen2": {"num_hidden_layers": 2},
    "gemma4-moe": {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]},
    "deepseek_v3": {"num_hidden_layers": 2},
    "qwen3_5": {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]},
}
TREE = SpecConfig(6, 2, 8, adaptive=False)
PARAMS = [
    SamplingParams(max_new_tokens=examples(6, 10), logprobs=VOCAB, temperature=0.9 * (i % 2), seed=i, ignore_eos=True)
    for i in range(3)
]
DETERMINISTIC: dict[str, Any] = {"max_model_len": 128, "deterministic": True, "fused": True}


@pytest.fixture
def three_prompts(random_prompt: Callable[..., list[int]]) -> list[list[int]]:
    """Three prompts whose answers cross a fold of recurrent layers. After the second a state is copied before any later
    token folds it."""
    return [
        random_prompt(5, seed=1) * 6,
        random_prompt(49 - PARAMS[1].max_new_tokens, seed=2),
        random_prompt(1, seed=3),
    ]


def new_target(name: str, **fields: Any) -> TargetModel:
    """Build a deterministic target of `TARGETS`, not divided."""
    torch.manual_seed(0)
    family, own = TARGETS[name]
    fewer = {} if is_deep() else FEWER_LAYERS.get(name, {})
    model = spread(build_target(family, **{**WIDE, **own, **fewer, **fields})).eval()
    return TargetModel(model, REFERENCE, deterministic=True)


@cache
def target_of(name: str) -> TargetModel:
    """Return the target that tests share; none of them changes it."""
    target = new_target(name)
    SHARED[id(target.model)] = target.model
    return target


def engine_of(target: TargetModel, count: int, drafter: Any = None, spec: SpecConfig = TREE, **config: Any) -> Engine:
    settings = EngineConfig(tensor_parallel=count, **{**DETERMINISTIC, **config})
    return Engine(target, drafter, spec=spec, config=settings)


def answers(engine: Engine, asked: Sequence[list[int]]) -> list[Any]:
    """Return tokens and log-probabilities of the whole vocabulary, which show any changed bit of a logit."""
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


def cached_tokens_of_two_ranks(target: TargetModel, asked: Sequence[list[int]], alone: Sequence[Any]) -> int:
    """Check that two ranks give the answers `alone` of one device, preempted and after hits. Returns how many tokens
    were cached."""
    short = engine_of(target, 2, full_slots=80, prefix_cache=False)
    assert answers(short, asked) == alone
    assert short.stats().preemptions > 0

    engine = engine_of(target, 2)
    engine.generate(list(asked), PARAMS)
    assert answers(engine, asked) == alone
    return engine.stats().cached_tokens


def use_peers(monkeypatch: pytest.MonkeyPatch) -> list[PeerRanks]:
    """Run kernels in Triton's interpreter, and let later engines exchange by flags and addresses. Returns the list that
    their ranks are added to."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here; see python -m bench two-gpus")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    made: list[PeerRanks] = []

    def make(device: torch.device, count: int) -> PeerRanks:
        made.append(PeerRanks([device] * count))
        return made[-1]

    monkeypatch.setattr(specdec.engine, "make_ranks", make)
    return made
