"""Reports on drafts: by depth, why there are none, when almost none is accepted, even if few are tried; and counts in
answers under the names that tools of vLLM and llama.cpp read."""

import dataclasses
import inspect
import itertools
import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from specdec import Engine, SamplingParams, SpecConfig
from specdec.cli.app import app
from specdec.errors import ConfigError
from specdec.evaluation.bench_run import PLAIN, markdown_table
from specdec.runtime.drafts.draft_policy import DraftPolicy, RoundTimes, draft_ladder
from specdec.runtime.drafts.draft_reports import (
    acceptance_in_words,
    busy_in_words,
    depths_in_words,
    vllm_figures,
    why_slower,
)
from specdec.runtime.engine_stats import DraftWatch, EngineStats
from specdec.runtime.rounds.result import NO_DRAFT
from specdec.serving.application import create_app
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.logs import traffic_line
from specdec.serving.metrics import MetricsCollector, Snapshot
from specdec.serving.openai.text_answer import llama_timings
from specdec.serving.server_settings import ServeSettings

from engine_internals import RequestStats, record_round
from marks import usual_cases
from scripted_drafter import following
from served_engine import bundled_engine

ADAPTIVE = SpecConfig(4, adaptive=True)
CHAINS = {shape.num_steps: shape for shape in draft_ladder(ADAPTIVE, captured=True)}

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")


@pytest.fixture
def right(make_target, make_engine, random_prompt, greedy_oracle, scripted):
    """An engine with adaptive drafts that are always right, and a prompt."""
    model, prompt = make_target("llama"), random_prompt(9)
    drafter = scripted(following([prompt + greedy_oracle(model, prompt, 60)]))
    return make_engine(model, drafter, spec=ADAPTIVE, max_batch_size=1), prompt


def in_turn(engine, *depths):
    """Rounds have chains of these depths in turn."""
    shape_for, turn = engine.steps.shape_for, itertools.cycle(CHAINS[depth] for depth in depths)
    engine.steps.shape_for = lambda *asked: shape_for(*asked)._replace(draft=next(turn))


# by depth


def test_a_depth_that_was_not_drafted_is_not_rejected(right):
    """Chains of 1, nearly always, and of 4: of a drafter that is always right "position 2: 20 %" was said."""
    engine, prompt = right
    in_turn(engine, 1, 1, 4, 0, 1)
    [out] = engine.generate(prompt, SamplingParams(max_new_tokens=45, ignore_eos=True))
    assert out.stats.accepted_per_position == [1.0] * 4
    first, *deeper = out.stats.drafted_counts
    assert first == out.stats.drafted_rounds > 2 * max(deeper) and len(deeper) == 3
    assert sum(out.stats.drafted_counts) == out.stats.draft_tokens
    assert engine.stats().drafted_counts == out.stats.drafted_counts


def test_a_draft_below_the_end_of_an_output_is_not_rejected(make_target, make_engine, random_prompt, scripted):
    """A stop token ends the output within an accepted path: the nodes below it were never judged."""
    model, prompt = make_target("llama"), random_prompt(9)
    [plain] = make_engine(model).generate(prompt, SamplingParams(max_new_tokens=30, ignore_eos=True))
    end = plain.token_ids[7]
    assert end not in plain.token_ids[:7]
    engine = make_engine(model, scripted(following([prompt + plain.token_ids])), num_steps=4)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(end,))
    [out] = engine.generate(prompt, params)
    assert out.token_ids == plain.token_ids[:8] and out.stats.rounds == 2
    assert out.stats.accepted_per_position == [1.0] * 4 and out.stats.drafted_counts == [2, 2, 1, 1]


def test_sums_by_depth_are_of_all_rounds():
    deep, shallow = RequestStats(), RequestStats()
    for accepted in (4, 1, 0):
        record_round(deep, accepted + 1, accepted, 4)
    for accepted in (1, 1, 0, 1):
        record_round(shallow, accepted + 1, accepted, 1)
    total = deep.copy()
    total.add(shallow)
    assert total.accepted_counts == [5, 1, 1, 1] and total.drafted_counts == [7, 3, 3, 3]
    assert total.accepted_per_position == [5 / 7, 1 / 3, 1 / 3, 1 / 3] and total.acceptance_length == 15 / 7
    total.add(deep, sign=-1)
    assert total.accepted_per_position == shallow.accepted_per_position == [3 / 4]  # a warm-up is taken out


# drafts that are hardly ever right, however seldom they are tried


@pytest.mark.parametrize(
    ("rounds", "warned"),
    [
        ([(1, 1, 0)] * 3000, True),  # once
        ([(100, 1, 0)] * 100, True),  # one round of a hundred drafts
        ([(1, 1, 0)] + [(1, 0, 0)] * 8000, True),
        ([(1, 0, 0)] * 8000, True),
        ([(256, 0, 0)] * 500, False),  # under load drafts rest
        ([(256, 0, 0)] * 500 + [(256, 256, 90)], False),
        ([(100, 1, 0)] * 9, False),  # too few to know
        ([(100, 1, 1), (100, 1, 0)] * 50, False),
        ([(1, 1, 1)] * 30 + [(1, 1, 0)] * 970, False),
        ([(1, 1, 1)] * 1000 + [(1, 1, 0)] * 1000, True),  # a good start hides nothing
    ],
)
def test_drafts_are_watched_however_seldom_they_are_tried(rounds, warned, caplog):
    with caplog.at_level(logging.WARNING, logger="specdec"):
        watch = DraftWatch()
        for each in rounds:
            watch.count(*each)
    assert len(caplog.records) == warned
    assert not warned or "Acceptance near zero" in caplog.text


def test_rounds_without_any_draft_are_not_called_drafts_that_were_wrong(caplog):
    """The warning said "of the last 0 drafts, 0 began with a token that was accepted"."""
    watch = DraftWatch()
    for _ in range(8000):
        watch.count(1, 0, 0)
    [said] = caplog.messages
    assert said.startswith("none of the last 8000 rounds had a draft") and "accepted" not in said


def test_adaptive_drafts_that_are_never_right_are_warned_of(make_target, make_engine, random_prompt, scripted, caplog):
    """The warning waited for 1,000 drafts, and drafts were off long before."""
    engine = make_engine(
        make_target("llama"), scripted(lambda known, n: ([95] * n, None)), spec=ADAPTIVE, max_batch_size=32
    )
    in_turn(engine, 4, *[0] * 23)
    with caplog.at_level(logging.WARNING, logger="specdec"):
        engine.generate([random_prompt(9)] * 32, SamplingParams(max_new_tokens=40, ignore_eos=True))
    assert engine.stats().drafted_rounds < 100 and engine.stats().rounds > 1000
    assert len(caplog.records) == 1 and "0 began with a token that was accepted" in caplog.text


# why there are none


def chooser(spec):
    return DraftPolicy(draft_ladder(spec, captured=True), 1)


def taught(draft_seconds, accepted, times=40):
    """A choice of one row that has seen rounds without a draft, of a second, and with a chain of 1."""
    choice, row, one = chooser(SpecConfig(1)), np.zeros(1, dtype=np.int64), np.ones(1, dtype=int)
    choice.times[1] = RoundTimes([1.0, 1.0 + draft_seconds])
    choice.choose(row, one * 9, 1, NO_DRAFT)
    for _ in range(times + 1):
        choice.learn(choice.shapes[1], 1, 1.0 + draft_seconds, (row, one * accepted, one), 0.0)
    choice.account.settle(choice.times[1], 1, -9.0)  # a loss that covers no further draft
    choice.choose(row, one * 9, 1, NO_DRAFT)
    return choice


def test_the_reason_that_drafts_are_off_says_what_was_tried():
    assert taught(0.5, 0).stats().off == "the first token was accepted in 0 of 41 drafts that were tried"


def test_the_reason_that_drafts_are_off_says_what_they_would_bring_and_take():
    off = taught(2.0, 1).stats().off
    assert "a chain of 1 is expected to bring 2.00" in off and "3000.00 ms, no draft 1 in 1000.00 ms" in off
    assert "does not cover" not in off
    assert "does not cover its risk" in taught(0.5, 1).stats().off


def test_an_engine_says_why_without_waiting_for_a_step(right, make_target, make_engine):
    engine, prompt = right
    assert engine.drafts_off == engine.stats().drafts.off == ""
    engine.generate(prompt, SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert engine.drafts_off == engine.stats().drafts.off != ""
    assert make_engine(make_target("llama")).drafts_off == "there is no drafter"


def test_the_log_says_why_there_are_no_drafts():
    none, some = RequestStats(output_tokens=9), RequestStats(output_tokens=9)
    for _ in range(8):
        record_round(none, 1, 0, 0)
    record_round(some, 2, 1, 1)
    some.add(none)
    off = EngineStats(drafts=taught(0.5, 0).stats())
    assert "no drafts (the first token was accepted in 0 of 41" in traffic_line(None, Snapshot(off, none), 1.0)
    assert "1 of 9 rounds had drafts (the first token" in traffic_line(None, Snapshot(off, some), 1.0)
    assert "drafts" not in traffic_line(None, Snapshot(EngineStats(), none), 1.0)


def test_words_of_drafts():
    stats = RequestStats()
    for accepted, depth in ((4, 4), (0, 1), (1, 2)):
        record_round(stats, accepted + 1, accepted, depth)
    assert acceptance_in_words(stats, "why") == "acceptance length 2.67"
    assert depths_in_words(stats.accepted_per_position, stats.drafted_counts) == (
        "0.67 of 3, 0.50 of 2, 1.00 of 1, 1.00 of 1 rounds"
    )
    for _ in range(9):
        record_round(stats, 1, 0, 0)
    assert acceptance_in_words(stats, "why") == "acceptance length 2.67 in the 3 of 12 rounds that drafted (why)"
    assert depths_in_words([0.5, 0.25], [8, 8]) == "0.50, 0.25"
    assert acceptance_in_words(RequestStats(rounds=3), "why") == "no drafts were made: why"


def test_a_speedup_below_one_is_reported_with_its_reason():
    stats = RequestStats(rounds=10, round_tokens=20)
    assert why_slower(1.0, stats, off="why") == ""
    assert why_slower(0.5, stats) == "a round brought 2.00 tokens and took 4.00 times as long as a plain one"
    assert "drafts are off: none pays" in why_slower(0.5, stats, off="none pays")
    assert "this one had 0.30 of a core" in busy_in_words(0.3) and busy_in_words(1.0) == ""


@pytest.fixture
def drafts_never_pay(monkeypatch):
    """Drafts are adaptive, as they are by default outside tests, and no round has one."""
    init = inspect.unwrap(SpecConfig.__init__)
    monkeypatch.setattr(init, "__defaults__", (*init.__defaults__[:-1], True))
    monkeypatch.setattr(DraftPolicy, "choose", lambda choice, *_, **__: choice.shapes[0])


@pytest.mark.usefixtures("drafts_never_pay")
def test_a_bench_without_drafts_says_so():
    """It said "acceptance length 1.00 (by position )", and a speed-up that is noise."""
    result = CliRunner().invoke(app, ["bench", "--limit", "1", "--max-new-tokens", "8"])
    assert result.exit_code == 0, result.output
    assert "no drafts were made: none pays here; `--fixed-drafts` measures the drafter" in result.stdout
    assert "acceptance length" not in result.stdout and "by position" not in result.stdout
    [row] = [line for line in result.stdout.splitlines() if "tiny-gemma4-mtp |" in line]
    assert row.endswith("| no drafts |")


def test_a_bench_says_by_depth_how_many_rounds_drafted_and_why_it_was_slower():
    stats = RequestStats()
    for accepted, depth in ((4, 4), (0, 1)):
        record_round(stats, accepted + 1, accepted, depth)
    report: dict[str, Any] = dict.fromkeys(("accuracy", "speculative_decoding", "processor_share"))
    report |= dict.fromkeys(("target", "hardware", "data", "template", "thinking", "drafts_off"), "")
    report |= {"drafter": "d", "prompts": 1, "batch_size": 1, "temperature": 0.0, "times": {}, "categories": {}}
    report |= {"tokens_per_second": {PLAIN: 10.0, "d": 5.0}, "versions": "versions", "slower": "rounds are long"}
    report |= {"spec": dataclasses.asdict(ADAPTIVE), "stats": dataclasses.asdict(stats)}
    text = markdown_table(report)
    assert "acceptance length 3.00 (by position 0.50 of 2, 1.00 of 1, 1.00 of 1, 1.00 of 1 rounds)" in text
    assert "0.50x" in text and "slower, since rounds are long" in text
    assert "core" not in text and "core" not in markdown_table(report | {"processor_share": 0.97})
    says = "versions; other programs took the processor: this one had 0.62 of a core."
    assert says in markdown_table(report | {"processor_share": 0.62})
    report["stats"] = dataclasses.asdict(RequestStats())
    assert "no drafts were made: no answer was long enough for one" in markdown_table(report)


def test_metrics_count_drafts_by_depth(right):
    engine, prompt = right
    in_turn(engine, 1, 4)
    [out] = engine.generate(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True))
    metrics = MetricsCollector.__new__(MetricsCollector)
    metrics._snapshot, metrics._model_name = Snapshot(engine.stats(), out.stats), "m"
    found = {metric.name: [sample.value for sample in metric.samples] for metric in metrics.collect()}
    assert found["specdec:draft_tokens_per_pos"] == out.stats.drafted_counts
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos"] == out.stats.accepted_counts
    assert out.stats.drafted_counts[0] > out.stats.drafted_counts[1] > 0


# counts in answers, against the engine's own


QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 12}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", CHAT),
    "chat of two": ("chat/completions", CHAT | {"n": 2, "temperature": 1, "seed": 3}),
    "completion": ("completions", {"prompt": [QUESTION, "Ann has"], "temperature": 0, "max_tokens": 12}),
    "response": ("responses", {"input": QUESTION, "temperature": 0, "max_output_tokens": 12}),
}


engine = bundled_engine(max_batch_size=4, max_model_len=256)


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[TestClient]:
    with TestClient(create_app(AsyncEngine(engine), ServeSettings(model_names=["m"]))) as client:
        yield client


def events(text: str) -> list[dict[str, Any]]:
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in found if line != "[DONE]"]


def answered(client: TestClient, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The answer, or the last event of a stream; and the events before it."""
    said = client.post(f"/v1/{path}", json=body)
    assert said.status_code == 200, said.text
    if not body.get("stream"):
        return said.json(), []
    *before, last = events(said.text)
    return last.get("response", last), before


def gained(engine: Engine, before: RequestStats) -> RequestStats:
    now = engine.stats()
    now.add(before, sign=-1)
    return now


@usual_cases("chat-stream1", "chat of two-stream2", "completion-stream0", "response-stream1")
@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("name", ASKED)
def test_answers_and_last_chunks_count_drafts_as_the_engine_does(name, stream, client, engine):
    path, body = ASKED[name]
    if path == "responses":
        stream = {key: value for key, value in stream.items() if key == "stream"}
    begun = engine.stats()
    last, before = answered(client, path, body | stream | {"timings_per_token": True})
    stats = gained(engine, begun)
    assert stats.drafted_rounds and sum(stats.accepted_counts)
    assert last["metrics"] == {"speculative_decoding": vllm_figures(stats, engine.spec.num_steps)}
    assert not any("metrics" in event or "timings" in event for event in before)
    found, expected = last["timings"], llama_timings(stats)
    assert {key for key in found if key.endswith("_n")} < found.keys() == expected.keys()
    assert all(found[key] == expected[key] for key in ("prompt_n", "predicted_n", "draft_n", "draft_n_accepted"))


def test_a_request_that_does_not_speculate_has_no_figures_of_drafts(client):
    last, _ = answered(client, "chat/completions", CHAT | {"speculation": False})
    assert "metrics" not in last and "timings" not in last
    shallow, _ = answered(client, "chat/completions", CHAT | {"speculation": {"num_steps": 2}})
    assert shallow["metrics"]["speculative_decoding"]["num_spec_tokens"] == 2


@pytest.mark.parametrize(
    ("switch", "fields"), [("none", set()), ("vllm", {"metrics"}), ("all", {"metrics", "timings"})]
)
def test_the_server_says_which_figures_answers_have(switch, fields, engine):
    settings = ServeSettings(model_names=["m"], draft_figures=switch)
    with TestClient(create_app(AsyncEngine(engine), settings)) as client:
        for path, body in [*ASKED.values()][: None if switch == "all" else 1]:
            last, _ = answered(client, path, body)
            assert {"metrics", "timings"} & last.keys() == fields
    with pytest.raises(ConfigError, match="draft_figures"):
        ServeSettings(model_names=["m"], draft_figures="sglang")


def test_a_histogram_has_a_place_for_every_length():
    stats = RequestStats(prompt_tokens=9, cached_tokens=4, output_tokens=8, first_token_seconds=0.5, decode_seconds=2)
    for accepted, depth in ((3, 4), (0, 4), (0, 2), (2, 2), (0, 0)):
        record_round(stats, accepted + 1, accepted, depth)
    assert vllm_figures(stats, 4) == {
        "mean_acceptance_length": 1 + 5 / 4,
        "draft_acceptance_rate": 5 / 12,
        "acceptance_histogram": [2, 0, 1, 1, 0],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 12,
        "num_spec_tokens": 4,
    }
    assert vllm_figures(RequestStats(), 3)["acceptance_histogram"] == [0] * 4
    timings = llama_timings(stats)
    assert (timings["cache_n"], timings["prompt_n"], timings["prompt_ms"]) == (4, 5, 500)
    assert (timings["predicted_per_second"], timings["predicted_per_token_ms"]) == (4, 250)
