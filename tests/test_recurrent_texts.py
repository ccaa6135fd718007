"""Whole texts of targets with recurrent layers outside an engine: the doctor reads them; training refuses."""

import pytest
import torch
from block_heads import random_block
from mtp_checkpoints import publish

from specdec import Engine, EngineConfig, SpecConfig
from specdec.doctor import diagnose
from specdec.errors import UnsupportedModelError
from specdec.models.target import TargetModel
from specdec.runtime.drafts.dense_drafts import record
from specdec.training.draft_loss import run_target
from specdec.training.packed_rows import PackedRows

from marks import deep, examples
from tiny_families import random_eagle3

FAMILIES = ["qwen3_5", "granitemoehybrid", "lfm2", *map(deep, ("qwen3_next", "qwen3_5_moe", "nemotron_h"))]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_recorded_text_is_the_models_own_forward(family, make_target, random_prompt, hf_forward) -> None:
    """53 tokens are three folds, and a block that is not whole."""
    model, text = make_target(family), random_prompt(53)
    target = TargetModel(model)
    found = target.logits(record(target, text[:20], text[20:]).hidden[None])[0]
    torch.testing.assert_close(
        found.log_softmax(-1), hf_forward(model, text).logits[0].log_softmax(-1), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("kind", ["eagle3", "block", "mtp"])
def test_the_doctors_drafts_are_the_workers(kind, make_target, random_prompt, tmp_path) -> None:
    prompts, spec = [random_prompt(length, vocab=6) for length in (2, 15, 16, 33)], SpecConfig(3)
    config = EngineConfig(max_batch_size=4, max_model_len=64)
    if kind == "mtp":
        pair = Engine.from_pretrained(publish("qwen3_5", tmp_path).folder, "mtp", spec=spec, config=config)
    else:
        model = make_target("qwen3_5")
        drafter = random_eagle3(model) if kind == "eagle3" else random_block(model)
        pair = Engine(TargetModel(model), drafter, spec=spec, config=config)
    with pair:
        found = diagnose(pair, prompts=prompts, max_new_tokens=examples(12, 20), causes=())
    assert found.reference.holds and found.reference.difference < 1e-4


def test_training_refuses_a_target_with_recurrent_layers(make_target) -> None:
    """It would run a state on from one document to the next."""
    rows = PackedRows(*(torch.zeros((1, 4), dtype=torch.int64) for _ in PackedRows._fields))
    with pytest.raises(UnsupportedModelError, match="has recurrent layers, and training reads texts without"):
        run_target(TargetModel(make_target("qwen3_next")), rows)
