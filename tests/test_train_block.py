"""Training of block drafters: blocks of packed rows are what the drafter runs, and a run leaves one that loads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_heads import random_head
from typer.testing import CliRunner

from specdec import Engine, SpecConfig
from specdec.cli.app import app
from specdec.drafter_loading import load_any_drafter
from specdec.models.target import TargetModel
from specdec.training.block_training import TrainableBlock
from specdec.training.draft_loss import draft_loss
from specdec.training.packed_rows import PackedRows, pack_rows

from marks import is_deep

AUX_LAYERS = (2, 15, 28) if is_deep() else (2, 3, 4)  # of the bundled target's 30, and of the shallow one's 6


def test_rows_of_answers_begin_blocks(make_target: Callable[..., Any]) -> None:
    target = TargetModel(make_target("llama"))
    trainable = TrainableBlock(random_head(target, "dflash"), target)
    batch = PackedRows(*(x.long() for x in pack_rows([(np.arange(1, 12, dtype=np.int32), 4)], 14)))
    # tokens 4 .. 10 are the answer, so that blocks begin at the tokens before each of them
    assert trainable.learnt_rows(batch)[0].nonzero()[:, 0].tolist() == [3, 4, 5, 6, 7, 8, 9]
    loss = draft_loss(trainable, batch, trainable.target_states(batch), 5)
    loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in trainable.module.parameters())


def train(folder: Path, prompts: list[str], more: str) -> Any:
    """Runs `specdec train` for a block drafter of the bundled target."""
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts), "utf-8")
    run = ["train", "--kind", "block", "--target", "tiny-gemma4", "--prompts", str(file), "--device", "cpu"]
    return CliRunner().invoke(app, [*run, "--out", str(folder / "head"), *more.split()])


@pytest.mark.slow
@pytest.mark.usefixtures("shallow_pair")
def test_a_run_leaves_a_drafter_that_loads_and_drafts(tmp_path: Path) -> None:
    lines = [f"Emma has {n} marbles. She buys {n + 3} more. How many has she now?" for n in range(12)]
    sizes = "--answers 4 --minutes 5 --steps 3 --length 96 --max-new-tokens 16 --rows 2 --report-count 1"
    shape = "--draft-steps 3 --layers 1 --heads 2 --kv-heads 1 --head-dim 32 --causal"
    done = train(tmp_path, lines, f"{sizes} {shape}")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "head" / "training" / "report.json").read_text("utf-8"))
    assert list(report["held_out"]) == ["chain of 3", "tree of depth 3, topk 4, 32 nodes"]
    with Engine.from_pretrained("tiny-gemma4", drafter=str(tmp_path / "head"), spec=SpecConfig(3)) as engine:
        drafter: Any = engine.drafter
        assert drafter.spec.causal and drafter.spec.block_size == 4 and drafter.aux_layers == AUX_LAYERS
    assert load_any_drafter("none", drafter) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--hidden 64", "--hidden 64: a block drafter has the target's width, 160"),
        ("--heads 3", "--heads 3 does not divide"),
        ("--mask-token 9999", "MASK is token 9999; give --mask-token"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_before_the_target_answers(
    options: str, message: str, tmp_path: Path
) -> None:
    done = train(tmp_path, ["a", "b"], options)
    assert done.exit_code != 0
    assert message in " ".join(f"{done.output} {done.exception}".split())
