"""MTP modules in training: the parallel rows are what an engine drafts from, and finetuned modules load and draft."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mtp_checkpoints import Published, publish

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.native_mtp.mtp_chains import chained_rows
from specdec.draft_models.native_mtp.mtp_families import MtpFamily
from specdec.errors import CheckpointError, ConfigError
from specdec.models.target import TargetModel
from specdec.training.draft_loss import draft_loss, run_target
from specdec.training.native_mtp_training import neutral, trainable_native_mtp
from specdec.training.packed_rows import PackedRows, pack_rows

from marks import deep, deep_cases

CARRIES: dict[str, dict[str, Any]] = {
    "normed": {},
    "raw": {"normed_carry": False},
    "target's": {"form": "T"},
}
CONVENTIONS = [
    MtpFamily(normed_state=normed, like=like, **CARRIES[carry])
    for normed, carry, like in itertools.product((True, False), CARRIES, (0, -1))
]
QUICK = (CONVENTIONS[0], CONVENTIONS[3], CONVENTIONS[10])


@pytest.fixture(scope="module")
def exaone(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish("exaone4", tmp_path_factory.mktemp("exaone4"))


def packed(documents: list[list[int]], length: int) -> PackedRows:
    rows = pack_rows([(np.array(tokens, np.int32), 1) for tokens in documents], length)
    return PackedRows(*(x.long() for x in rows))


def text(seed: int, length: int) -> list[int]:
    return torch.randint(6, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def argmax_drafts(drafter: Any, target: TargetModel, committed: list[int], num_steps: int) -> list[int]:
    """Drafts after a text with its bonus token, drawn from parallel rows one depth after another."""
    tokens = list(committed)
    for step in range(num_steps):
        batch = packed([[*tokens, 0]], len(tokens) + 1)
        hidden, states, _ = run_target(target, batch, aux_layers=drafter.aux_layers)
        places = torch.tensor([len(committed) - 2])
        with torch.no_grad():
            rows = chained_rows(drafter, batch.ids, states[0] if states else hidden, batch.pos, step + 1, places)
            out = list(rows)[-1]
            tokens.append(int(drafter.logits(min(step, len(drafter.modules) - 1), out)[0, 0].argmax()))
    return tokens[len(committed) :]


@pytest.mark.parametrize("family", [c if c in QUICK else deep(c) for c in CONVENTIONS], ids=lambda c: str(asdict(c)))
def test_the_parallel_rows_are_what_an_engine_drafts_from(family: MtpFamily, exaone: Published, tmp_path: Path) -> None:
    """Under every convention of one module; the window is 5 tokens."""
    modules = tmp_path / "modules"
    modules.mkdir()
    for file in exaone.folder.iterdir():
        (modules / file.name).symlink_to(file)
    (modules / "mtp_conventions.json").write_text(json.dumps(asdict(family)))
    spec = SpecConfig(3, adaptive=False)
    engine = Engine.from_pretrained(exaone.folder, modules, spec=spec, config=EngineConfig(max_model_len=64))
    assert (engine.drafter.family, engine.drafter.form) == (family, "R")
    seen: list[tuple[list[int], list[int]]] = []
    own = engine.round.worker.propose

    def propose(batch: Any) -> Any:
        tree = own(batch)
        length = int(batch.history_len[0])
        history = getattr(batch.history, "tensor", batch.history)
        seen.append((history[0, :length].tolist(), tree.tokens[0, 1:].tolist()))
        return tree

    engine.round.worker.propose = propose
    engine.generate([text(1, 9)], SamplingParams(max_new_tokens=9))
    target = TargetModel(engine.target.model)
    for committed, drafts in seen[1:4]:
        assert argmax_drafts(engine.drafter, target, committed, len(drafts)) == drafts


@pytest.mark.parametrize("name", ["exaone4", "step-form", deep("mimo_v2-form")])
def test_documents_of_a_packed_row_do_not_see_each_other(name: str, tmp_path: Path) -> None:
    made = publish(name, tmp_path)
    engine = Engine.from_pretrained(made.folder, "mtp", config=EngineConfig(max_model_len=64))
    drafter, documents = engine.drafter, [text(2, 11), text(3, 8)]
    target = TargetModel(engine.target.model)
    found = []
    for batch in (packed(documents, 60), packed(documents[1:], 8)):
        hidden, states, _ = run_target(target, batch, aux_layers=drafter.aux_layers)
        with torch.no_grad():
            rows = chained_rows(drafter, batch.ids, states[0] if states else hidden, batch.pos, 3)
            found.append([out.z for out in rows])
    for step, (both, alone) in enumerate(zip(*found, strict=True)):
        last = 8 - 1 - step  # rows whose tokens lie in the document
        torch.testing.assert_close(both[0, 11 : 11 + last], alone[0, :last], atol=1e-4, rtol=1e-4)


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
