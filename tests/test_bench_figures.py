"""Data sets by name, figures of `specdec bench` against an engine's own counts, and the report of `specdec eval`."""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from specdec import Engine, SamplingParams, SpecConfig, SpecDecError
from specdec.cli.app import app
from specdec.evaluation import bench_run
from specdec.evaluation.accuracy_report import accuracy_title, make_report, markdown
from specdec.evaluation.data_sets import DATA_SETS, PLACEHOLDER, load_data
from specdec.measurement import timed_comparison
from specdec.measurement.timed_comparison import acceptance_figures, time_figures
from specdec.runtime.drafts.draft_reports import vllm_figures

from engine_internals import RequestStats, record_round
from marks import deep

SPEED_ROW = {"question_id": "q" * 32, "category": "coding", "sub_category": "x", "source": "s", "multiturn": True}
ROWS = {
    "gsm8k": [{"question": "a", "answer": "#### 1"}],
    "mt-bench": [{"question_id": 81, "category": "writing", "turns": ["a", "b"]}],
    "humaneval": [{"task_id": "HumanEval/0", "prompt": "a", "test": "x"}],
    "spec-bench": [{"category": "rag", "turns": ["a"]}, {"category": "writing", "turns": ["a", "b"]}],
    "speed-bench": [
        SPEED_ROW | {"turns": ["a", "b"], "messages": None},
        SPEED_ROW | {"messages": [{"role": "user", "content": turn} for turn in ("a", "b")]},
    ],
}
READ = {
    "gsm8k": [(("a",), None)],
    "mt-bench": [(("a", "b"), "writing")],
    "humaneval": [(("a",), None)],
    "spec-bench": [(("a",), "rag"), (("a", "b"), "mt_bench")],
    "speed-bench": [(("a", "b"), "coding")] * 2,
}


def written(path: Path, rows) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_data_set_is_found_in_a_folder_by_its_name(name, tmp_path):
    file = DATA_SETS[name].files[0]
    path = written(tmp_path / name.replace("-", "_") / file, ROWS[name])
    for data in (tmp_path, path.parent, path):
        source, problems = load_data(name, str(data))
        assert source == f"file {file}"
        assert [(problem.turns, problem.category) for problem in problems] == READ[name]
        assert name != "gsm8k" or problems[0].answer == "#### 1"


@pytest.mark.parametrize("name", [name for name, known in DATA_SETS.items() if known.hub])
def test_a_data_set_is_read_from_the_hub(name, monkeypatch):
    rows = [{"prompt": row["turns"], "category": row["category"]} for row in ROWS[name]] if name == "mt-bench" else None

    def load(*arguments, split):
        assert (arguments, split) == DATA_SETS[name].hub
        return iter(rows or ROWS[name])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    source, problems = load_data(name, "hub")
    assert source.endswith("from the hub")
    assert [(problem.turns, problem.category) for problem in problems] == READ[name]


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("speed-bench", SPEED_ROW | {"turns": [f"{PLACEHOLDER} FROM THE SOURCE"]}, "placeholders; run SPEED-Bench's"),
        ("speed-bench", SPEED_ROW | {"messages": [{"role": "system", "content": "x"}]}, "only user turns are read"),
        *(("speed-bench", SPEED_ROW | {"messages": given}, "'messages' is") for given in ([], "a", 3)),
        ("gsm8k", {"question": "a", "answer": "1"}, r"test\.jsonl:1: no 'answer' with '#### n'"),
        ("humaneval", {"prompt": ["a"]}, "'prompt' is"),
        ("mt-bench", None, "holds no prompt of mt-bench"),
        ("mt-bench", {"category": "rag", "turns": ["a"]}, "has Spec-Bench's category 'rag'; name spec-bench"),
        ("spec-bench", ROWS["mt-bench"][0], "has MT-bench's categories alone; name mt-bench"),
        ("spec-bench", ..., "holds no file of spec-bench; one of spec_bench/question.jsonl"),
        ("gsm8k", ..., r"one of gsm8k/test\.jsonl, gsm8k/gsm8k_test\.jsonl, gsm8k/test_first660\.jsonl, test\.jsonl"),
    ],
)
def test_rows_and_folders_that_are_no_data_set_are_refused(name, row, says, tmp_path):
    if row is not ...:
        written(tmp_path / DATA_SETS[name].files[0], [] if row is None else [row])
    with pytest.raises(SpecDecError, match=says):
        load_data(name, str(tmp_path))


def test_why_the_hub_did_not_answer(monkeypatch):
    def no_network(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    for name, package, says in (
        ("spec-bench", None, "spec-bench is not on the hub"),
        ("gsm8k", None, r"specdec-runtime\[datasets\]"),
        ("gsm8k", SimpleNamespace(load_dataset=no_network), "no route"),
    ):
        monkeypatch.setitem(sys.modules, "datasets", package)
        with pytest.raises(SpecDecError, match=says):
            load_data(name, "hub")


def bench(*words: str):
    return CliRunner().invoke(app, ["bench", *words])


@pytest.mark.usefixtures("shallow_pair", "bundled_once")
@pytest.mark.parametrize("draft", [deep(SpecConfig(4, adaptive=False)), SpecConfig(2, 2, 5, adaptive=False)], ids=str)
def test_a_bench_counts_drafts_as_the_engine_does(draft, tmp_path):
    """Two categories whose prompts take turns in the file: batches are of one, and their figures add up."""
    texts = ["Tom has 3 apples.", "Ann buys 12 pens and sells 5.", "Joe runs 4 km.", "Eva reads 20 pages."]
    rows = [{"category": ("a", "b")[at % 2], "turns": [text]} for at, text in enumerate(texts)]
    written(tmp_path / "question.jsonl", rows)
    words = ["--data", "spec-bench", "--data-folder", str(tmp_path), "--num-draft-tokens", str(draft.num_nodes)]
    words += ["--num-steps", str(draft.num_steps), "--draft-topk", str(draft.topk)]
    words += ["--max-new-tokens", "8", "--fixed-drafts", "--batch-size", "2"]
    result = bench(*words, "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 0, result.output
    report, table = json.loads((tmp_path / "report.json").read_text()), result.stdout
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", spec=draft) as engine:
        prompts = [engine.chat_prompt(text) for text in texts]
        pairs = (prompts[::2], prompts[1::2])
        outputs = [out for pair in pairs for out in engine.generate(pair, SamplingParams(8))]
        stats = engine.stats()
    found = report["speculative_decoding"]
    expected = vllm_figures(stats, draft.depth)
    assert {name: found[name] for name in expected} == expected
    assert found["accepted_per_node"] == sum(stats.accepted_counts) / stats.draft_nodes
    assert stats.draft_nodes >= stats.draft_tokens * (1.5 if draft.topk > 1 else 1)
    lengths = [1 + sum(out.stats.accepted_counts) / out.stats.drafted_rounds for out in outputs]
    assert found["acceptance_length_per_request"] == pytest.approx(sum(lengths) / 4)
    assert {name: one["problems"] for name, one in report["categories"].items()} == {"a": 2, "b": 2}
    times = report["times"]["specdec, tiny-gemma4-mtp"]
    assert times["output_tokens"] == stats.output_tokens == sum(len(out.token_ids) for out in outputs)
    assert 0 < times["tpot_ms"]["p50"] <= times["tpot_ms"]["p99"] and times["ttft_ms"]["mean"] > 0
    assert (report["data"], report["template"]) == ("spec-bench, file question.jsonl", "chat template")
    assert "mean acceptance length" in table and "| a | 2 |" in table and "spec-bench, file question.jsonl" in table
    assert "of all rounds with drafts, by position" in table


@pytest.mark.usefixtures("shallow_pair", "bundled_once")
def test_a_bench_says_which_share_of_a_core_it_had(monkeypatch, tmp_path):
    """A token took 1.6 times as long while other programs ran, and nothing in the report said so."""
    monkeypatch.setattr(timed_comparison, "process_time", lambda: 0.5 * timed_comparison.perf_counter())
    table = bench("--limit", "1", "--max-new-tokens", "8", "--peer", "--json", str(tmp_path / "b.json")).stdout
    assert json.loads((tmp_path / "b.json").read_text())["processor_share"] == pytest.approx(0.5, abs=0.01)
    assert "other programs took the processor: this one had 0.50 of a core" in " ".join(table.split())
    assert "; accuracy 0.0 %, cut off: 1 of 1; identical" in table
    assert "| transformers, plain |" in table and "| transformers, assisted |" in table


def request(tokens: int, first: float, later: float, *rounds: tuple[int, int]) -> RequestStats:
    stats = RequestStats(output_tokens=tokens, first_token_seconds=first, decode_seconds=later)
    for accepted, depth in rounds:
        record_round(stats, accepted + 1, accepted, depth)
        stats.draft_nodes += 2 * depth
    return stats


def test_figures_of_fixed_requests():
    requests = [request(5, 0.5, 1.0, (2, 2), (0, 2)), request(3, 1.5, 1.0, (1, 2)), request(1, 1.0, 0.0)]
    found = acceptance_figures(requests, 2)
    assert found["mean_acceptance_length"] == 2 and found["acceptance_length_per_request"] == 2
    assert found["per_position"] == [2 / 3, 1 / 3] and found["conditional_per_position"] == [2 / 3, 1 / 2]
    assert found["accepted_per_node"] == 3 / 12 and found["draft_acceptance_rate"] == 3 / 6
    times = time_figures(requests, 3.0)
    assert times["tokens_per_second"] == 3 and times["tokens_per_second_per_user"] == 3
    assert times["tpot_ms"]["mean"] == 375 and times["ttft_ms"] == {"mean": 1000, "p50": 1000, "p99": 1490}
    assert time_figures(requests[2:], 1.0)["tpot_ms"] is None


def test_a_bench_has_no_figures_when_an_output_differs():
    def record(index, ours, reference):
        return {"index": index, "runs": {"x": {"token_ids": ours}, bench_run.PLAIN: {"token_ids": reference}}}

    bench_run.require_parity([record(0, [1, 2], [1, 2]), record(1, [3, 4], [3, 4])], "x")
    for output, at in (([3, 5], 1), ([3], 1), ([3, 4, 5], 2), ([5, 4], 0)):
        with pytest.raises(SpecDecError, match=f"prompt 1 differs from plain decoding at token {at} with x"):
            bench_run.require_parity([record(0, [1, 2], [1, 2]), record(1, output, [3, 4])], "x")


# the report of an evaluation, from fixed records


def record(index, speculative, plain, parting=None):
    def run(text, rounds, accepted, seconds):
        tokens = rounds + sum(accepted)
        stats = {"rounds": rounds, "round_tokens": tokens, "accepted_counts": accepted}
        drafted = {"drafted_rounds": rounds, "drafted_round_tokens": tokens, "drafted_counts": [rounds] * len(accepted)}
        stats |= drafted if accepted else {}
        stats["output_tokens"] = 10
        return {"text": text, "token_ids": [], "finish_reason": "stop", "stats": stats, "seconds": seconds}

    runs = {"speculative": run(speculative, 4, [4, 2], 0.5), "plain": run(plain, 9, [], 2.0)}
    return {"index": index, "turn": 0, "parting": parting, "runs": runs}


ANSWERS = ["#### 1", "#### 2", "#### 3", "#### 4"]
RECORDS = [
    record(0, "#### 1", "#### 1"),
    record(1, "it is 2", "#### 2", {"position": 3, "logit_margin": 0.0001}),
    record(2, "#### 3", "#### 4, no, 3", {"position": 0, "logit_margin": 0.5}),
    record(3, "#### 5", "#### 5"),
]
SETTINGS = {"task": "gsm8k", "target": "t", "drafter": "d", "problems": 4, "temperature": 0.0, "stop": []}


@pytest.fixture
def fixed_report():
    return make_report(SETTINGS, ANSWERS, RECORDS, "a machine", [None] * 4)


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
        "speed_up": 4.0,
    }
    assert accuracy_title(fixed_report) == (
        "gsm8k, 4 problems: t, drafter d\nspeed-up 4.00x, acceptance length 2.50, 2 of 4 outputs equal"
    )


def test_counts_of_the_comparison_are_written_in_full(fixed_report):
    fixed_report["comparison"]["strict"] = {"only_speculative": 1234, "only_plain": 0, "mcnemar_p": 0.00012345}
    assert "- strict: only_speculative 1234, only_plain 0, mcnemar_p 0.000123\n" in markdown(fixed_report)


EQUAL = [{**one, "parting": None} for one in RECORDS]
PARTED = [
    {**RECORDS[0], "turn": 1, "parting": {"position": None, "logit_margin": None}},
    {**RECORDS[1], "parting": {"position": 7, "logit_margin": None}},
]
PLAIN = [{**one, "runs": {"plain": one["runs"]["plain"]}} for one in RECORDS]


@pytest.mark.parametrize(
    ("answers", "records", "lines"),
    [
        (
            ANSWERS,
            RECORDS,
            [
                "| speculative | 50.0 % (15.0 to 85.0) | 75.0 % (30.1 to 95.4) | 0 | 2.50 | 1.00, 0.50 | 20.0 |",
                "- equal transcripts: 2 of 4",
                "- problem 1 parts at token 3, logit margin 0.0001",
                "- speed-up: 4.00x (speculative over plain, tokens/s; 2 of 4 outputs differ)",
                "task gsm8k; target t; drafter d; problems 4; temperature 0.0; a machine",
            ],
        ),
        (ANSWERS, PLAIN, ["| plain | 50.0 % (15.0 to 85.0) | 75.0 % (30.1 to 95.4) | 0 | no drafts |  | 5.0 |"]),
        (
            None,
            RECORDS,
            [
                "- no speed-up: 2 of 4 outputs differ from plain decoding",
                "| speculative | 0 | 2.50 | 1.00, 0.50 | withheld |",
            ],
        ),
        (None, EQUAL, ["| speculative | 0 | 2.50 | 1.00, 0.50 | 20.0 |"]),
        (
            None,
            PARTED,
            [
                "- problem 0, turn 2, follows an answer that differs",
                "- problem 1 ends in one run at token 7, and goes on in the other",
            ],
        ),
    ],
    ids=["graded", "one run", "speed of unequal outputs", "speed", "partings"],
)
def test_markdown_says_what_was_found(answers, records, lines):
    """A task that is made for its speed gives none where an output differs."""
    report = make_report(SETTINGS, answers, records, "a machine", [None] * 4)
    assert set(lines) <= set(markdown(report).splitlines())
    assert (report["comparison"] is None) == (records is PLAIN)
    assert report["timing"].get("speed_up") == (
        4.0 if (answers, records) in ((ANSWERS, RECORDS), (None, EQUAL)) else None
    )
    assert ("speed-up" in accuracy_title(report)) == ("speed_up" in report["timing"])


@pytest.mark.parametrize(("rounds", "why"), [(9, "none pays here"), (0, "no answer was long enough for one")])
def test_an_evaluation_without_drafts_gives_no_speed_up(rounds, why):
    """Its categories and its picture gave one, and `none pays here` was the reason in answers of one token too."""
    one, settings = copy.deepcopy(EQUAL[0]), SETTINGS | {"adaptive": True}
    one["runs"]["speculative"]["stats"] = {"rounds": rounds, "output_tokens": 10}
    report = make_report(settings, None, [one], "a machine", ["qa"])
    assert f"- no speed-up, since no drafts were made: {why}" in markdown(report)
    assert "| qa | 1 | no drafts | 20.0 | 5.0 | no drafts |" in markdown(report)
    assert accuracy_title(report).endswith("\nno drafts were made, 1 of 1 outputs equal")


def test_categories_and_turns_have_figures_of_their_own():
    second = {**RECORDS[3], "turn": 1, "parting": None}
    records = [*EQUAL, second]
    report = make_report(SETTINGS, None, records, "a machine", ["qa", "qa", None, "rag"], "not judged")
    assert {name: group["problems"] for name, group in report["categories"].items()} == {"qa": 2, "other": 1, "rag": 1}
    assert {name: group["problems"] for name, group in report["turns"].items()} == {"turn 1": 4, "turn 2": 1}
    assert make_report(SETTINGS, None, EQUAL, "a machine", [None] * 4, "not judged")["categories"] == {}
    text = markdown(report)
    assert "| qa | 2 | 2.50 | 20.0 | 5.0 | 4.00x |" in text
    assert "| turn 2 | 1 | 2.50 | 20.0 | 5.0 | 4.00x |" in text
    assert "gsm8k: not judged." in text
