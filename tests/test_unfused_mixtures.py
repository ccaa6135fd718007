"""Mixtures without a fused form: transformers' own experts, in rounds that a graph can hold, tokens those of eager."""

from typing import Any

import pytest
import torch
from capturable import capturable

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.heads.fused_layers import EchoContext
from specdec.draft_models.lookup import NgramDrafter
from specdec.gpu.operations import REFERENCE
from specdec.layers.description.families import FAMILIES
from specdec.models.target import TargetModel
from specdec.modules.private_copy import private_copy
from specdec.modules.transformers_names import family_name

from inside import capture_on_tape, captured_rounds
from marks import deep
from tiny_models import build_target, spread

MIXTURES = [
    "step3p7",
    *map(deep, ("deepseek_v3", "ernie4_5_moe", "exaone_moe", "gemma4-moe", "glm4_moe", "glm4_moe_lite", "gpt_oss")),
    *map(deep, ("hy_v3", "mellum", "mimo_v2_flash", "mixtral", "qwen2_moe", "qwen3_moe")),
]


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    return spread(build_target(family)).eval()


@pytest.mark.parametrize("family", MIXTURES)
def test_no_forward_of_a_mixture_reads_the_host(family: str) -> None:
    """Experts in a loop over those that were chosen would."""
    decoder = private_copy(model_of(family).get_decoder())
    tokens, positions = torch.arange(5)[None] * 7, torch.arange(5)[None]
    with torch.inference_mode(), capturable():
        decoder(input_ids=tokens, position_ids=positions, use_cache=False, specdec_ctx=EchoContext())


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_taken_out_of_the_table_runs_captured_with_the_tokens_of_eager(
    family: str, monkeypatch: pytest.MonkeyPatch, greedy_oracle: Any
) -> None:
    model = model_of(family)
    monkeypatch.delitem(FAMILIES, family_name(model.get_decoder()))
    prompts = [[5, 9, 1], [4, 4, 8, 2, 7, 4, 4]]
    expected = [greedy_oracle(model, prompt, 8) for prompt in prompts]
    sizes = EngineConfig(max_batch_size=2, max_model_len=64, attention="torch")
    capture_on_tape(monkeypatch, True)
    target = TargetModel(model, REFERENCE)
    assert "has no fused form" in (target.unfused or "")
    with Engine(target, NgramDrafter(), spec=SpecConfig(2, adaptive=False), config=sizes) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
        assert captured_rounds(engine)
    assert [out.token_ids for out in outputs] == expected
