"""What no tensor of an MTP module says: the doctor names it and an engine warns of it, on modules trained under it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from mtp_checkpoints import publish
from torch import nn
from typer.testing import CliRunner

from specdec import Engine, EngineConfig, SamplingParams
from specdec.cli.app import app
from specdec.doctor import diagnose
from specdec.draft_models.native_mtp.mtp_checkpoint import write_conventions
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.draft_models.native_mtp.mtp_families import MtpFamily
from specdec.draft_models.native_mtp.mtp_module import MtpModule
from specdec.loading import load_model, load_tokenizer
from specdec.models.bundled import HELD_OUT_PROBLEMS
from specdec.models.target import TargetModel
from specdec.runtime import convention_watch
from specdec.training.draft_loss import draft_loss
from specdec.training.native_mtp_training import TrainableNativeMtp, new_state
from specdec.training.packed_rows import Document, PackedRows, pack_rows
from specdec.training.training_optimizer import MixedOptimizer, schedule

SAID = "the MTP modules agree better with the target under other conventions"


class Planted(NamedTuple):
    """A target's folder, and prompts that its texts begin with; `train` writes a module of these conventions."""

    folder: Path
    prompts: list[list[int]]
    train: Callable[[MtpFamily, Path], Path]


def trained(
    target: TargetModel, family: MtpFamily, documents: list[Document], steps: int, width: int, at: Path
) -> Path:
    """A module with norm gains drawn from 0.5 to 2, so that states before and after a norm differ."""
    state, length = new_state(target, family), max(64, *(len(tokens) for tokens, _ in documents))
    drawn = torch.Generator().manual_seed(1)
    for part in ("enorm.weight", "hnorm.weight", "norm.weight"):
        state[part] = torch.rand(state[part].shape, generator=drawn) * 1.5 + 0.5
    module = MtpModule(state, target.user_decoder, family.like, 0)
    trainable = TrainableNativeMtp.of(NativeMtpDrafter([module], family, target), target)
    rows = PackedRows(*(x.long() for x in pack_rows(documents, length)))
    known = [trainable.target_states(PackedRows(*(x[i : i + 1] for x in rows))) for i in range(len(rows.ids))]
    optimizer = MixedOptimizer(nn.ModuleDict(trainable.trained), 3e-3, 3e-2)
    for step in range(steps):
        chosen = torch.randperm(len(rows.ids), generator=drawn)[:width].tolist()
        states = {name: torch.cat([known[i][name] for i in chosen]) for name in known[0]}
        draft_loss(trainable, PackedRows(*(x[chosen] for x in rows)), states, 3).backward()
        optimizer.step(schedule(step / steps))
    trainable.save(at)
    return at


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Full layers without RoPE, sliding ones of 5 keys with it, and no tensor that says which."""
    folder = publish("exaone4", tmp_path_factory.mktemp("small"), seed=3, vocab_size=16).folder
    engine = Engine.from_pretrained(folder, None, config=EngineConfig(max_batch_size=32, max_model_len=72))
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(16, (4,), generator=random).tolist() for _ in range(56)]
    sampled = [SamplingParams(max_new_tokens=60, temperature=1.0, seed=i) for i in range(48)]
    outputs = engine.generate(prompts[:48], sampled)
    documents = [(np.array(out.prompt_token_ids + out.token_ids, np.int32), 4) for out in outputs]
    target = TargetModel(engine.target.model.requires_grad_(False))
    return Planted(folder, prompts[48:], lambda family, at: trained(target, family, documents, 90, 12, at))


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """The bundled target, its final norm's gains drawn from 0.5 to 2 and taken back by a head of its own."""
    folder = tmp_path_factory.mktemp("bundled")
    model = load_model("tiny-gemma4", dtype=torch.float32, device=torch.device("cpu"))
    gains = torch.rand(model.config.hidden_size, generator=torch.Generator().manual_seed(5)) * 1.5 + 0.5
    head = nn.Linear(len(gains), model.config.vocab_size, bias=False)
    head.weight.data = model.lm_head.weight.data * (model.model.norm.weight.data / gains)
    model.lm_head, model.config.tie_word_embeddings = head, False
    model.model.norm.weight.data.copy_(gains)
    model.save_pretrained(folder)
    tokenizer: Any = load_tokenizer("tiny-gemma4")
    tokenizer.save_pretrained(folder)
    problems = [json.loads(line) for line in HELD_OUT_PROBLEMS.read_text("utf-8").splitlines()]
    documents = []
    for problem in problems:  # it solves them all, in these words
        turn = [{"role": "user", "content": problem["question"]}]
        asked = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)
        answer = tokenizer(f"{problem['answer']}<turn|>\n", add_special_tokens=False)["input_ids"]
        documents.append((np.array(asked + answer, np.int32), len(asked)))
    target = TargetModel(model.requires_grad_(False))
    asked = [tokens[:cut].tolist() for tokens, cut in documents[184:]]
    return Planted(folder, asked, lambda family, at: trained(target, family, documents[:184], 300, 2, at))


def warnings_of(planted: Planted, module: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of an engine that commits 512 tokens."""
    caplog.clear()
    config = EngineConfig(max_batch_size=8, max_model_len=256, dtype="float32")
    with Engine.from_pretrained(planted.folder, module, config=config) as engine:
        engine.generate(planted.prompts, SamplingParams(max_new_tokens=64, ignore_eos=True))
        assert engine._watch.drafter is None  # it has judged
    return [said for said in caplog.messages if said.startswith(SAID)]


def conventions_found(planted: Planted, module: Path) -> dict[str, Any] | None:
    config = EngineConfig(max_batch_size=8, max_model_len=256, dtype="float32")
    with Engine.from_pretrained(planted.folder, module, config=config) as engine:
        found = diagnose(engine, planted.prompts[:8])
        assert found.seconds < 5 * 12
        assert (found.conventions is None) == all(each.cause != "MTP conventions" for each in found.findings)
        return None if found.conventions is None else dict(found.conventions)


def test_the_kind_of_layer_that_a_block_is_like_is_measured(
    small: Planted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sliding block loaded as a full one: named, warned of once 512 tokens are committed, and right once written."""
    module = small.train(MtpFamily(form="T", like=0), tmp_path / "module")
    assert warnings_of(small, module, caplog) == [] and conventions_found(small, module) is None
    write_conventions(module, MtpFamily(form="T", like=-1))
    [said] = warnings_of(small, module, caplog)
    assert "a block of full attention -> a block of sliding attention" in said and "first 512 tokens" in said
    found = conventions_found(small, module)
    assert found is not None and found["like"] == 1 and found["form"] == "T"
    write_conventions(module, MtpFamily(**found))
    assert warnings_of(small, module, caplog) == []


def test_a_watch_that_fails_ends_no_request(
    small: Planted, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(*given: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(convention_watch, "judge", judge)
    assert warnings_of(small, small.folder, caplog) == []


def test_texts_are_cut_to_the_first_tokens() -> None:
    texts = [[1, 2, 3], [4, 5], [6, 7]]
    assert convention_watch.cut_to(4, texts) == [[1, 2, 3], [4]] and convention_watch.cut_to(9, texts) == texts


CARRIES: tuple[dict[str, Any], ...] = ({}, {"normed_carry": False}, {"form": "T"})
VARIANTS = [MtpFamily(normed_state=normed, **carry) for normed in (True, False) for carry in CARRIES]
VARIANTS.append(MtpFamily(like=-2))  # a sliding block, as its tensors say


@pytest.mark.deep
@pytest.mark.parametrize("family", VARIANTS, ids=lambda family: json.dumps(asdict(family)))
def test_the_form_that_was_trained_is_named_and_the_right_one_never_warned_of(
    family: MtpFamily, bundled: Planted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A module of some hundred steps tells R from T, but a carry or a state only now and then."""
    module = bundled.train(family, tmp_path / "module")
    assert warnings_of(bundled, module, caplog) == [] and conventions_found(bundled, module) is None
    others = {} if family.form == "T" else {"form": "T"}
    write_conventions(module, MtpFamily(normed_state=family.normed_state, like=family.like, **others))
    assert len(warnings_of(bundled, module, caplog)) == 1
    found = conventions_found(bundled, module)
    assert found is not None and (found["form"], found["normed_state"]) == (family.form, family.normed_state), found


@pytest.mark.deep
def test_the_command_writes_what_it_found_beside_the_module(bundled: Planted, tmp_path: Path) -> None:
    module = bundled.train(MtpFamily(form="T"), tmp_path / "module")
    write_conventions(module, MtpFamily())
    pair = ["--target", str(bundled.folder), "--drafter", str(module), "--dtype", "float32", "--write-conventions"]
    result = CliRunner().invoke(app, ["doctor", *pair])
    assert result.exit_code == 1 and "MTP conventions: the carry" in result.stdout
    assert json.loads((module / "mtp_conventions.json").read_text())["form"] == "T"
    assert CliRunner().invoke(app, ["doctor", *pair]).exit_code == 0
    shutil.rmtree(module)
