"""GSM8K evaluation: prompts, problems, the report of fixed records, and runs of the bundled pair that survive kills."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from specdec import Engine, EngineConfig, SamplingParams, SpecDecError
from specdec.evaluation import evaluate as evaluation
from specdec.evaluation.bench import read_prompts
from specdec.evaluation.evaluate import evaluate_gsm8k, find_parting, open_transcripts, problem_seed, read_transcripts
from specdec.evaluation.gsm8k import EXEMPLARS, load_problems, prompt_ids
from specdec.evaluation.report import make_report, markdown, save_plot
from specdec.evaluation.scoring import final_number
from specdec.models.bundled import HELD_OUT_PROBLEMS
from specdec.models.loading import load_tokenizer

PAIR = ("tiny-gemma4", "tiny-gemma4-mtp")
SMALL = {"limit": 7, "compare": True, "params": SamplingParams(64), "config": EngineConfig(max_batch_size=2)}
COMMAND = ("eval", "gsm8k", "--limit", "7", "--compare", "--max-new-tokens", "64", "--batch-size", "2")


def without_timing(report):
    return {key: value for key, value in report.items() if key != "timing"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("uninterrupted")


@pytest.fixture(scope="module")
def report(folder):
    return evaluate_gsm8k(*PAIR, folder=folder, **SMALL)


# prompts


class Characters:
    """A tokenizer without a chat template: one id a character."""

    def __call__(self, text):
        return {"input_ids": list(map(ord, text))}


def as_text(ids):
    return "".join(map(chr, ids))


def test_a_base_model_sees_worked_examples():
    text = as_text(prompt_ids(Characters(), "How many?", chat=False, shots=2, instruction=""))
    first, second, last = text.split("\n\n")
    assert first == f"Question: {EXEMPLARS[0].text}\nAnswer: {EXEMPLARS[0].answer}"
    assert second == f"Question: {EXEMPLARS[1].text}\nAnswer: {EXEMPLARS[1].answer}"
    assert last == "Question: How many?\nAnswer:"


def test_an_instruction_stands_behind_the_question():
    text = as_text(prompt_ids(Characters(), "How many?", chat=False, shots=0, instruction="Think."))
    assert text == "Question: How many?\nThink.\nAnswer:"


def test_an_instruct_model_sees_the_bare_question_as_a_turn():
    tokenizer = load_tokenizer("tiny-gemma4")

    def turn(*args):
        return tokenizer.decode(prompt_ids(tokenizer, "How many?", True, *args))

    assert turn(0, "") == "<bos><|turn>user\nHow many?<turn|>\n<|turn>model\n"
    assert turn(0, "Think.") == "<bos><|turn>user\nHow many?\nThink.<turn|>\n<|turn>model\n"
    assert turn(1, "").startswith(f"<bos><|turn>user\nQuestion: {EXEMPLARS[0].text}\nAnswer: ")
    assert turn(1, "").endswith("\n\nQuestion: How many?\nAnswer:<turn|>\n<|turn>model\n")


def test_the_worked_examples_are_right_and_not_among_the_problems():
    held_out = {problem.text for problem in read_prompts(HELD_OUT_PROBLEMS)}
    assert len(EXEMPLARS) == 8
    for example in EXEMPLARS:
        steps = re.findall(r"([\d.]+(?: [-+*/] [\d.]+)+) = ([\d.]*\d)", example.answer)
        assert steps
        for expression, value in steps:
            assert eval(expression) == float(value), example.answer
        assert final_number(example.answer) == final_number(f"#### {steps[-1][1]}")
        assert example.text not in held_out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chat_template", "shots", "used", "stops"), [(None, None, 8, True), (None, 0, 0, True), ("x", None, 0, False)]
)
def test_shots_and_the_stop_string_follow_the_chat_template(chat_template, shots, used, stops, monkeypatch):
    tokenizer = load_tokenizer("tiny-gemma4")
    tokenizer.chat_template = chat_template
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda name: tokenizer)
    settings = evaluate_gsm8k("tiny-gemma4", shots=shots, limit=1, params=SamplingParams(2))["settings"]
    assert (settings["shots"], settings["chat_template"]) == (used, bool(chat_template))
    assert settings["stop"] == ["Question:"] * stops


# problems


def test_problems_from_a_file(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "#### 2"}\n')
    source, problems = load_problems(str(path))
    assert source == "file some.jsonl"
    assert [(p.text, p.answer) for p in problems] == [("a", "#### 1"), ("b", "#### 2")]
    assert len(load_problems(str(path), limit=1)[1]) == 1


def test_a_problem_without_a_marked_answer_is_named(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "2"}\n')
    with pytest.raises(SpecDecError, match=r"some\.jsonl: problem 2 has no 'answer'"):
        load_problems(str(path))


def hub(load):
    return SimpleNamespace(load_dataset=load)


def test_problems_from_the_hub(monkeypatch):
    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        return ({"question": str(i), "answer": f"#### {i}"} for i in range(3))

    monkeypatch.setitem(sys.modules, "datasets", hub(load))
    source, problems = load_problems("hub", limit=2)
    assert source == "openai/gsm8k, test split, from the hub"
    assert [p.text for p in problems] == ["0", "1"]
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]


def no_network(*args, **kwargs):
    raise ConnectionError("no route\nto host")


@pytest.mark.parametrize(("module", "says"), [(None, r"specdec-runtime\[datasets\]"), (hub(no_network), "no route")])
def test_why_the_hub_did_not_answer(module, says, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", module)  # None: as if it were not installed
    with pytest.raises(SpecDecError, match=says):
        load_problems("hub")


# the report, from fixed records


def record(index, speculative, plain, parting=None):
    def run(text, rounds, accepted, seconds):
        stats = {"rounds": rounds, "round_tokens": rounds + sum(accepted), "accepted_counts": accepted}
        stats["output_tokens"] = 10
        return {"text": text, "token_ids": [], "finish_reason": "stop", "stats": stats, "seconds": seconds}

    runs = {"speculative": run(speculative, 4, [4, 2], 0.5), "plain": run(plain, 9, [], 2.0)}
    return {"index": index, "parting": parting, "runs": runs}


ANSWERS = ["#### 1", "#### 2", "#### 3", "#### 4"]
RECORDS = [
    record(0, "#### 1", "#### 1"),
    record(1, "it is 2", "#### 2", {"position": 3, "logit_margin": 0.0001}),
    record(2, "#### 3", "#### 4, no, 3", {"position": 0, "logit_margin": 0.5}),
    record(3, "#### 5", "#### 5"),
]
SETTINGS = {"target": "t", "problems": 4, "temperature": 0.0, "stop": []}


@pytest.fixture
def fixed_report():
    return make_report(SETTINGS, ANSWERS, RECORDS, "a machine")


def test_the_report_of_fixed_records(fixed_report):
    speculative, plain = fixed_report["runs"]["speculative"], fixed_report["runs"]["plain"]
    assert [speculative["strict"]["correct"], speculative["last_number"]["correct"]] == [2, 3]
    assert [plain["strict"]["correct"], plain["last_number"]["correct"]] == [2, 3]
    assert speculative["strict"]["share"] == 0.5
    assert speculative["strict"]["wilson_95"] == pytest.approx([0.1500, 0.8500], abs=5e-5)
    assert (speculative["acceptance_length"], speculative["accepted_per_position"]) == (2.5, [1.0, 0.5])
    assert (plain["acceptance_length"], plain["accepted_per_position"]) == (1.0, [])
    assert fixed_report["comparison"] == {
        "equal": 2,
        "unequal": [
            {"problem": 1, "position": 3, "logit_margin": 0.0001},
            {"problem": 2, "position": 0, "logit_margin": 0.5},
        ],
        "strict": {"only_speculative": 1, "only_plain": 1, "mcnemar_p": 1.0},
        "last_number": {"only_speculative": 0, "only_plain": 0, "mcnemar_p": 1.0},
    }
    assert fixed_report["timing"] == {
        "hardware": "a machine",
        "speculative": {"seconds": 2.0, "tokens_per_second": 20.0},
        "plain": {"seconds": 8.0, "tokens_per_second": 5.0},
    }


def test_one_run_has_no_comparison():
    alone = [{**one, "runs": {"plain": one["runs"]["plain"]}} for one in RECORDS]
    report = make_report(SETTINGS, ANSWERS, alone, "a machine")
    assert report["comparison"] is None
    assert "| plain | 50.0 % (15.0 to 85.0) | 75.0 %" in markdown(report)


def test_markdown_says_what_was_found(fixed_report):
    text = markdown(fixed_report)
    assert "| speculative | 50.0 % (15.0 to 85.0) | 75.0 % (30.1 to 95.4) | 0 | 2.50 | 1.00, 0.50 | 20.0 |" in text
    assert "- equal transcripts: 2 of 4\n" in text
    assert "- problem 1 parts at token 3, logit margin 0.0001\n" in text
    assert text.endswith("target t; problems 4; temperature 0.0; a machine")


def test_the_plot_is_a_png(fixed_report, tmp_path):
    save_plot(fixed_report, str(tmp_path / "report.png"))
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


# runs on the bundled pair


@pytest.mark.slow
def test_greedy_accuracy_is_the_same_and_transcripts_match(report):
    speculative, plain = report["runs"]["speculative"], report["runs"]["plain"]
    assert report["comparison"]["equal"] == 7
    assert report["comparison"]["unequal"] == []
    assert speculative["strict"] == plain["strict"]
    assert speculative["strict"]["correct"] >= 4  # of 7, some cut off
    assert speculative["cut_off"] == plain["cut_off"] > 0
    assert speculative["acceptance_length"] > 2.5
    assert plain["acceptance_length"] == 1
    assert report["settings"]["data"] == "bundled generated problems, held out"
    assert (report["settings"]["problems"], report["settings"]["dtype"]) == (7, "torch.float32")


def test_a_margin_is_that_of_the_bare_model():
    with Engine.from_pretrained("tiny-gemma4") as engine:
        prompt = engine.chat_prompt("How many?")
        with torch.inference_mode():
            logits = engine.target.model(torch.tensor([[*prompt, 7, 8]])).logits[0, -1]
        parting = find_parting(engine.target, prompt, [7, 8, 9, 1], [7, 8, 5, 1, 2])
    assert parting["position"] == 2
    assert parting["logit_margin"] == pytest.approx(abs(float(logits[9] - logits[5])), abs=1e-5)
    assert parting["logit_margin"] > 0.01


def test_a_wrong_token_is_found(monkeypatch):
    generate = Engine.generate

    def wrong_from_the_third_token(engine, *args, **kwargs):
        outputs = generate(engine, *args, **kwargs)
        if engine.drafter is not None:
            outputs[0].token_ids[2:] = [token + 1 for token in outputs[0].token_ids[2:]]
        return outputs

    monkeypatch.setattr(Engine, "generate", wrong_from_the_third_token)
    comparison = evaluate_gsm8k(*PAIR, limit=2, compare=True, params=SamplingParams(8))["comparison"]
    assert comparison["equal"] == 1
    assert [(one["problem"], one["position"]) for one in comparison["unequal"]] == [(0, 2)]
    assert comparison["unequal"][0]["logit_margin"] > 0


@pytest.mark.slow
def test_sampling_depends_on_the_seed_and_the_problem_only(tmp_path):
    def texts(name, seed, batch_size, drafter):
        params = SamplingParams(24, temperature=1.0, seed=seed)
        config = EngineConfig(max_batch_size=batch_size)
        evaluate_gsm8k("tiny-gemma4", drafter, limit=3, params=params, config=config, folder=tmp_path / name)
        lines = (tmp_path / name / "transcripts-0.jsonl").read_text().splitlines()[1:]
        return [next(iter(json.loads(line)["runs"].values()))["token_ids"] for line in lines]

    first = texts("first", 3, 1, None)
    assert texts("second", 3, 2, "tiny-gemma4-mtp") == first
    assert texts("third", 4, 2, None) != first


def test_seeds_of_problems_are_distinct_and_valid():
    seeds = {problem_seed(seed, index) for seed in (0, 1, 2) for index in range(1000)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**63 for seed in seeds)


# going on after a kill


def test_a_line_without_its_line_feed_is_dropped_and_written_over(tmp_path):
    settings = {"a": 1}
    with open_transcripts(tmp_path, settings, 0) as file:
        file.write('{"index": 0}\n{"index": 1')
    assert read_transcripts(tmp_path, settings) == [{"index": 0}]
    with open_transcripts(tmp_path, settings, 0) as file:
        file.write('{"index": 2}\n')
    with open_transcripts(tmp_path, settings, 3) as file:
        file.write('{"index": 5}\n')
    (tmp_path / "transcripts-4.jsonl").write_text('{"a"')  # killed while it wrote its settings
    assert read_transcripts(tmp_path, settings) == [{"index": 0}, {"index": 2}, {"index": 5}]
    assert (tmp_path / "transcripts-0.jsonl").read_text() == '{"a": 1}\n{"index": 0}\n{"index": 2}\n'


def test_other_settings_are_refused_and_named(tmp_path):
    open_transcripts(tmp_path, {"a": 1, "b": 2}, 0).close()
    with pytest.raises(SpecDecError, match=r"transcripts-0\.jsonl was made with b 2, now 3;") as caught:
        read_transcripts(tmp_path, {"a": 1, "b": 3})
    assert "a 1" not in str(caught.value)


@pytest.mark.slow
def test_every_setting_that_changes_an_output_is_compared(report, folder):
    for change in (
        {"limit": 6},
        {"params": SamplingParams(63)},
        {"params": SamplingParams(64, temperature=0.5)},
        {"config": EngineConfig(max_batch_size=1)},
        {"instruction": "Think."},
        {"shots": 1},
        {"compare": False},
    ):
        with pytest.raises(SpecDecError, match="was made with"):
            evaluate_gsm8k(*PAIR, folder=folder, **{**SMALL, **change})


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9])
def test_a_file_cut_anywhere_is_completed(kept, report, folder, tmp_path):
    """At the end and in the middle of a line; lines that were whole stay as they are."""
    whole = (folder / "transcripts-0.jsonl").read_bytes()
    cut = whole[: int(kept * len(whole))]
    (tmp_path / "transcripts-0.jsonl").write_bytes(cut)
    again = evaluate_gsm8k(*PAIR, folder=tmp_path, **SMALL)
    assert without_timing(again) == without_timing(report)
    lines = (tmp_path / "transcripts-0.jsonl").read_bytes()
    assert lines.startswith(cut[: cut.rfind(b"\n") + 1])
    assert sorted(json.loads(line)["index"] for line in lines.splitlines()[1:]) == list(range(7))


def finished(folder):
    return sum(max(path.read_bytes().count(b"\n") - 1, 0) for path in folder.glob("transcripts-*.jsonl"))


@pytest.mark.slow
def test_killed_three_times_it_ends_with_the_same_report(report, tmp_path):
    rng = random.Random(4)
    for _ in range(3):
        wanted = rng.randint(finished(tmp_path), 4)
        command = [sys.executable, "-m", "specdec.cli", *COMMAND, "--transcripts", str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while finished(tmp_path) < wanted and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        errors = process.communicate()[1]
        assert process.returncode == -signal.SIGKILL, errors.decode()
    assert 0 < finished(tmp_path) < 7
    again = evaluate_gsm8k(*PAIR, folder=tmp_path, **SMALL)
    assert without_timing(again) == without_timing(report)


@pytest.mark.slow
def test_two_processes_make_the_same_report(report, tmp_path):
    one_machine = ("--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    launch = [sys.executable, "-m", "accelerate.commands.launch", *one_machine, "--num_processes", "2"]
    files = ["--transcripts", str(tmp_path), "--json", "-"]
    run = subprocess.run(
        [*launch, "--main_process_port", "0", "-m", "specdec.cli", *COMMAND, *files, "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    both = json.loads(run.stdout)
    assert without_timing(both) == without_timing(report)
    assert both["timing"]["hardware"].endswith("2 process(es)")
    assert len(list(tmp_path.glob("transcripts-[01].jsonl"))) == 2
    again = evaluate_gsm8k(*PAIR, folder=tmp_path, **SMALL)  # by one process, which finds nothing left to do
    assert again == {**both, "timing": {**both["timing"], "hardware": again["timing"]["hardware"]}}
