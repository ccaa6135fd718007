"""The command line, on the bundled pair: what it prints, as text and as JSON, and how it says no."""

import json

import pytest
from typer.testing import CliRunner

from specdec import Engine
from specdec.cli import app, coloured

QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?"


def run(*args):
    return CliRunner().invoke(app, list(args))


@pytest.fixture(scope="module")
def answer():
    result = run("generate", QUESTION, "--json", "--max-new-tokens", "48")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_holds_text_tokens_and_statistics(answer):
    assert answer["prompt"] == QUESTION
    assert answer["text"] and answer["token_ids"]
    assert answer["finish_reason"] in ("stop", "length")
    assert len(answer["drafted"]) == len(answer["token_ids"])
    assert answer["stats"]["acceptance_length"] > 1
    assert len(answer["stats"]["accepted_per_position"]) == 4


def test_plain_text_is_the_same_text(answer):
    result = run("generate", QUESTION, "--max-new-tokens", "48")
    assert result.stdout.strip() == answer["text"].strip()
    assert "acceptance length" in result.stderr


def test_without_a_drafter_the_tokens_are_the_same(answer):
    result = run("generate", QUESTION, "--json", "--max-new-tokens", "48", "--drafter", "none")
    plain = json.loads(result.stdout)
    assert plain["token_ids"] == answer["token_ids"]
    assert plain["stats"]["acceptance_length"] == 1
    assert not any(plain["drafted"])


def test_show_drafts_prints_the_whole_text_and_styles_the_accepted_drafts(answer):
    result = run("generate", QUESTION, "--max-new-tokens", "48", "--show-drafts")
    assert answer["text"].strip() in result.stdout
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp") as engine:
        [out] = engine.generate(engine.chat_prompt(QUESTION))
        text = coloured(out, engine.tokenizer)
    assert text.plain == out.text
    styled = sum(span.end - span.start for span in text.spans)
    assert 0 < styled < len(text.plain)


def test_raw_leaves_the_chat_template_out(answer):
    raw = json.loads(run("generate", QUESTION, "--json", "--raw", "--max-new-tokens", "4").stdout)
    assert len(raw["prompt_token_ids"]) < len(answer["prompt_token_ids"])


def test_a_seed_makes_sampling_repeatable_with_and_without_drafts():
    args = ("generate", QUESTION, "--json", "--max-new-tokens", "32", "--temperature", "1.0", "--seed", "7")
    outputs = [json.loads(run(*args, "--drafter", name).stdout)["token_ids"] for name in ("auto", "none", "ngram")]
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("generate", "x", "--target", "no/such/model/here"), "no/such/model/here"),
        (("generate", "x", "--drafter", "./nowhere"), "./nowhere"),
        (("generate", "x", "--temperature", "nan"), "temperature=nan"),
        (("generate", "x", "--max-new-tokens", "0"), "max_new_tokens=0"),
        (("generate", "x", "--max-new-tokens", "999999"), "max_model_len"),
        (("bench", "--data", "missing.jsonl"), "missing.jsonl"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(args, says):
    result = run(*args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("specdec: ")


def test_bench_reports_speed_acceptance_and_accuracy():
    result = run("bench", "--limit", "3", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["prompts"] == 3
    assert set(report["tokens_per_second"]) == {"specdec, no drafter", "specdec, tiny-gemma4-mtp"}
    assert report["acceptance_length"] > 1
    assert report["identical_to_plain"]
    assert 0 <= report["accuracy"] <= 1
