"""A CUDA graph can hold every round: with each drafter, over attention, recurrent layers and mixtures, fused or not.

Engines record their rounds on a tape, which refuses work of the host; kernels run in Triton's interpreter. Tokens are
those of plain decoding in plain torch: a round that had frozen a length would have others.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capturable import capturable, capture
from mtp_checkpoints import publish

import specdec.engine
from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.heads.fused_layers import EchoContext
from specdec.draft_models.lookup import NgramDrafter
from specdec.gpu.operations import REFERENCE
from specdec.gpu.triton_shim import INTERPRETED
from specdec.layers.description.families import FAMILIES
from specdec.models.target import TargetModel
from specdec.modules.private_copy import private_copy
from specdec.modules.transformers_names import family_name

from engine_internals import capture_on_cpu, captured_rounds
from marks import deep, examples, usual_cases

pytest.importorskip("triton")
TREE, CHAIN = SpecConfig(3, 2, 6, adaptive=False), SpecConfig(3, adaptive=False)
LINEAR, FULL = "linear_attention", "full_attention"
SMALL = {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}
PARAMS = SamplingParams(max_new_tokens=examples(6, 9), ignore_eos=True)


@pytest.fixture
def made(make_target, make_drafter, tmp_path) -> Callable[[str, str], tuple[Any, Any]]:
    """made(family, kind): a model, or the folder of one with MTP modules, and a drafter for it."""

    def make(family: str, kind: str) -> tuple[Any, Any]:
        fields = SMALL if family.startswith("qwen3") else {}
        if kind == "mtp" and not family.startswith("gemma4"):
            return publish(family, tmp_path, **fields).folder, kind
        model = make_target(family, **fields)
        return model, make_drafter(kind, model)

    return make


HYBRIDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h", "granitemoehybrid", "lfm2"]
DRAFTERS = ["none", "ngram", "suffix", "eagle3", "block", "lm", "mtp"]
MODULES = ["glm4_moe-shared", "glm4_moe-3", "step-form"]
CASES = [("gemma4-e2b", kind, "torch") for kind in DRAFTERS] + [(family, "mtp", "torch") for family in MODULES]
CASES += [("gemma4-e2b", kind, "triton") for kind in DRAFTERS] + [("qwen3_5", kind, "triton") for kind in DRAFTERS]
CASES += [(family, "eagle3", "triton") for family in HYBRIDS[1:]]
CASES += [(family, "mtp", "triton") for family in (*HYBRIDS[1:3], *MODULES)]
CASES += [(family, "mtp", "fused") for family in HYBRIDS[:3]]
CASES += [("gemma4-e2b", "ordered", "fused")]
"""Target, drafter, and what runs: plain torch, kernels of attention and recurrence, or kernels of whole layers too."""


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here: see python -m bench recurrent, captures")
@usual_cases("gemma4-e2b-mtp-torch", "gemma4-e2b-eagle3-torch", "glm4_moe-3-mtp-torch")
@pytest.mark.parametrize(("family", "kind", "runs"), CASES)
def test_a_cuda_graph_can_hold_a_round(family, kind, runs, made, random_prompt, monkeypatch) -> None:
    """Rounds of MTP modules once ran uncaptured on GPUs, ten times as long: one index was made on the host."""
    model, drafter = made(family, kind)
    spec = CHAIN if kind in ("ngram", "suffix", "block") or family == "glm4_moe-3" else TREE
    sizes: dict[str, Any] = {"max_model_len": 64, "max_batch_size": 2, "page_size": 4}
    prompts = [random_prompt(length, seed=length, vocab=6) for length in (12, 4)]
    with Engine.from_pretrained(model, None, config=EngineConfig(**sizes)) as plain:
        expected = [out.token_ids for out in plain.generate(prompts, PARAMS)]
    monkeypatch.setattr(specdec.engine, "capture_for", lambda *_: capture)
    sizes |= {"attention": "torch" if runs == "torch" else "triton", "fused": runs == "fused", "cuda_graphs": True}
    with Engine.from_pretrained(model, drafter, spec=spec, config=EngineConfig(**sizes)) as engine:
        outputs = engine.generate(prompts, PARAMS)
        assert captured_rounds(engine) and not engine.stats().captures.refused
    assert [out.token_ids for out in outputs] == expected


# mixtures without a fused form: transformers' own experts

MIXTURES = [
    "step3p7",
    *map(deep, ("deepseek_v3", "ernie4_5_moe", "exaone_moe", "gemma4-moe", "glm4_moe", "glm4_moe_lite", "gpt_oss")),
    *map(deep, ("hy_v3", "mellum", "mimo_v2_flash", "mixtral", "qwen2_moe", "qwen3_moe")),
]


@pytest.mark.parametrize("family", MIXTURES)
def test_no_forward_of_a_mixture_reads_the_host(family, make_target) -> None:
    """Experts in a loop over those that were chosen would."""
    decoder = private_copy(make_target(family).get_decoder())
    tokens, positions = torch.arange(5)[None] * 7, torch.arange(5)[None]
    with torch.inference_mode(), capturable():
        decoder(input_ids=tokens, position_ids=positions, use_cache=False, specdec_ctx=EchoContext())


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_taken_out_of_the_table_runs_captured_with_the_tokens_of_eager(
    family, make_target, monkeypatch, greedy_oracle
) -> None:
    model = make_target(family)
    monkeypatch.delitem(FAMILIES, family_name(model.get_decoder()))
    prompts = [[5, 9, 1], [4, 4, 8, 2, 7, 4, 4]]
    expected = [greedy_oracle(model, prompt, 8) for prompt in prompts]
    sizes = EngineConfig(max_batch_size=2, max_model_len=64, attention="torch")
    capture_on_cpu(monkeypatch, True)
    target = TargetModel(model, REFERENCE)
    assert "has no fused form" in (target.unfused or "")
    with Engine(target, NgramDrafter(), spec=SpecConfig(2, adaptive=False), config=sizes) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
        assert captured_rounds(engine)
    assert [out.token_ids for out in outputs] == expected
