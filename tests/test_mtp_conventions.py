"""What no tensor of an MTP module says: the doctor names it and an engine warns of it, on modules trained under it."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
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
from specdec.draft_models.native_mtp.conventions import all_conventions, by_token, clear_winner, difference
from specdec.draft_models.native_mtp.mtp_checkpoint import native_mtp_drafter, write_conventions
from specdec.draft_models.native_mtp.mtp_drafter import MtpFamily, NativeMtpDrafter
from specdec.draft_models.native_mtp.mtp_module import MtpModule, nearest_mlp, read_parts
from specdec.loading.model_loading import Checkpoint, load_tokenizer
from specdec.models.published import HELD_OUT_PROBLEMS
from specdec.models.target import TargetModel
from specdec.runtime.drafts import convention_watch
from specdec.training.draft_loss import draft_loss, run_target
from specdec.training.native_mtp_training import TrainableNativeMtp, new_state
from specdec.training.packed_rows import Document, PackedRows, pack_rows
from specdec.training.training_loop import MixedOptimizer, schedule

from marks import examples, is_deep

pytestmark = pytest.mark.cpu
SAID = "the MTP modules agree better with the target under other conventions"


class Planted(NamedTuple):
    """A target's folder, and prompts that its texts begin with; `train` writes a module of these conventions."""

    folder: Path
    prompts: list[list[int]]
    train: Callable[[MtpFamily, Path], Path]


def trainer(
    target: TargetModel, documents: list[Document], steps: int, width: int, draft_steps: int
) -> Callable[[MtpFamily, Path], Path]:
    """Trains modules with norm gains drawn from 0.5 to 2, so that states before and after a norm differ."""
    rows = PackedRows(*(x.long() for x in pack_rows(documents, max(64, *(len(tokens) for tokens, _ in documents)))))
    normed, before_norm, _ = run_target(target, rows, (len(target.layout.layers),))

    def train(family: MtpFamily, at: Path) -> Path:
        state, drawn = new_state(target, family), torch.Generator().manual_seed(1)
        for part in ("enorm.weight", "hnorm.weight", "norm.weight"):
            state[part] = torch.rand(state[part].shape, generator=drawn) * 1.5 + 0.5
        parts = read_parts(state, target.user_decoder, family.like)
        module = MtpModule(parts, target.user_decoder, family.like, 0)
        trainable = TrainableNativeMtp(NativeMtpDrafter([module], family, target), target)
        optimizer = MixedOptimizer(nn.ModuleDict(trainable.trained), 3e-3, 3e-2)
        for step in range(steps):
            chosen = torch.randperm(len(rows.ids), generator=drawn)[:width].tolist()
            states = (normed if family.normed_state else before_norm)[chosen]
            known = {"hidden": normed[chosen], "states": states}
            draft_loss(trainable, PackedRows(*(x[chosen] for x in rows)), known, draft_steps).backward()
            optimizer.step(schedule(step / steps))
        trainable.save(at)
        return at

    return train


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
    return Planted(folder, prompts[48:], trainer(target, documents, examples(36, 90), examples(8, 12), 3))


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """The bundled target, its final norm's gains drawn from 0.5 to 2 and taken back by a head of its own."""
    folder = tmp_path_factory.mktemp("bundled")
    model = Checkpoint.from_name("tiny-gemma4").load(torch.float32, torch.device("cpu"))
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
    return Planted(folder, asked, trainer(target, documents[:184], 400, 2, 5))


def warnings_of(planted: Planted, module: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of an engine that commits 512 tokens."""
    caplog.clear()
    config = EngineConfig(max_batch_size=8, max_model_len=256, dtype="float32")
    with Engine.from_pretrained(planted.folder, module, config=config) as engine:
        engine.generate(planted.prompts[:8], SamplingParams(max_new_tokens=64, ignore_eos=True))
        assert engine._conventions.is_done  # it has judged
    return [said for said in caplog.messages if said.startswith(SAID)]


def conventions_found(planted: Planted, module: Path) -> dict[str, Any] | None:
    config = EngineConfig(max_batch_size=8, max_model_len=256, dtype="float32")
    with Engine.from_pretrained(planted.folder, module, config=config) as engine:
        found = diagnose(engine, planted.prompts[-examples(4, 8) :])
        assert (found.conventions is None) == all(each.cause != "MTP conventions" for each in found.findings)
        return None if found.conventions is None else dict(found.conventions)


def test_the_kind_of_layer_that_a_block_is_like_is_measured(
    small: Planted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sliding block loaded as a full one: named, warned of once 512 tokens are committed, and right once written."""
    module = small.train(MtpFamily(form="T", like=0), tmp_path / "module")
    if is_deep():  # as below, once the right ones are written
        assert warnings_of(small, module, caplog) == [] and conventions_found(small, module) is None
    write_conventions(module, MtpFamily(form="T", like=-1))
    [said] = warnings_of(small, module, caplog)
    assert "a block of full attention -> a block of sliding attention" in said
    assert "over 496 tokens" in said  # of 512, two a text lack drafts
    found = conventions_found(small, module)
    assert found is not None and found["like"] == 1 and found["form"] == "T"
    write_conventions(module, MtpFamily(**found))
    assert warnings_of(small, module, caplog) == []


def test_a_watch_that_fails_ends_no_request(
    small: Planted, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(*given: Any) -> Iterator[None]:
        yield
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(convention_watch, "judge", judge)
    assert warnings_of(small, small.folder, caplog) == []


def test_every_eighth_step_does_one_part_of_the_judgement(small: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests wait; the rest of it is done once none does. A part in each step took as long as the round next to
    it, for 144 steps of 16 requests."""
    done: list[int] = []

    def judge(target: TargetModel, drafter: Any, texts: list[tuple[list[int], int]]) -> Iterator[None]:
        assert sum(len(tokens) - first for tokens, first in texts) >= 512 and all(first == 4 for _, first in texts)
        for part in range(100):
            done.append(part)
            yield

    monkeypatch.setattr(convention_watch, "judge", judge)
    config = EngineConfig(max_batch_size=8, max_model_len=72)
    with Engine.from_pretrained(small.folder, "mtp", config=config) as engine:
        long, short = (SamplingParams(max_new_tokens=new, ignore_eos=True) for new in (66, 48))
        engine.submit_many([*small.prompts, small.prompts[0]], [long] * 8 + [short])
        counts = [0]
        while engine.step():
            counts.append(len(done))
        assert {b - a for a, b in itertools.pairwise(counts)} == {0, 1} and len(done) == 100
        steps = [number for number, (a, b) in enumerate(itertools.pairwise(counts)) if b > a]
        assert {b - a for a, b in itertools.pairwise(steps)} == {8}
        assert engine._conventions.is_done


def test_a_watch_reads_the_end_of_a_prompt_and_no_short_answers() -> None:
    def answered(prompt: int, answer: int) -> Any:
        tokens = list(range(prompt + answer))
        return SimpleNamespace(prompt=tokens[:prompt], tokens=tokens, num_output=answer)

    watch = convention_watch.ConventionWatch(SimpleNamespace(), None)  # type: ignore[arg-type]
    watch.after_step([answered(300, 9), answered(4, 8), answered(4, 7)], running=True)
    assert watch._texts == [
        (list(range(300 - 256, 309)), 256),
        (list(range(12)), 4),
    ]


@pytest.mark.parametrize(
    ("name", "others"), [("exaone4", [0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]), ("ernie", [0, 1, 1, 2])]
)
def test_conventions_are_tried_from_the_nearest_on_and_each_once(name: str, others: list[int], tmp_path: Path) -> None:
    """State, carry and kind of block; without a norm of the modules' own, a carry is the same before and after it."""
    published = publish(name, tmp_path)
    drafter = native_mtp_drafter(published.folder, TargetModel(published.model))
    assert [difference(drafter, each).count("->") for each in all_conventions(drafter)] == others


def test_an_mlp_is_like_the_nearest_of_its_kind() -> None:
    experts, dense = (nn.ModuleDict({name: nn.Linear(1, 1)}) for name in ("experts", "up"))
    mixed, plain = SimpleNamespace(layers=[experts, dense] * 2), SimpleNamespace(layers=[dense] * 3)
    assert [nearest_mlp(mixed, like, True) for like in (-1, 0, 1)] == [2, 0, 0]
    assert [nearest_mlp(mixed, like, False) for like in (-1, 0, 2)] == [3, 1, 1]
    assert nearest_mlp(plain, -1, True) == 2, "none is"


def test_observations_are_by_token() -> None:
    """Row p, column d: the draft made d + 1 tokens before token p + d + 1."""
    p = torch.tensor([[float(10 * (place + depth) + depth) for depth in range(3)] for place in range(6)])
    assert by_token(p).tolist() == [10.0 * token + 1 for token in range(2, 6)]
    assert len(by_token(p[:2])) == 0


def test_conventions_that_make_no_difference_are_named_once_in_a_hundred_times() -> None:
    """At any scale, and ones that are better by a fifth of a standard deviation nearly always, on 512 tokens."""
    drawn = torch.Generator().manual_seed(0)
    own, others = torch.zeros(512), torch.randn((2000, 5, 512), generator=drawn) * 0.07
    named = [clear_winner(own, each) is not None for each in others]
    assert 0.005 < sum(named) / len(named) < 0.015
    better = others[:500, 0] + 0.07 / 5
    assert sum(clear_winner(own, [own, own, each, own, own]) == 2 for each in better) > 470
    assert clear_winner(own[:31], [better[0][:31] + 1]) is None  # too few
    assert clear_winner(own, [own + 1e-6]) is None  # rounding


CARRIES: tuple[dict[str, Any], ...] = ({}, {"normed_carry": False}, {"form": "T"})
VARIANTS = [MtpFamily(normed_state=normed, **carry) for normed in (True, False) for carry in CARRIES]
VARIANTS.append(MtpFamily(like=-2))  # a sliding block, as its tensors say


@pytest.mark.deep
@pytest.mark.parametrize("family", VARIANTS, ids=lambda family: json.dumps(asdict(family)))
def test_the_planted_conventions_are_named_and_never_warned_of(
    family: MtpFamily, bundled: Planted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loaded with the other state, or with another carry."""
    module = bundled.train(family, tmp_path / "module")
    assert warnings_of(bundled, module, caplog) == [] and conventions_found(bundled, module) is None
    for changes in ({"normed_state": not family.normed_state}, *CARRIES):
        wrong = replace(family, **({"form": "C", "normed_carry": True} | changes if changes in CARRIES else changes))
        if wrong != family:
            write_conventions(module, wrong)
            assert len(warnings_of(bundled, module, caplog)) == 1, wrong
            assert conventions_found(bundled, module) == asdict(family), wrong


@pytest.mark.deep
def test_the_command_writes_its_findings_next_to_the_module(bundled: Planted, tmp_path: Path) -> None:
    module = bundled.train(MtpFamily(form="T"), tmp_path / "module")
    write_conventions(module, MtpFamily())
    pair = ["--target", str(bundled.folder), "--drafter", str(module), "--dtype", "float32", "--write-conventions"]
    result = CliRunner().invoke(app, ["doctor", *pair])
    assert result.exit_code == 1 and "MTP conventions: the carry" in result.stdout
    assert json.loads((module / "mtp_conventions.json").read_text())["form"] == "T"
    assert CliRunner().invoke(app, ["doctor", *pair]).exit_code == 0
    shutil.rmtree(module)
