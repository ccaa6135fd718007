"""Dense forwards of every kind of drafter, in training and in the doctor, are what its worker drafts in an engine."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_heads import random_head
from mtp_checkpoints import publish

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.native_mtp.mtp_drafter import MtpFamily
from specdec.models.target import TargetModel
from specdec.runtime.drafts.dense_drafts import DENSE_FORMS, record
from specdec.training.assistant_training import TrainableAssistant, new_assistant
from specdec.training.draft_loss import TrainableDrafter
from specdec.training.head_training import TrainableBlock, TrainableEagle3
from specdec.training.native_mtp_training import trainable_native_mtp
from specdec.training.packed_rows import PackedRows, pack_rows

from marks import deep, examples
from tiny_families import random_eagle3
from watched_drafts import watch_proposals

CARRIES: tuple[dict[str, Any], ...] = ({}, {"normed_carry": False}, {"form": "T"})
Fitted = tuple[TargetModel, Any, TrainableDrafter | None]
"""A target, a drafter fitted to it, and the same drafter in training, if it can be trained."""


@pytest.fixture
def fit(make_target: Callable[..., Any], tmp_path: Path) -> Callable[..., Fitted]:
    def make(kind: str, of: Any) -> Fitted:
        trainable: TrainableDrafter | None = None
        if kind == "mtp":
            made = publish(of if isinstance(of, str) else "exaone4", tmp_path)
            if isinstance(of, str):  # several modules, which are not trained
                engine = Engine.from_pretrained(made.folder, "mtp", config=EngineConfig(max_model_len=64))
                return engine.target, engine.drafter, None
            target, asked = TargetModel(made.model), tmp_path / "asked.json"
            asked.write_text(json.dumps(asdict(of)))
            trainable = trainable_native_mtp(target, made.folder, asked)
            return target, trainable.drafter, trainable
        target = TargetModel(make_target(of))
        if kind == "eagle3":
            windows = (None, 5) if of == "llama" else (None,)
            drafter: Any = random_eagle3(target.model, windows, fc_norm=True, norm_output=of != "mistral")
            drafter.head.lm_head.weight.data.mul_(0.1)  # logits of a size that 1e-4 is a bound for
            return target, drafter, TrainableEagle3(drafter.head, target)
        if kind == "assistant":
            torch.manual_seed(2)
            model = new_assistant(target, hidden=24, intermediate=40, layers=2, heads=4).float().eval()
            for name, weight in model.named_parameters():
                if "norm" not in name:
                    weight.data.normal_(0, 0.3)
            return target, Gemma4MTPDrafter(model, target), TrainableAssistant(model, target)
        head = random_head(target, kind)
        return (
            target,
            BlockDrafter(head, target),
            TrainableBlock(head, target) if kind in ("dflash", "jetspec") else None,
        )

    return make


CONVENTIONS = [
    MtpFamily(normed_state=normed, like=like, **carry)
    for normed in (True, False)
    for carry in CARRIES
    for like in (0, -1)
]
CASES = [
    *(deep("eagle3", "gemma4-e2b"), ("eagle3", "llama"), deep("eagle3", "gpt_oss"), deep("eagle3", "mistral")),
    *(
        deep("assistant", "llama"),
        ("assistant", "gemma2"),
        deep("assistant", "gemma4-e2b"),
        deep("assistant", "gemma3"),
    ),
    *(("dflash", "llama"), deep("dflash", "mistral"), ("jetspec", "gemma4-e2b")),
    *(deep("dspark", "gemma4-e2b"), ("dspark-rnn", "gemma4-e2b")),
    *(("mtp", "step-form"), deep("mtp", "mimo_v2-form")),
    *(("mtp", each) if i in (3, 10) else deep("mtp", each) for i, each in enumerate(CONVENTIONS)),
]


@pytest.mark.cpu
@pytest.mark.parametrize(("kind", "of"), CASES, ids=lambda of: of if isinstance(of, str) else str(asdict(of)))
@torch.no_grad()
def test_the_dense_forwards_are_what_an_engine_drafts_from(
    kind: str, of: Any, fit: Callable[..., Fitted], random_prompt: Callable[..., list[int]]
) -> None:
    """The logits of every draft of several rounds: in training from packed rows of all these texts, whose documents do
    not see each other; in the doctor from each text alone. Texts are longer than the windows."""
    target, drafter, trainable = fit(kind, of)
    steps = drafter.max_steps or 4
    spec, config = SpecConfig(steps, adaptive=False), EngineConfig(max_model_len=64, max_batch_size=1)
    with Engine(target, drafter, spec=spec, config=config) as engine:
        seen = watch_proposals(engine)
        for length in (16, 1, 9)[: examples(2, 3)]:
            prompt = random_prompt(length, vocab=target.vocab_size)
            engine.generate([prompt], SamplingParams(max_new_tokens=14, ignore_eos=True))
    texts = [each for each in seen if len(each.logits) == steps][::2]
    assert len(texts) >= 4
    for each in texts:
        text = record(target, each.text, each.tokens[1:])
        found = DENSE_FORMS[type(drafter)](drafter, text, torch.tensor([len(each.text) - 1]), steps)
        torch.testing.assert_close(torch.cat([*found]), each.logits, atol=1e-4, rtol=1e-4)
    if trainable is None:
        return
    documents = [(np.array(each.text + each.tokens[1:], np.int32), 1) for each in texts]
    batch = PackedRows(*(x.long() for x in pack_rows(documents, 70)))
    known = trainable.target_states(batch)
    starts = [place.tolist() for place in (batch.pos == 0).nonzero()]
    for each in texts:
        whole = each.text + each.tokens[1:]
        [(row, start)] = [(r, c) for r, c in starts if batch.ids[r, c : c + len(whole)].tolist() == whole]
        place = start + len(each.text) - trainable.ahead
        if isinstance(trainable, TrainableBlock):
            trainable.places = torch.full((len(batch.ids), 1), place)
        rows = torch.stack([states[row, place] for states in trainable.drafts(batch, known, steps)])
        want = each.logits if trainable.target_ids is None else each.logits[:, trainable.target_ids]
        torch.testing.assert_close(trainable.score(rows), want, atol=1e-4, rtol=1e-4)
