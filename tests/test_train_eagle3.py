"""Training of EAGLE-3 heads: the parallel forward is the sequential head, and a run leaves a head that loads."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Engine, EngineConfig, SamplingParams
from specdec.draft_models.eagle3 import Eagle3Drafter, eagle3_drafter
from specdec.draft_models.eagle3_config import Eagle3Spec
from specdec.draft_models.eagle3_model import Eagle3Head, embed_raw
from specdec.target import TargetModel

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="needs the checkout")


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The training modules, imported as the scripts import each other."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return {name: importlib.import_module(name) for name in ("eagle3_training", "train_eagle3")}


def documents(lengths: list[tuple[int, int]]) -> list[tuple[np.ndarray, int]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(1, 96, n).astype(np.int32), cut) for n, cut in lengths]


@torch.no_grad()
def sequential(head: Eagle3Head, table: torch.Tensor, states: torch.Tensor, ids: list[int], i: int, steps: int) -> Any:
    """Logits of a chain drafted behind position i from true tokens, one row at a time over growing K/V."""
    k: list[list[torch.Tensor]] = [[] for _ in head.spec.windows]
    v: list[list[torch.Tensor]] = [[] for _ in head.spec.windows]

    def run(token: int, hidden: torch.Tensor, position: int) -> torch.Tensor:
        def attend(layer: int, q: torch.Tensor, new_k: torch.Tensor, new_v: torch.Tensor) -> torch.Tensor:
            k[layer].append(new_k)
            v[layer].append(new_v)
            first = max(0, len(k[layer]) - (head.spec.windows[layer] or 1 << 30))
            keys, values = (torch.cat(rows[layer][first:], dim=2) for rows in (k, v))
            group = q.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            weights = (q @ keys.mT * q.shape[-1] ** -0.5).softmax(-1)
            return (weights @ values).transpose(1, 2)

        return head(embed_raw(table, torch.tensor([[token]])), hidden, torch.tensor([[position]]), attend)

    features = head.features(states)
    for j in range(i + 1):
        a = run(ids[j + 1], features[None, j : j + 1], j)
    out = [head.logits(a)[0, 0]]
    for step in range(1, steps):
        a = run(ids[i + 1 + step], head.feedback(a), i + step)
        out.append(head.logits(a)[0, 0])
    return torch.stack(out)


@pytest.mark.parametrize("family", ["llama", "gemma4-e2b", "gpt_oss", "mistral"])
def test_the_parallel_forward_is_the_sequential_head(family, examples, make_target, hf_forward) -> None:
    training = examples["eagle3_training"]
    target = TargetModel(make_target(family))
    spec = Eagle3Spec(
        hidden_size=32,
        target_hidden_size=32,
        vocab_size=96,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        aux_layers=(2, 1, len(target.layout.layers)),
        windows=(None, 5) if family == "llama" else (None,),
        draft_vocab_size=40,
        fc_norm=True,
        norm_output=family != "mistral",
    )
    torch.manual_seed(1)
    head = Eagle3Head(spec).eval()
    docs = documents([(17, 6), (13, 4), (9, 3), (25, 20)])
    batch = training.Batch(*(x.long() for x in training.pack_rows(docs, 40)))
    lesson = training.teach(target, spec.aux_layers, batch)
    steps = 4
    table = target.embed.weight
    with torch.no_grad():
        logits = torch.stack(list(training.draft_logits(head, table, target.head, None, batch, lesson, steps)))
    checked = 0
    for row in range(len(batch.ids)):
        for start in (batch.pos[row] == 0).nonzero()[:, 0].tolist():
            ids = batch.ids[row, start:]
            end = next((j for j in range(1, len(ids)) if batch.pos[row, start + j] == 0), len(ids))
            if batch.kind[row, start] == 0:
                continue  # padding
            doc = ids[:end].tolist()
            alone = training.Batch(ids[None, :end], torch.arange(end)[None], torch.ones(1, end, dtype=torch.long))
            states = training.teach(target, spec.aux_layers, alone).states[0]
            torch.testing.assert_close(lesson.states[row, start : start + end], states, atol=1e-3, rtol=1e-3)
            for i in (0, 3, end - steps - 2):
                want = sequential(head, table, states, doc, i, steps)
                torch.testing.assert_close(logits[:, row, start + i], want, atol=1e-4, rtol=1e-4)
                checked += 1
    assert checked == 12


def test_rounds_and_loss_count_answers_only(examples) -> None:
    training = examples["eagle3_training"]
    batch = training.Batch(*(x.long() for x in training.pack_rows(documents([(7, 3)]), 10)))
    T, F = True, False
    # positions 0..6 hold the document, its answer is 3..6; row i predicts i + 2 at step 0, i + 3 at step 1
    assert [r[0].tolist() for r in training.rounds(batch, 2)] == [
        [F, T, T, T, T, F, F, F, F, F],
        [T, T, T, T, F, F, F, F, F, F],
    ]
    teacher = torch.full((1, 10, 4), -9.0)
    teacher[..., 2] = 9.0
    ids = torch.tensor([0, 2])
    good = training.rounds(batch, 1)[0]
    right, wrong = torch.zeros(1, 10, 2), torch.zeros(1, 10, 2)
    right[..., 1], wrong[..., 0] = 20.0, 20.0
    assert float(training.chain_loss(right, teacher, ids, good)) < 1e-3
    assert float(training.chain_loss(wrong, teacher, ids, good)) > 10
    assert float(training.chain_loss(wrong, teacher, torch.tensor([0, 1]), good)) == 0  # the best token is outside


def test_a_short_run_leaves_a_head_that_drafts(examples, tmp_path, make_target, byte_tokenizer, capsys) -> None:
    """The whole script on a random target: answers, vocabulary, training, file, report by simulation and engine."""
    model = make_target("gemma4-31b", vocab_size=258, fresh=True)
    model.generation_config.eos_token_id = 257
    model.generation_config.pad_token_id = 0
    target = tmp_path / "target"
    model.save_pretrained(target)
    byte_tokenizer.save_pretrained(target)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"question": f"What is {i} times {i}?"}) for i in range(40)))
    out = tmp_path / "head"
    argv = f"--target {target} --prompts {prompts} --out {out} --minutes 0.1 --answer-share 0.1 --report-seconds 3"
    argv += " --report-count 3 --draft-vocab 64 --heads 2 --kv-heads 1 --rows 4 --length 96 --max-new 24"
    argv += " --answer-batch 16 --steps-ttt 3 --device cpu --log-every 1"
    sys_argv, sys.argv = sys.argv, ["train_eagle3.py", *argv.split()]
    try:
        examples["train_eagle3"].main()
    finally:
        sys.argv = sys_argv
    report = json.loads((out / "report.json").read_text())
    assert report["training"]["steps"] >= 8 and report["training"]["loss"] < 10
    assert len(report["simulated"]["agreement"]) == 4 and report["simulated"]["rounds"] > 0
    assert 1 <= report["engine"]["chain"] <= 5 and 1 <= report["engine"]["tree"] <= 5
    bound = TargetModel(model)
    drafter = eagle3_drafter(out, bound)
    assert drafter.taps == (2, 2, 1) and drafter.spec.draft_vocab_size == 64 and drafter.spec.fc_norm
    engine = Engine(bound, drafter, config=EngineConfig(max_batch_size=1, max_model_len=64))
    plain = Engine(bound, None, config=EngineConfig(max_batch_size=1, max_model_len=64))
    prompt = byte_tokenizer("What is 3?")["input_ids"]
    params = SamplingParams(max_new_tokens=12)
    assert engine.generate(prompt, params)[0].token_ids == plain.generate(prompt, params)[0].token_ids


def test_a_trained_head_is_accepted_and_an_off_by_one_layer_is_not(examples, make_target, greedy_oracle) -> None:
    """Training, simulation and engine agree about what position i holds; reading the states one layer early shows."""
    training = examples["eagle3_training"]
    model = make_target("llama")
    target = TargetModel(model)
    prompts = [[7 * i % 96, 5, 3 * i % 96, i] for i in range(6)]
    docs = [(np.array(p + greedy_oracle(model, p, 24), np.int32), len(p)) for p in prompts]
    spec = Eagle3Spec(
        hidden_size=32,
        target_hidden_size=32,
        vocab_size=96,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        aux_layers=(2, 1, 3),
        draft_vocab_size=96,
        fc_norm=True,
        norm_output=True,
    )
    torch.manual_seed(0)
    head = Eagle3Head(spec)
    batch = training.Batch(*(x.long() for x in training.pack_rows(docs, 60)))
    lesson = training.teach(target, spec.aux_layers, batch)
    teacher = target.logits(lesson.hidden).detach()
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(70):
        chains = training.draft_logits(head, target.embed.weight.detach(), target.head, None, batch, lesson, 4)
        goods = training.rounds(batch, 4)
        losses = [training.chain_loss(x, teacher.roll(-1 - i, 1), None, goods[i]) for i, x in enumerate(chains)]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    head.eval()
    simulated = training.simulate(head, target, None, docs, 60)["acceptance_length"]
    lengths = []
    for taps in ((2, 1, 3), (1, 0, 2)):
        drafter = Eagle3Drafter(head, None, target)
        drafter.taps = taps
        engine = Engine(target, drafter, config=EngineConfig(max_batch_size=3, max_model_len=64))
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=24))
        assert [out.token_ids for out in outputs] == [list(map(int, doc[cut:])) for doc, cut in docs]
        lengths.append(engine.stats().acceptance_length)
    right, wrong = lengths
    assert simulated > 2.5 and abs(right - simulated) < 0.2 * simulated
    assert wrong < 0.6 * right
