"""Training without its command: prompts of a file, what rows predict, the loss, MTP modules that learn and are saved,
and the states of batches."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from block_heads import random_head
from mtp_checkpoints import Published, publish

from specdec import Engine, EngineConfig
from specdec.draft_models.native_mtp.mtp_drafter import MtpFamily
from specdec.errors import CheckpointError, ConfigError, UnsupportedModelError
from specdec.loading.drafter_loading import load_any_drafter
from specdec.models.target import TargetModel
from specdec.training import assistant_training, training_loop
from specdec.training.draft_loss import draft_loss
from specdec.training.head_training import TrainableBlock, trainable_block, trainable_eagle3
from specdec.training.native_mtp_training import neutral, trainable_native_mtp
from specdec.training.packed_rows import PackedRows, pack_rows, predicted_rows
from specdec.training.target_answers import prompt_source, read_prompt_file
from specdec.training.train_settings import TrainSettings
from specdec.training.training_loop import MixedOptimizer, TrainingBatches

from marks import deep, deep_cases


def documents(lengths: list[tuple[int, int]]) -> list[tuple[np.ndarray, int]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(1, 96, n).astype(np.int32), cut) for n, cut in lengths]


def batch_of(docs: list[tuple[np.ndarray, int]], length: int) -> Any:
    return PackedRows(*(x.long() for x in pack_rows(docs, length)))


def test_answers_in_a_prompt_file_are_no_part_of_its_prompts(tmp_path: Path) -> None:
    """The target answered after the answer at the end of a chat, and an answer that is no text refused the file."""
    asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows = [
        {"prompt": "a", "messages": [asked, answered]},
        {"messages": [asked, answered, asked, answered, answered]},
        {"messages": [asked]},
        {"question": "a", "answer": 18, "category": 2},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_prompt_file(tmp_path / "p.jsonl") == [[asked], [asked, answered, asked], [asked], [asked]]
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [answered]}))
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: 'messages' are all the assistant's"):
        read_prompt_file(tmp_path / "p.jsonl")


def test_prompts_of_the_report_are_asked_once_and_never_trained_on(tmp_path: Path) -> None:
    """Those of a file given twice were asked twice; those that another file has too were trained on."""
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for file, numbers in zip(files, (range(20), range(15, 35), (18, 19)), strict=True):
        file.write_text("\n".join(json.dumps({"question": str(i)}) for i in numbers))
    source = prompt_source([files[0], tmp_path / "." / "a.jsonl", files[1]], seed=0)
    assert [int(chat[0]["content"]) for chat in source.kept] == [18, 33, 19, 34]
    trained = {int(chat[0]["content"]) for chat in itertools.islice(source.prompts, 200)}
    assert trained == {*range(33)} - {18, 19} and source.num_prompts == 18 + 16
    with pytest.raises(ConfigError, match=r"c\.jsonl: all its prompts are among those held out"):
        prompt_source([files[0], files[2]], seed=0)


@deep_cases("qwen3", "gemma3")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "gemma4-31b"])
def test_an_assistant_rotates_queries_as_the_target_rotates_keys(family, make_target) -> None:
    target = TargetModel(make_target(family))
    model = assistant_training.new_assistant(target, hidden=16, intermediate=16, layers=2, heads=4).float()
    x, pos = torch.zeros(1, 40, 32), torch.arange(40)[None]
    for kind in set(model.config.get_text_config().layer_types):
        rotary = target.decoder.rotary_emb
        nested = any(isinstance(value, dict) for value in dict(target.config.rope_parameters).values())
        theirs = rotary(x, pos, kind) if nested else rotary(x, pos)
        for ours, want in zip(model.model.rotary_emb(x, pos, kind), theirs, strict=True):
            # some models keep one half of the frequencies, which both halves of a head share
            torch.testing.assert_close(ours[..., : want.shape[-1]], want)


@pytest.mark.parametrize(("family", "reason"), [("mistral", "full_attention"), ("gpt_oss", "truncate=False")])
def test_targets_that_an_assistant_cannot_read_are_refused(family, reason, make_target) -> None:
    target = TargetModel(make_target(family))
    with pytest.raises(UnsupportedModelError, match=reason):
        assistant_training.new_assistant(target, hidden=16, intermediate=16, layers=1, heads=4)


def test_predicted_rows_are_those_of_answers() -> None:
    batch = batch_of(documents([(7, 3)]), 10)
    T, F = True, False
    # positions 0..6 hold the document, its answer is 3..6; EAGLE-3's row i predicts i + 2 at step 0, i + 3 at step 1
    assert [r[0].tolist() for r in predicted_rows(batch, 2, 2)] == [
        [F, T, T, T, T, F, F, F, F, F],
        [T, T, T, T, F, F, F, F, F, F],
    ]
    # a frozen-KV drafter's row i predicts i + 1 at step 0
    assert predicted_rows(batch, 1, 1)[0][0].tolist() == [F, F, T, T, T, T, F, F, F, F]


def test_rows_of_answers_begin_blocks(make_target) -> None:
    target = TargetModel(make_target("llama"))
    trainable = TrainableBlock(random_head(target, "dflash"), target)
    batch = batch_of(documents([(11, 4)]), 14)
    # tokens 4 .. 10 are the answer, so that blocks begin at the tokens before each of them
    assert trainable.learnt_rows(batch)[0].nonzero()[:, 0].tolist() == [3, 4, 5, 6, 7, 8, 9]
    draft_loss(trainable, batch, trainable.target_states(batch), 5).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in trainable.module.parameters())


@pytest.mark.parametrize("layers", [1, 2])
def test_a_head_learns_from_a_target_of_few_layers(layers, make_target, tmp_path) -> None:
    """It has no third state from the end: a run ended in a traceback, or with a drafter that could not be read."""
    target = TargetModel(make_target("llama", num_hidden_layers=layers))
    settings = TrainSettings(target="", prompts=[], out=tmp_path, heads=4, mask_token=0)
    batch = batch_of(documents([(11, 4)]), 14)
    for make in (trainable_eagle3, trainable_block):
        trainable = make(target, settings)
        known = {name: states.bfloat16() for name, states in trainable.target_states(batch).items()}
        draft_loss(trainable, batch, known, settings.draft_steps).backward()
        trainable.save(tmp_path / make.__name__)
        read: Any = load_any_drafter(str(tmp_path / make.__name__), target)
        assert read.spec.aux_layers == trainable.aux_layers and set(trainable.aux_layers) <= {*range(layers + 1)}


def test_a_weight_that_no_draft_step_reads_is_kept(make_target, tmp_path) -> None:
    """One step passes no state on: an assistant's projection of it has no gradient, and a run ended in a traceback."""
    target = TargetModel(make_target("llama"))
    settings = TrainSettings(target="", prompts=[], out=tmp_path, kind="assistant", layers=1)
    trainable = assistant_training.trainable_assistant(target, settings)
    batch = batch_of(documents([(11, 4)]), 14)
    known = {name: states.bfloat16() for name, states in trainable.target_states(batch).items()}
    draft_loss(trainable, batch, known, 1).backward()
    weights = dict(trainable.module.named_parameters())
    before = {name: weight.clone() for name, weight in weights.items()}
    MixedOptimizer(torch.nn.ModuleDict(trainable.trained), 1e-3, 1e-2).step(1.0)
    kept = {name for name, weight in weights.items() if weight.ndim == 2 and torch.equal(weight, before[name])}
    assert kept == {"post_projection.weight"}


class Scaled:
    """A drafter whose scores are always these, times the first number of its state, to check the loss by hand."""

    ahead = 2

    def __init__(self, target: TargetModel, scores: torch.Tensor, target_ids: torch.Tensor | None) -> None:
        self.target, self.scores, self.target_ids = target, scores, target_ids

    def learnt_rows(self, batch):
        return None

    def drafts(self, batch, known, steps):
        yield from [known["hidden"]] * steps

    def score(self, states):
        return self.scores * states[..., :1]


def test_the_loss_is_the_cross_entropy_with_the_targets_distribution(make_target) -> None:
    target = TargetModel(make_target("llama"))
    batch = batch_of(documents([(7, 3)]), 10)
    hidden = torch.randn(1, 10, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # row j: the distribution of token j + 1; the answer's are 3, 4, 5, 6
        expected = target.logits(hidden)[0, 2:6].softmax(-1)
    scores = torch.linspace(-1, 1, 96)
    # row i predicts i + 2 at step 0, i + 3 at step 1, whose weight is 0.8
    first, second = (-(expected * (scores * hidden[0, i : i + 4, :1]).log_softmax(-1)).sum(-1).mean() for i in (1, 0))
    got = draft_loss(Scaled(target, scores, None), batch, {"hidden": hidden}, 2)
    torch.testing.assert_close(got, (first + 0.8 * second) / 1.8)
    # rows whose best token is outside the draft vocabulary do not count, and the others' distribution counts alone
    best = expected.argmax(-1)
    ids = torch.tensor(sorted({*range(48), int(best[0])} - {int(best[1])}))
    rows = [i for i in range(4) if int(best[i]) in ids.tolist()]
    restricted = expected[rows][:, ids]
    restricted = restricted / restricted.sum(-1, keepdim=True)
    few = torch.linspace(-1, 1, len(ids))
    want = -(restricted * (few * hidden[0, 1:5, :1][rows]).log_softmax(-1)).sum(-1).mean()
    got = draft_loss(Scaled(target, few, ids), batch, {"hidden": hidden}, 1)
    assert 0 < len(rows) < 4
    torch.testing.assert_close(got, want)


def test_a_draft_step_without_rows_adds_nothing_to_the_loss(make_target) -> None:
    """An answer's last token after a prompt of two: the second step begins before the text."""
    target = TargetModel(make_target("llama"))
    batch = batch_of(documents([(3, 2)]), 4)
    known = {"hidden": torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))}
    drafter = Scaled(target, torch.linspace(-1, 1, 96), None)
    torch.testing.assert_close(draft_loss(drafter, batch, known, 2), draft_loss(drafter, batch, known, 1) / 1.8)


def test_the_mean_loss_of_processes_is_that_of_all_their_rows(make_target, monkeypatch) -> None:
    """A process with few tokens of answers weighed as much as one with many."""
    target = TargetModel(make_target("llama"))
    batch = batch_of(documents([(12, 3), (12, 9)]), 12)
    hidden = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    drafter = Scaled(target, torch.linspace(-1, 1, 96), None)
    whole = draft_loss(drafter, batch, {"hidden": hidden}, 2)
    counts = torch.tensor([[9.0, 9.0], [3.0, 3.0]])  # of each process and draft step

    def mean(own: torch.Tensor, how: str) -> torch.Tensor:
        assert how == "mean" and own.tolist() in counts.tolist()
        return counts.mean(0)

    monkeypatch.setattr("specdec.training.draft_loss.reduce", mean)
    shares = [
        draft_loss(drafter, PackedRows(*(x[i, None] for x in batch)), {"hidden": hidden[i, None]}, 2) for i in (0, 1)
    ]
    torch.testing.assert_close(torch.stack(shares).mean(), whole)


# MTP modules


@pytest.fixture(scope="module")
def exaone(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish("exaone4", tmp_path_factory.mktemp("exaone4"))


@pytest.mark.parametrize(("family", "part"), [("nemotron_h", "norm"), ("granitemoehybrid", "layers.0.mlp")])
def test_a_target_without_the_parts_of_a_module_is_refused(family: str, part: str, make_target: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"has no `{part}`; choose another kind of drafter"):
        trainable_native_mtp(TargetModel(make_target(family)), None, None)


@deep_cases("gemma2")
@pytest.mark.parametrize("family", ["gemma4-e2b", "gpt_oss", "gemma2", deep("llama"), deep("qwen3"), deep("gemma3")])
def test_a_new_module_of_any_family_learns(family: str, make_target: Any) -> None:
    """Layers with shared K/V, inputs of their own, softcaps, sinks and experts; nothing of the target is changed."""
    target = TargetModel(make_target(family).requires_grad_(False))
    trainable = trainable_native_mtp(target, None, None)
    before = [weight.clone() for weight in target.model.parameters()]
    batch = batch_of(documents([(18, 1)] * 3), 60)
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


@pytest.mark.cpu
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


# batches


def test_a_run_of_steps_follows_no_clock(tmp_path: Path) -> None:
    """The time of the first updates gave their rates, so that two runs with a seed ended with other weights."""
    settings = TrainSettings(target="", prompts=[], out=tmp_path, minutes=10, steps=100)
    assert [training_loop.run_fraction(settings, 1, seconds) for seconds in (1e-3, 20.0)] == [0.01, 0.01]
    assert training_loop.run_fraction(settings, 1, 600.0) == 1.0 == training_loop.run_fraction(settings, 100, 20.0)
    timed = TrainSettings(target="", prompts=[], out=tmp_path, minutes=10)
    assert training_loop.run_fraction(timed, 1, 300.0) == 0.5


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
    """Twelve rows, three epochs of three batches, some of which are kept: at most one forward for each batch."""
    documents = [(np.arange(1 + i, 13 + i, dtype=np.int32), 4) for i in range(12)]
    a_batch = ROWS * LENGTH * 2 * 2  # bytes, in bfloat16
    settings = TrainSettings(
        target="", prompts=[], out=tmp_path, length=LENGTH, rows=ROWS, cache_gb=kept * 1.01e-9 * a_batch
    )
    reader: Any = Reader()
    batches = TrainingBatches(reader, documents, settings)
    upcoming = batches.from_step(0)
    order: list[int] = []
    for _ in range(9):
        batch, known = next(upcoming)
        torch.testing.assert_close(known["hidden"], torch.stack([batch.ids, batch.pos], dim=-1).bfloat16())
        order += batch.ids[:, 0].tolist()
    epochs = order[:12], order[12:24], order[24:]
    assert [sorted(each) for each in epochs] == [[*range(1, 13)]] * 3 and len(set(map(tuple, epochs))) == 3
    assert batches.kept_bytes <= batches.max_bytes and batches.kept_bytes == a_batch * len(batches.kept) / ROWS
    assert sum(reader.forwards) == 12 * 3 - 2 * len(batches.kept), "a row is computed once, or each time"
    assert len(batches.kept) == kept * ROWS and len(reader.forwards) <= 9


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_each_of_many_processes_has_a_row_of_few(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Five processes share two rows; those of rank 2 and above had an empty batch, which raised."""
    process = SimpleNamespace(process_index=rank, num_processes=5)
    monkeypatch.setattr(training_loop, "PartialState", lambda: process)
    documents = [(np.arange(1 + i, 13 + i, dtype=np.int32), 4) for i in range(2)]
    settings = TrainSettings(target="", prompts=[], out=tmp_path, length=LENGTH, rows=ROWS)
    reader: Any = Reader()
    upcoming = TrainingBatches(reader, documents, settings).from_step(0)
    assert [len(next(upcoming)[0].ids) for _ in range(3)] == [1, 1, 1]
