"""`specdec train`: runs stop and go on, what they leave loads and drafts, and mistakes are said before any work."""

import io
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import DynamicCache
from typer.testing import CliRunner

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.cli.app import app
from specdec.errors import ConfigError
from specdec.modules.transformers_names import cache_argument
from specdec.progress import Stage
from specdec.training import head_training, output_folder, train_drafter, training_loop
from specdec.training.draft_loss import draft_loss
from specdec.training.target_answers import prompt_source, warn_of_repetition
from specdec.training.train_settings import TrainSettings

from marks import deep, deep_cases, examples, slow
from processes import run as run_python
from processes import run_ranks
from tiny_families import FULL, SLIDING

NO_GPU = "cuda:99" if torch.cuda.is_available() else "cuda"


@pytest.fixture
def checkpoint(tmp_path, make_target, byte_tokenizer) -> Path:
    """A random target with a tokenizer on disk."""
    few = {"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL]}
    model = make_target("gemma4-31b", vocab_size=258, fresh=True, **few)
    model.generation_config.eos_token_id = 257
    model.generation_config.pad_token_id = 0
    model.save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"question": f"What is {i} times {i}?"}) for i in range(40)))
    return file


SMALL = "--answers 16 --batch 8 --minutes 5 --steps 4 --rows 4 --length 96"
SMALL += f" --max-new-tokens {examples(6, 24)}"
SMALL += " --report-count 2 --draft-steps 3 --device cpu --dtype float32"


def run(target: Path, prompts: Path, out: Path, more: str = "") -> dict[str, Any]:
    """`specdec train` with these arguments; a refusal is its SystemExit, with what it said."""
    folders = ["--target", str(target), "--prompts", str(prompts), "--out", str(out)]
    own = "" if "--kind mtp" in more else "--heads 4"
    own += "" if re.search("--kind (?!eagle3)", more) else " --draft-vocab 64"
    result = CliRunner().invoke(app, ["train", *folders, *SMALL.split(), *own.split(), *more.split()])
    print(result.stdout, end="")
    print(result.stderr, end="", file=sys.stderr)
    if result.exit_code:
        raise SystemExit(f"exit code {result.exit_code}: {result.stderr}")
    return json.loads((out / "training" / "report.json").read_text())


def test_prompts_that_are_answered_again_are_a_warning(prompts, caplog) -> None:
    """The default of 4,000 answers over a few prompts said nothing. A tenth of a file is kept for the report."""
    assert prompt_source([prompts, prompts], seed=0).num_prompts == 36
    warn_of_repetition(36, 36)
    assert not caplog.messages
    warn_of_repetition(4000, 36)
    [said] = caplog.messages
    assert said.startswith("--answers 4000 of 36 prompts: each is answered 111.1 times")


def test_a_cache_is_given_by_the_name_that_a_forward_has_for_it(make_target) -> None:
    """transformers renamed it in 5.24, with a FutureWarning for the old name."""

    class Old(torch.nn.Module):
        def forward(self, ids, past_key_values=None): ...

    class New(torch.nn.Module):
        def forward(self, ids, cache=None): ...

    assert cache_argument(Old(), 1) == {"past_key_values": 1} and cache_argument(New(), 1) == {"cache": 1}
    model, cache = make_target("llama"), DynamicCache()
    model(torch.tensor([[1, 2, 3]]), use_cache=True, **cache_argument(model, cache))
    assert cache.get_seq_length() == 3


def staged(terminal: bool, updates: dict[int, float], **settings: Any) -> str:
    """What a stage prints when a fraction is done at each of these seconds; half was done by an earlier run."""
    out, now = io.StringIO(), 100.0
    console = Console(file=out, force_terminal=terminal, width=120, get_time=lambda: now, _environ={})
    with Stage("training", console=console, **settings) as stage:
        for seconds, fraction in updates.items():
            now = 100.0 + seconds
            stage.update(fraction, f"loss {seconds}")
        stage.bar.refresh()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())


def test_a_stage_estimates_the_time_left_from_what_this_run_did() -> None:
    """Lines where there is no terminal: at most one per interval."""
    updates = {0: 0.5, 5: 0.51, 20: 0.6, 30: 0.7, 40: 0.75, 3640: 1.0}
    assert staged(False, updates, every=15.0).splitlines() == [
        "training  60%, 0:00:20, about 0:01:20 left  loss 20",
        "training  75%, 0:00:40, about 0:00:40 left  loss 40",
        "training 100%, 1:00:40, about 0:00:00 left  loss 3640",
    ]
    shown = staged(True, {0: 0.5, 20: 0.625, 40: 0.75})
    assert all(part in shown for part in ("training", "75%", "loss 40", "left 0:00:40"))  # 0.25 at 0.125 in 20 s
    assert staged(True, {0: 0.5}, show=False) == ""


@deep_cases("eagle3")
@pytest.mark.parametrize("kind", ["eagle3", slow("assistant"), "mtp", "block"])
def test_a_run_leaves_a_drafter_that_loads(kind, checkpoint, prompts, tmp_path, byte_tokenizer, capsys) -> None:
    """The whole script on a random target: answers, vocabulary, training, file, report by the engine. Each stage says
    what is left."""
    out = tmp_path / kind
    heads = "--kv-heads 2 --head-dim 8"
    more = {"eagle3": heads, "block": f"{heads} --layers 1 --causal --mask-token 3"}.get(kind, "")
    report = run(checkpoint, prompts, out, f"--kind {kind} --log-every 0 {more}")
    lines = capsys.readouterr().out
    for stage in ("answers", "training", "report"):
        assert re.search(rf"^{stage} +\d+%, \d+:\d\d:\d\d, about \d+:\d\d:\d\d left  \w+", lines, re.MULTILINE), stage
    assert report["steps"] == 4 and report["answers"] == 16 and 0 < report["loss"] < 10
    trees = ("chain of 3", "tree of depth 3, topk 4, 32 nodes") if kind == "block" else train_drafter.SHAPES
    assert [*report["held_out"]] == [*trees]
    assert all(1 <= r["acceptance_length"] <= 5 and r["prompts"] == 2 for r in report["held_out"].values())
    config = EngineConfig(max_batch_size=1, max_model_len=64)
    engine = Engine.from_pretrained(str(checkpoint), str(out), spec=SpecConfig(3), config=config)
    if kind == "block":
        spec = engine.drafter.spec
        assert (spec.block_size, spec.causal, spec.num_layers) == (4, True, 1)
        stored = json.loads((out / "config.json").read_text())["dflash_config"]
        assert stored["causal_head"] and stored["causal"]  # JetSpec's name and vLLM's
    plain = Engine(engine.target, None, config=config)
    prompt = byte_tokenizer("What is 3?")["input_ids"]
    params = SamplingParams(max_new_tokens=12)
    assert engine.generate(prompt, params)[0].token_ids == plain.generate(prompt, params)[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", deep("assistant"), deep("mtp")])
def test_a_stopped_run_goes_on(kind, checkpoint, prompts, tmp_path) -> None:
    """Stopped among the answers and then in training, it asks for no answer twice and ends with the same number of
    steps; other settings are refused."""
    out = tmp_path / "stopped"
    first = f"--kind {kind} --answers 8 --steps 2"
    run(checkpoint, prompts, out, first)
    answers = out / "training" / "answers-0.jsonl"
    lines = answers.read_text().splitlines()
    answers.write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])  # torn while the sixth was written
    report = run(checkpoint, prompts, out, f"--kind {kind}")
    assert report["answers"] == 16 and report["steps"] == 4
    whole = run(checkpoint, prompts, tmp_path / "whole", f"--kind {kind}")
    texts = [
        [json.loads(x)["answer"] for x in (folder / "training/answers-0.jsonl").read_text().splitlines()]
        for folder in (out, tmp_path / "whole")
    ]
    assert texts[0] == texts[1] and whole["steps"] == 4
    with pytest.raises(SystemExit, match=r"--lr was 0\.001, is 0\.5.*--overwrite"):
        run(checkpoint, prompts, out, f"--kind {kind} --lr 0.5")


def test_prompts_from_a_pipe_are_refused_since_a_resumed_run_reads_them_again(checkpoint, tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for no_file in (tmp_path / "pipe", tmp_path):
        with pytest.raises(SystemExit, match="a file is expected, which a resumed run reads again"):
            run(checkpoint, no_file, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "a"}\n{"text": "b"}\n', r"p\.jsonl:2: .*question, prompt, turns, messages.*'text'"),
        ('["a"]\n', r"p\.jsonl:1: an object .*\[\"a\"\]"),
        ('{"question": 5, "messages": [{"role": "user", "content": "b"}]}\n', r"p\.jsonl:1: 'question' is 5; text"),
        ('{"question": "a"}\n{"messages": "hi"}\n', r"p\.jsonl:2: 'messages': chat='hi': a list of messages"),
        ('{"question": "a"}\n{"messages": [{"role": "user", "content": 5}]}\n', r":2: 'messages': .* has content=5"),
        ('{"question": "a"}\n{"question": "b", "messages": []}\n', r":2: 'messages': chat=\[\] is empty"),
        ("\n", "holds 0 prompts"),
        ('{"question": "a"}\n', "at least 2 are needed"),
        (None, r"--prompts .*p\.jsonl: no such file"),
    ],
)
def test_a_bad_prompt_file_is_one_sentence(text, says, checkpoint, tmp_path) -> None:
    file = tmp_path / "p.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match=says):
        run(checkpoint, file, tmp_path / "out")
    assert not (tmp_path / "out").exists()  # the corrected file may use the same folder


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--length 20", r"--length 20: 1000 prompts in a row.*the shortest has \d+"),
        ("--heads 5 --kv-heads 5", "--heads 5 does not divide --hidden 32"),
        ("--heads 4 --kv-heads 3", "--heads 4 does not group over 3"),
        ("--heads 4 --kv-heads 2 --head-dim 5", "--head-dim 5 is odd"),
        ("--target /nowhere", "'/nowhere' is not a folder"),
        ("--minutes 0", "--minutes=0.0: a finite number above 0"),
        ("--answer-minutes nan", "--answer-minutes=nan: a finite number above 0"),
        ("--temperature nan", "--temperature=nan: a finite number from 0"),
        ("--cache-gb -1", "--cache-gb=-1.0: a finite number from 0"),
        ("--lr inf", "--lr=inf: a finite number above 0"),
        ("--kind block --hidden 64", "--hidden 64: a block drafter has the target's width, 32"),
        ("--kind block --mask-token 9999", "MASK is token 9999; give --mask-token"),
        ("--kind mtp --causal", "--causal True is an option of --kind block, not of mtp"),
        ("--kind assistant --kv-heads 2", "--kv-heads 2 is an option of --kind eagle3 and block, not of assistant"),
        ("--hidden -32", "Invalid value for '--hidden': .* 1 "),
        ("--length 5000", "--length 5000: .* serves at most 4096 tokens"),
        ("--seed -1", "Invalid value for '--seed': .* 0 "),
        (f"--seed {1 << 63}", "--seed=9223372036854775808: an integer from 0"),
        ("--device gpu", "device='gpu' cannot be used"),
        (f"--device {NO_GPU}", f"device='{NO_GPU}' cannot be used"),  # it trained on the CPU
    ],
)
def test_untrainable_drafters_are_refused_before_any_work(more, says, checkpoint, prompts, tmp_path) -> None:
    with pytest.raises(SystemExit, match=says):
        run(checkpoint, prompts, tmp_path / "out", more)
    assert not (tmp_path / "out").exists()  # the corrected command may use the same folder


def test_a_report_without_drafts_gives_no_acceptance(checkpoint, tmp_path, capsys) -> None:
    """The held-out prompt leaves no room for an answer; its acceptance length was said to be 0.00."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"question": question}) for question in ("What?", "What is it? " * 20)))
    found = run(checkpoint, file, tmp_path / "out", "--minutes 1e-9 --answer-minutes 1e-9")  # one update, one answer
    assert (found["steps"], found["answers"]) == (1, 1)
    assert [each["acceptance_length"] for each in found["held_out"].values()] == [None, None]
    assert "chain of 4: no round had drafts over 0 prompts with room" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("made", "more", "says"),
    [
        *((made, more, "is the target's own folder") for made in ("target", "link") for more in ("", "--overwrite")),
        ("model", "", r"no training run made \(config\.json, .*--overwrite"),
        ("notes", "", r"no training run made \(notes\).*--overwrite"),
        ("training/notes.txt", "", r"no training run made \(training\).*--overwrite"),
        ("training/settings.json", "", r"no training run made \(training\).*--overwrite"),
    ],
)
def test_training_into_a_folder_of_others_is_refused(made, more, says, checkpoint, prompts, tmp_path) -> None:
    """The target's own, whose config and weights were replaced without a word; somebody's model, anything else, and a
    folder `training` that no run made."""
    out = checkpoint if made == "target" else tmp_path / "out"
    if made == "link":
        out.symlink_to(checkpoint)
    elif made == "model":
        shutil.copytree(checkpoint, out)
    elif made != "target":
        (out / made).parent.mkdir(parents=True)
        (out / made).write_text("{}")
    before = contents(out)
    with pytest.raises(SystemExit, match=says):
        run(checkpoint, prompts, out, more)
    assert contents(out) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_overwrite_replaces_a_model_and_leaves_what_its_links_lead_to(checkpoint, prompts, tmp_path) -> None:
    """A shard that stays would be read with the drafter's tensors; a hub snapshot's links lead into its cache."""
    out, settings = tmp_path / "out", TrainSettings(target=str(checkpoint), prompts=[prompts], out=tmp_path / "out")
    out.mkdir()
    kept = contents(checkpoint)
    for number, file in enumerate(sorted(checkpoint.glob("*.safetensors")) * 2):
        (out / f"model-0000{number}-of-00002.safetensors").symlink_to(file)
    (out / "config.json").symlink_to(checkpoint / "config.json")
    (out / "tokenizer.json").write_text("{}")
    allowed = replace(settings, overwrite=True)
    output_folder.require_free_folder(allowed)
    output_folder.claim_folder(allowed)
    assert sorted(os.listdir(out)) == ["tokenizer.json", "training"]
    assert contents(checkpoint) == kept

    answers = out / "training" / "answers-0.jsonl"
    answers.write_text("")
    output_folder.claim_folder(allowed)  # the same settings: the run goes on
    output_folder.claim_folder(settings)
    assert answers.exists()
    other = replace(settings, lr=0.5)
    with pytest.raises(ConfigError, match=r"--lr was 0\.001, is 0\.5.*--overwrite to start over"):
        output_folder.claim_folder(other)
    output_folder.claim_folder(replace(other, overwrite=True))
    assert not answers.exists() and json.loads((out / "training/settings.json").read_text())["lr"] == 0.5


def test_a_run_from_named_files_is_claimed_and_goes_on(prompts, tmp_path) -> None:
    """--finetune and --conventions were paths that no settings.json could hold."""
    named = {"finetune": tmp_path / "base", "conventions": tmp_path / "asked.json"}
    settings = TrainSettings(target="tiny-gemma4", prompts=[prompts], out=tmp_path / "out", kind="mtp", **named)
    for _ in range(2):
        output_folder.claim_folder(settings)
    with pytest.raises(ConfigError, match=r"--finetune was .*base, is .*other"):
        output_folder.claim_folder(replace(settings, finetune=tmp_path / "other"))


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_it_has(monkeypatch, checkpoint, prompts, tmp_path, capsys) -> None:
    calls = []

    def loss(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return draft_loss(*args)

    with monkeypatch.context() as patch:
        patch.setattr(training_loop, "draft_loss", loss)
        with pytest.raises(SystemExit, match="130"):
            run(checkpoint, prompts, tmp_path / "out")
    assert "the same command continues" in capsys.readouterr().err

    state_file = tmp_path / "out" / "training" / "state.pt"
    state = state_file.read_bytes()
    torch.save(torch.load(state_file) | {"optimizer": {"masters": [], "adam": {}}}, state_file)  # as it once was
    with pytest.raises(SystemExit, match="the optimiser of an earlier specdec"):
        run(checkpoint, prompts, tmp_path / "out")
    state_file.write_bytes(state)
    report = run(checkpoint, prompts, tmp_path / "out")
    assert report["steps"] == 4
    assert "continuing from step 2" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_a_run_interrupted_in_an_update_ends_with_the_weights_of_one_that_was_not(
    kind, monkeypatch, checkpoint, prompts, tmp_path
) -> None:
    monkeypatch.setattr(head_training, "BLOCKS", 2)  # of the places in a row
    more = f"--kind {kind} --mask-token 3" if kind == "block" else f"--kind {kind}"
    run(checkpoint, prompts, tmp_path / "whole", more)
    outer, calls = torch.optim.AdamW.step, []

    def step(optimizer, *args):
        outer(optimizer, *args)
        calls.append(optimizer)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)  # one of the two optimisers has made its step

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        with pytest.raises(SystemExit, match="130"):
            run(checkpoint, prompts, tmp_path / "stopped", more)
    signal.signal(signal.SIGINT, before)
    assert torch.load(tmp_path / "stopped" / "training" / "state.pt")["step"] == 3
    assert run(checkpoint, prompts, tmp_path / "stopped", more)["steps"] == 4
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def launched(arguments):
    return [run_python(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *arguments], real=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [lambda arguments: run_ranks(arguments, 2), deep(launched)], ids=["ranks", "torchrun"]
)
def test_two_processes_train_one_head(ranks, checkpoint, prompts, tmp_path) -> None:
    """Each takes its own prompts and rows; averaged gradients keep one set of weights, which the first one saves."""
    out = tmp_path / "pair"
    folders = ["--target", str(checkpoint), "--prompts", str(prompts), "--out", str(out)]
    done = ranks(["-m", "specdec", "train", *folders, *SMALL.split()])
    assert [each.returncode for each in done] == [0] * len(done), [each.stderr[-2000:] for each in done]
    report = json.loads((out / "training" / "report.json").read_text())
    assert report["processes"] == 2 and report["answers"] == 16 and report["steps"] == 4
    parts = [(out / f"training/answers-{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    assert [len(part) for part in parts] == [8, 8]
    asked = [json.loads(line)["prompt"] for part in parts for line in part]
    assert len({tuple(p) for p in asked}) == 16
