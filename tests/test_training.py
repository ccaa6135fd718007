"""MTP modules in training learn, are saved and draft; batches have the target's states of their rows, in few
forwards."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mtp_checkpoints import Published, publish

from specdec import Engine, EngineConfig
from specdec.draft_models.native_mtp.mtp_families import MtpFamily
from specdec.errors import CheckpointError, ConfigError
from specdec.models.target import TargetModel
from specdec.training.draft_loss import draft_loss
from specdec.training.native_mtp_training import neutral, trainable_native_mtp
from specdec.training.packed_rows import PackedRows, pack_rows
from specdec.training.train_settings import TrainSettings
from specdec.training.training_loop import TrainingBatches

from marks import deep, deep_cases


@pytest.fixture(scope="module")
def exaone(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish("exaone4", tmp_path_factory.mktemp("exaone4"))


def packed(documents: list[list[int]], length: int) -> PackedRows:
    rows = pack_rows([(np.array(tokens, np.int32), 1) for tokens in documents], length)
    return PackedRows(*(x.long() for x in rows))


@deep_cases("gemma2")
@pytest.mark.parametrize("family", ["gemma4-e2b", "gpt_oss", "gemma2", deep("llama"), deep("qwen3"), deep("gemma3")])
def test_a_new_module_of_any_family_learns(family: str, make_target: Any) -> None:
    """Layers with shared K/V, inputs of their own, softcaps, sinks and experts; nothing of the target is changed."""
    target = TargetModel(make_target(family).requires_grad_(False))
    trainable = trainable_native_mtp(target, None, None)
    before = [weight.clone() for weight in target.model.parameters()]
    batch = packed([torch.randint(96, (18,)).tolist() for _ in range(3)], 60)
    known = trainable.target_states(batch)
    weights = [weight for part in trainable.trained.values() for weight in part.parameters()]
    optimizer, losses = torch.optim.Adam(weights, lr=1e-2), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = draft_loss(trainable, batch, known, 3)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and losses == sorted(losses, reverse=True)
    assert all(torch.equal(*pair) for pair in zip(before, target.model.parameters(), strict=True))


def test_a_published_module_is_finetuned_under_its_conventions(exaone: Published, tmp_path: Path) -> None:
    """From the checkpoint's own weights; the written folder is a drafter, and several modules are refused."""
    target = TargetModel(exaone.model.requires_grad_(False))
    family = MtpFamily(normed_carry=False, like=0)
    (tmp_path / "asked.json").write_text(json.dumps(asdict(family)))
    trainable = trainable_native_mtp(target, exaone.folder, tmp_path / "asked.json")
    assert trainable.drafter.family == family
    assert torch.equal(trainable.module.proj.weight, exaone.modules[0][0]["proj"])
    trainable.module.proj.weight.data.mul_(0.5)
    trainable.save(tmp_path / "tuned")
    engine = Engine.from_pretrained(exaone.folder, tmp_path / "tuned", config=EngineConfig(max_model_len=64))
    assert engine.drafter.family == family and engine.drafter.name == "mtp"
    found, expected = engine.drafter.modules[0].state_dict(), trainable.module.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    several = publish("glm4_moe-3", tmp_path / "several")
    with pytest.raises(ConfigError, match=r"several holds 3 MTP modules; one module, applied again, is trained"):
        trainable_native_mtp(TargetModel(several.model), several.folder, None)
    (tmp_path / "asked.json").write_text('{"carry": 1}')
    with pytest.raises(CheckpointError, match=r"asked\.json cannot be read: .*'carry'"):
        trainable_native_mtp(target, None, tmp_path / "asked.json")


def test_a_neutral_norm_scales_nothing(make_target: Any) -> None:
    """Gains are stored as they are, or less one."""
    for family, expected in (("llama", 1.0), ("gemma2", 0.0)):
        norm = make_target(family).model.norm
        assert neutral(norm).unique().tolist() == [expected]


LENGTH, ROWS = 12, 4


class Reader:
    """Stands for a drafter: its states [B, T, 2] say which tokens they are of. forwards: rows of each."""

    def __init__(self) -> None:
        self.forwards: list[int] = []
        self.target = self
        self.device = torch.device("cpu")

    def target_states(self, batch: PackedRows) -> dict[str, torch.Tensor]:
        self.forwards.append(len(batch.ids))
        return {"hidden": torch.stack([batch.ids, batch.pos], dim=-1).float()}


@pytest.mark.parametrize("kept", [3, 1, 0])
def test_states_are_those_of_the_rows(tmp_path: Path, kept: int):
    """Twelve rows, three epochs of three batches, of which so many are kept: at most one forward for each batch."""
    documents = [(np.arange(1 + i, 13 + i, dtype=np.int32), 4) for i in range(12)]
    a_batch = ROWS * LENGTH * 2 * 2  # bytes, in bfloat16
    settings = TrainSettings(
        target="", prompts=[], out=tmp_path, length=LENGTH, rows=ROWS, cache_gb=kept * 1.01e-9 * a_batch
    )
    reader: Any = Reader()
    batches = TrainingBatches(reader, documents, settings)
    upcoming = batches.from_step(0)
    seen: set[int] = set()
    for number in range(9):
        batch, known = next(upcoming)
        torch.testing.assert_close(known["hidden"], torch.stack([batch.ids, batch.pos], dim=-1).bfloat16())
        if number < 3:
            seen |= set(batch.ids[:, 0].tolist())
    assert seen == set(range(1, 13))
    assert batches.kept_bytes <= batches.max_bytes and batches.kept_bytes == a_batch * len(batches.kept) / ROWS
    assert sum(reader.forwards) == 12 * 3 - 2 * len(batches.kept), "a row is computed once, or each time"
    assert len(batches.kept) == kept * ROWS and len(reader.forwards) <= 9
