"""A CUDA graph can hold every round: of each drafter, over attention and over recurrent layers, fused or not.

Engines record their rounds on a tape, which refuses work of the host; kernels run in Triton's interpreter. Tokens are
those of plain decoding in plain torch: a round that had frozen a length would have others.
"""

from collections.abc import Callable
from typing import Any

import pytest
from capturable import capture
from mtp_checkpoints import publish

import specdec.engine
from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.gpu.triton_shim import INTERPRETED

from inside import captured_rounds
from marks import examples, usual_cases

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("kernels_run"),
    pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here: see python -m bench recurrent, captures"),
]
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
