"""Data sets by name, and the figures of `specdec bench` that other tools print too, against an engine's own counts."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from specdec import Engine, SamplingParams, SpecConfig, SpecDecError
from specdec.cli.app import app
from specdec.evaluation import timed_comparison
from specdec.evaluation.data_sets import DATA_SETS, PLACEHOLDER, load_data
from specdec.evaluation.timed_comparison import acceptance_figures, time_figures
from specdec.runtime.draft_reports import vllm_figures

from inside import RequestStats, record_round
from marks import deep

SPEED_ROW = {"question_id": "q" * 32, "category": "coding", "sub_category": "x", "source": "s", "multiturn": True}
ROWS = {
    "gsm8k": [{"question": "a", "answer": "#### 1"}],
    "mt-bench": [{"question_id": 81, "category": "writing", "turns": ["a", "b"]}],
    "humaneval": [{"task_id": "HumanEval/0", "prompt": "a", "test": "x"}],
    "spec-bench": [{"category": "rag", "turns": ["a"]}, {"category": "writing", "turns": ["a", "b"]}],
    "speed-bench": [
        SPEED_ROW | {"turns": ["a", "b"]},
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
        ("speed-bench", SPEED_ROW | {"messages": [{"role": "system", "content": "x"}]}, "user turns alone are read"),
        ("gsm8k", {"question": "a", "answer": "1"}, "problem 1 has no 'answer'"),
        ("humaneval", {"prompt": ["a"]}, "'prompt' is"),
        ("mt-bench", None, "holds no prompt of mt-bench"),
        ("spec-bench", ..., "holds no file of spec-bench; one of spec_bench/question.jsonl"),
    ],
)
def test_rows_and_folders_that_are_no_data_set_are_refused(name, row, says, tmp_path):
    if row is not ...:
        written(tmp_path / DATA_SETS[name].files[0], [] if row is None else [row])
    with pytest.raises(SpecDecError, match=says):
        load_data(name, str(tmp_path))


def no_network(*args, **kwargs):
    raise ConnectionError("no route\nto host")


@pytest.mark.parametrize(
    ("name", "package", "says"),
    [
        ("spec-bench", None, "spec-bench is not on the hub"),
        ("gsm8k", None, r"specdec-runtime\[datasets\]"),
        ("gsm8k", SimpleNamespace(load_dataset=no_network), "no route"),
    ],
    ids=["elsewhere", "not installed", "no network"],
)
def test_why_the_hub_did_not_answer(name, package, says, monkeypatch):
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
    assert {name: one["prompts"] for name, one in report["categories"].items()} == {"a": 2, "b": 2}
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--suppose-acceptance", "2"), "--suppose-acceptance belongs to --shape or --phases"),
        (("--data-folder", "."), "--data-folder is for gsm8k"),
    ],
)
def test_what_a_bench_cannot_pin_or_find_is_refused(words, says):
    result = bench(*words)
    assert result.exit_code and says in " ".join(result.output.split()), result.output


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
