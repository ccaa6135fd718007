"""GSM8K evaluation: prompts, problems, and runs of the bundled pair that survive kills."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec import Engine, EngineConfig, SamplingParams, SpecDecError
from specdec.errors import CapacityError, ConfigError
from specdec.evaluation import accuracy as evaluation
from specdec.evaluation.accuracy import (
    Dialogues,
    evaluate,
    find_parting,
    open_transcripts,
    problem_seed,
    read_transcripts,
)
from specdec.evaluation.data_sets import EXEMPLARS, batches_of, choose, dialogue_ids, load_data, question_text
from specdec.loading.model_loading import load_tokenizer
from specdec.models.published import resolve_name
from specdec.progress import Interrupted
from specdec.text.prompt_files import Problem
from specdec.text.record_files import append_record

from marks import deep, examples
from processes import run, run_ranks

PAIR = ("tiny-gemma4", "tiny-gemma4-mtp")
NEW, LIMIT = examples(6, 16), 5
SMALL = {
    "limit": LIMIT,
    "shots": 1,
    "compare": True,
    "params": SamplingParams(NEW),
    "config": EngineConfig(max_batch_size=2),
}
COMMAND = f"eval gsm8k --limit {LIMIT} --shots 1 --compare --max-new-tokens {NEW} --batch-size 2 --fixed-drafts".split()
pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")


def without_timing(report):
    return {key: value for key, value in report.items() if key != "timing"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("uninterrupted")


@pytest.fixture(scope="module")
def report(folder):
    return evaluate("gsm8k", *PAIR, folder=folder, **SMALL)


# prompts


class Characters:
    """A tokenizer without a chat template: one id a character."""

    def __call__(self, text):
        return {"input_ids": list(map(ord, text))}


def as_text(ids):
    return "".join(map(chr, ids))


FIRST, SECOND = (f"Question: {example.text}\nAnswer: {example.answer}\n\n" for example in EXEMPLARS[:2])
TURN = "<bos><|turn>user\n{}<turn|>\n<|turn>model\n"


@pytest.mark.parametrize(
    ("chat", "shots", "instruction", "text"),
    [
        (False, 2, "", f"{FIRST}{SECOND}Question: How many?\nAnswer:"),
        (False, 0, "Think.", "Question: How many?\nThink.\nAnswer:"),
        (True, 0, "", TURN.format("How many?")),
        (True, 0, "Think.", TURN.format("How many?\nThink.")),
        (True, 1, "", TURN.format(f"{FIRST}Question: How many?\nAnswer:")),
    ],
)
def test_a_question_as_a_base_model_and_an_instruct_model_see_it(chat, shots, instruction, text):
    tokenizer = load_tokenizer("tiny-gemma4") if chat else Characters()
    ids = dialogue_ids(tokenizer, [question_text("How many?", chat, shots, instruction)], [], chat)
    assert (tokenizer.decode(ids) if chat else as_text(ids)) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chat_template", "shots", "used", "stops"), [(None, None, 8, True), (None, 0, 0, True), ("x", None, 0, False)]
)
def test_shots_and_the_stop_string_follow_the_chat_template(chat_template, shots, used, stops, monkeypatch):
    tokenizer = load_tokenizer("tiny-gemma4")
    tokenizer.chat_template = chat_template
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda name, options: tokenizer)
    settings = evaluate("gsm8k", "tiny-gemma4", shots=shots, limit=1, params=SamplingParams(2))["settings"]
    assert (settings["shots"], settings["chat_template"]) == (used, bool(chat_template))
    assert settings["stop"] == ["Question:"] * stops


# runs on the bundled pair


@pytest.mark.cpu
def test_a_margin_is_that_of_the_bare_model():
    """To the bit that of the same forward, which computes the last logits only. A forward that computes the logits of
    every position is another matrix product and rounds otherwise, by more than 1e-5 in transformers 5.23."""
    with Engine.from_pretrained("tiny-gemma4") as engine:
        model, prompt = engine.target.model, engine.chat_prompt("How many?")
        tokens = torch.tensor([[*prompt, 7, 8]])
        with torch.inference_mode():
            logits = model(tokens, use_cache=False, logits_to_keep=1).logits[0, -1]
            exact = copy.deepcopy(model).double()(tokens).logits[0, -1]
        parting = find_parting(engine.target, prompt, [7, 8, 9, 1], [7, 8, 5, 1, 2])
        assert find_parting(engine.target, prompt, [7, 8], [7, 8, 5]) == {"position": 2, "logit_margin": None}
    assert parting["position"] == 2
    assert parting["logit_margin"] == abs(float(logits[9] - logits[5]))
    rounding = 64 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    assert parting["logit_margin"] == pytest.approx(abs(float(exact[9] - exact[5])), abs=rounding)
    assert parting["logit_margin"] > 0.01


def test_seeds_of_problems_are_distinct_and_valid():
    seeds = {problem_seed(seed, index) for seed in (0, 1, 2) for index in range(1000)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.slow
def test_paths_and_the_word_none_are_understood(tmp_path):
    data = tmp_path / "some.jsonl"
    data.write_text('{"question": "a", "answer": "#### 1"}\n')
    report = evaluate("gsm8k", Path(resolve_name("tiny-gemma4")), "none", data=data, params=SamplingParams(2))
    assert list(report["runs"]) == ["plain"]
    assert report["settings"]["drafter"] is None
    drafter = Path(resolve_name("tiny-gemma4-mtp"))
    report = evaluate("gsm8k", "tiny-gemma4", drafter, data=str(data), params=SamplingParams(2))
    assert report["settings"]["drafter"] == str(drafter)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"limit": -1}, "limit=-1"),
        ({"target": 5}, "target is a int"),
        ({"drafter": torch.nn.Linear(1, 1)}, "drafter is a Linear;"),
        ({"task": "gsm9k"}, "task='gsm9k' is unknown; choose one of gsm8k, mt-bench"),
        ({"task": "mt-bench"}, "mt-bench needs its prompts"),
        ({"task": "humaneval", "shots": 2}, "shots=2: humaneval has no worked examples"),
        ({"params": SamplingParams(1_000_000)}, "problem 0 may take 10000"),
        ({"params": SamplingParams(2, n=2)}, "n=2: each problem has one answer"),
        ({"config": EngineConfig(device="cuda:99")}, "device='cuda:99' cannot be used"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_mistakes_are_one_sentence(arguments, says):
    with pytest.raises(SpecDecError, match=says) as caught:
        evaluate(**{"task": "gsm8k", "target": "tiny-gemma4", "limit": 1, **arguments})
    assert "\n" not in str(caught.value)


# which problems, in which batches


def of_categories(*names):
    return [Problem(("?",), None, name) for name in names]


def test_a_small_evaluation_has_something_of_every_category():
    problems = of_categories("a", "a", "a", "b", "b", "c")
    assert [choose(problems, count) for count in (1, 2, 3, 4, 6, 9)] == [
        [0],
        [0, 3],
        [0, 3, 5],
        [0, 1, 3, 5],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]
    assert choose(of_categories(None, None, None), 2) == [0, 1]


def test_a_batch_is_of_one_category():
    problems = of_categories("a", "b", "a", "a", "b")
    assert batches_of(problems, [0, 1, 2, 3, 4], 2) == [(0, 2), (3,), (1, 4)]


# dialogues

QUESTIONS = [
    {"turns": ["Tom has 3 apples.", "And now?"], "category": "math"},
    {"turns": ["Ann has 4 bags of 6 marbles. How many?"], "category": "math"},
    {"turns": ["Say one.", "Say two."], "category": "writing"},
]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)))
    return path


@pytest.mark.slow
def test_a_second_turn_follows_the_models_own_first_answer(questions, tmp_path):
    params = SamplingParams(6)
    report = evaluate("mt-bench", *PAIR, data=questions, params=params, folder=tmp_path)
    assert report["comparison"] == {"equal": 5, "unequal": []}
    assert {name: group["problems"] for name, group in report["categories"].items()} == {"math": 2, "writing": 1}
    assert {name: group["problems"] for name, group in report["turns"].items()} == {"turn 1": 3, "turn 2": 2}
    assert report["timing"]["speed_up"] > 0
    lines = [json.loads(line) for line in (tmp_path / "transcripts-0.jsonl").read_text().splitlines()[1:]]
    texts = {(line["index"], line["turn"]): line["runs"]["speculative"] for line in lines}
    with Engine.from_pretrained("tiny-gemma4") as engine:
        for index in (0, 2):
            messages = [
                {"role": "user", "content": QUESTIONS[index]["turns"][0]},
                {"role": "assistant", "content": texts[index, 0]["text"]},
                {"role": "user", "content": QUESTIONS[index]["turns"][1]},
            ]
            [out] = engine.generate(engine.chat_prompt(messages), params)
            assert out.token_ids == texts[index, 1]["token_ids"]


def test_without_a_chat_template_a_dialogue_is_its_texts():
    ids = dialogue_ids(Characters(), ["one", "three"], ["two"], chat=False)
    assert as_text(ids) == "one\n\ntwo\n\nthree"


@pytest.mark.slow
def test_the_answers_to_all_turns_must_fit(byte_tokenizer):
    ask = Dialogues(byte_tokenizer, False, {0: ["a", "b"]})  # a, b, an empty answer, and two line feeds between them
    ask.require_fits(6 + 2 * 10, 10)
    with pytest.raises(CapacityError, match="problem 0 may take 26 tokens"):
        ask.require_fits(6 + 2 * 10 - 1, 10)


def test_a_file_of_another_benchmark_of_one_name_is_refused(tmp_path):
    rows = [{"turns": ["x"], "category": category} for category in ("writing", "math")]
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="name mt-bench in place of spec-bench"):
        load_data("spec-bench", str(tmp_path))
    assert len(load_data("mt-bench", str(tmp_path))[1]) == 2


def test_a_first_answer_that_differs_is_found_and_withholds_the_speed(questions, monkeypatch):
    generate = Engine.generate

    def another_ending(engine, *args, **kwargs):
        outputs = generate(engine, *args, **kwargs)
        if engine.drafter is not None:
            changed = [replace(out, token_ids=[*out.token_ids[:-1], 5], text=out.text + "!") for out in outputs[:1]]
            outputs[:1] = changed
        return outputs

    monkeypatch.setattr(Engine, "generate", another_ending)
    report = evaluate("mt-bench", *PAIR, data=questions, limit=1, params=SamplingParams(6))
    first, second = report["comparison"]["unequal"]
    assert (first["problem"], first["position"]) == (0, 5) and first["logit_margin"] > 0
    assert second == {"problem": 0, "turn": 1, "position": None, "logit_margin": None}
    assert "speed_up" not in report["timing"]


# going on after a kill, and with more problems


def test_a_line_without_its_line_feed_is_dropped_and_written_over(tmp_path):
    settings = {"a": 1}
    with open_transcripts(tmp_path, settings, 0) as file:
        file.write(b'{"batch": 0}\n{"batch": 1')
    assert read_transcripts(tmp_path, settings) == [{"batch": 0}]
    with open_transcripts(tmp_path, settings, 0) as file:
        append_record(file, {"batch": 2})
    with open_transcripts(tmp_path, settings, 3) as file:
        append_record(file, {"batch": 5})
    (tmp_path / "transcripts-4.jsonl").write_text('{"a"')  # killed while it wrote its settings
    assert read_transcripts(tmp_path, settings) == [{"batch": 0}, {"batch": 2}, {"batch": 5}]
    assert (tmp_path / "transcripts-0.jsonl").read_text() == '{"a": 1}\n{"batch": 0}\n{"batch": 2}\n'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"transcripts-0\.jsonl' is a file; a folder is expected"),
        ('{"a": 1, "b": 2}\n', r"transcripts-0\.jsonl was made with b 2, now 3;"),
        ("{}\nnonsense\n", ":2 is not a transcript"),
        ("[1]\n", ":1 is not a transcript"),
    ],
)
def test_transcripts_of_other_settings_are_refused(content, says, tmp_path):
    file = tmp_path / "transcripts-0.jsonl"
    file.write_text(content or "a,b")
    with pytest.raises(SpecDecError, match=says):
        read_transcripts(tmp_path, {"a": 1, "b": 3}) if content else open_transcripts(file, {}, 0)


@pytest.mark.slow
def test_every_setting_that_changes_an_output_is_compared(report, folder):
    for change in (
        {"params": SamplingParams(15)},
        {"params": SamplingParams(NEW, temperature=0.5)},
        {"config": EngineConfig(max_batch_size=1)},
        {"instruction": "Think."},
        {"shots": 2},
        {"compare": False},
    ):
        with pytest.raises(SpecDecError, match="was made with"):
            evaluate("gsm8k", *PAIR, folder=folder, **{**SMALL, **change})


@pytest.mark.slow
def test_only_batches_of_the_same_problems_are_taken_over(tmp_path, monkeypatch):
    data, made, whole = tmp_path / "data.jsonl", [], evaluation.solve
    monkeypatch.setattr(evaluation, "solve", lambda *args: made.append(args[2]) or whole(*args))
    rows = [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(4)]

    def run(rows, limit):
        data.write_text("\n".join(map(json.dumps, rows)))
        made.clear()
        pairs = {"params": SamplingParams(2), "config": EngineConfig(max_batch_size=2)}
        evaluate("gsm8k", "tiny-gemma4", data=data, limit=limit, folder=tmp_path / "kept", **pairs)
        return made

    assert run(rows, 3) == [(0, 1), (2,)]
    assert run(rows, 4) == [(2, 3)]  # the last batch had one problem, and is made again with the fourth
    assert run([{**rows[0], "question": "What else?"}, *rows[1:]], 4) == [(0, 1)]
    assert run(rows, 2) == []


@pytest.mark.slow
def test_settings_that_change_no_answer_may_differ(report, folder, tmp_path):
    (tmp_path / "transcripts-0.jsonl").write_bytes((folder / "transcripts-0.jsonl").read_bytes())
    roomy = replace(SMALL["config"], max_model_len=400, full_slots=900, swa_slots=900)
    again = evaluate("gsm8k", *PAIR, folder=tmp_path, **{**SMALL, "config": roomy})
    assert again["runs"] == report["runs"]
    assert report["comparison"]["equal"] == LIMIT and report["comparison"]["unequal"] == []
    speculative, plain = report["runs"]["speculative"], report["runs"]["plain"]
    assert (speculative["strict"], speculative["cut_off"]) == (plain["strict"], plain["cut_off"])
    assert speculative["acceptance_length"] > 1 == plain["acceptance_length"]
    settings = [report["settings"][name] for name in ("data", "problems", "dtype")]
    assert settings == ["bundled generated problems, held out", LIMIT, "torch.float32"]


@pytest.mark.slow
def test_an_interruption_keeps_what_is_finished(report, tmp_path, monkeypatch):
    whole = evaluation.solve

    def interrupted(engines, ask, batch, params):
        if 4 in batch:
            raise KeyboardInterrupt
        return whole(engines, ask, batch, params)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "solve", interrupted)
        with pytest.raises(
            Interrupted, match=r"4 of 5 problems are finished, kept in .*the same command continues"
        ) as stop:
            evaluate("gsm8k", *PAIR, folder=tmp_path, **SMALL)
    partial = stop.value.report
    assert partial["settings"]["problems"] == partial["comparison"]["equal"] == 4
    assert without_timing(evaluate("gsm8k", *PAIR, folder=tmp_path, **SMALL)) == without_timing(report)


def launched(arguments):
    one_machine = ("--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    launch = ["-m", "accelerate.commands.launch", *one_machine, "--num_processes", "2", "--main_process_port", "0"]
    return [run([*launch, *arguments], real=True)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [lambda arguments: run_ranks(arguments, 2), deep(launched)], ids=["ranks", "launch"])
def test_two_processes_make_the_same_report(ranks, report, tmp_path):
    """Those that `accelerate launch` starts, with or without itself."""
    done = ranks(["-m", "specdec", *COMMAND, "--transcripts", str(tmp_path), "--json", "-", "--device", "cpu"])
    assert [each.returncode for each in done] == [0] * len(done), [each.stderr for each in done]
    both = json.loads("".join(each.stdout for each in done))
    assert without_timing(both) == without_timing(report)
    assert both["timing"]["hardware"].endswith("2 processes")
    assert len(list(tmp_path.glob("transcripts-[01].jsonl"))) == 2
    again = evaluate("gsm8k", *PAIR, folder=tmp_path, **SMALL)  # by one process, which finds nothing left to do
    assert again == {**both, "timing": {**both["timing"], "hardware": again["timing"]["hardware"]}}
