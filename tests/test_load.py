"""`specdec bench --serve`: the figures on literal answers, and what is asked and found on a server of known laws."""

import asyncio
import json
import os
import random
import re
import signal
import statistics

import numpy as np
import pytest
from typer.testing import CliRunner

from specdec import Engine, EngineConfig, SamplingParams
from specdec.cli.app import app
from specdec.errors import ConfigError, SpecDecError
from specdec.evaluation.load_test.figures import (
    Counted,
    Gap,
    Spread,
    counted,
    quantile,
    spreads,
    time_per_token,
    token_gaps,
    tokens_of_chunks,
)
from specdec.evaluation.load_test.load import run_load
from specdec.evaluation.load_test.load_client import Answer, Asking, Chunk, Client, Fault, error_message
from specdec.evaluation.load_test.load_report import make_report, markdown_tables
from specdec.evaluation.load_test.pace import Pace
from specdec.evaluation.load_test.sse import events
from specdec.evaluation.load_test.started_server import Acceptance, Server, read_acceptance
from specdec.models.bundled import HELD_OUT_PROBLEMS
from specdec.progress import Interrupted
from specdec.text.prompt_files import Problem, read_prompts

from openai_stand_in import CUT, answer, chunk, event, head, stand_in, usage
from served_engine import served

PIECES = [("Tom ", 1), ("has 36-7 = ", 4), ("29.", 2)]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def came(*chunks, sent=0.0, tokens=None, ended=None, due=0.0):
    """An answer of chunks (when, characters, tokens so far)."""
    made = [Chunk(*each) for each in chunks]
    return Answer(due, sent, ended if ended is not None else made[-1].at, made, 7, tokens, "stop")


def prompts(count):
    return [Problem((f"question {i}",)) for i in range(count)]


def run(server, count=4, *, asking=None, pace=None, key=None):
    asked = Asking(url=server.url, **{"model": "m", "max_new_tokens": 16, **(asking or {})})
    return run_load(Server(server.url, key), asked, pace or Pace(), prompts(count))


# figures


def test_a_chunk_of_three_tokens_is_three_gaps():
    told = came((1.0, 4, 1), (1.6, 9, 4), (2.0, 3, 5), tokens=5)
    assert token_gaps(told) == [Gap(pytest.approx(0.2), 3), Gap(pytest.approx(0.4), 1)]
    assert time_per_token(told) == pytest.approx(1.0 / 4)
    times = Spread.of(token_gaps(told))
    assert (times.median, times.p90, times.max) == tuple(pytest.approx(ms) for ms in (200, 400, 400))
    assert times.mean == pytest.approx(250)


def test_tokens_told_at_the_end_are_shared_out_by_characters_behind_the_first():
    told = came((1.0, 50, None), (1.6, 9, None), (2.0, 3, None), tokens=5)
    assert counted(told) is Counted.AT_THE_END
    assert tokens_of_chunks(told) == [1, 3, 1]
    assert time_per_token(told) == pytest.approx(1.0 / 4)
    assert tokens_of_chunks(came((1.0, 0, None), (2.0, 0, None), (2.0, 0, None), tokens=5)) == [1, 2, 2]


def test_without_usage_chunks_are_tokens_and_the_report_says_so():
    told = came((1.0, 4, None), (1.6, 9, None), (2.0, 3, None))
    assert tokens_of_chunks(told) == [1, 1, 1]
    report = make_report(Asking(url="u", model="m", max_new_tokens=3), Pace(), [told], None)
    assert (report.output_tokens, report.counted) == (3, Counted.CHUNKS.value)
    assert "no usage: chunks counted as tokens" in markdown_tables(report)


@pytest.mark.parametrize("tokens", [0, 1])
def test_answers_of_one_token_or_none_have_no_time_between_tokens(tokens):
    told = came(*[(2.0, 3, None)][:tokens], sent=1.0, tokens=tokens, ended=4.0)
    assert token_gaps(told) == [] and time_per_token(told) is None
    found = spreads([told], scheduled=False)
    assert found.keys() == {"time to first token", "end to end"} if tokens else {"end to end"}
    assert found["end to end"].median == 3000


def test_time_of_a_chunk_without_tokens_goes_to_the_next_one():
    told = came((1.0, 4, 2), (1.5, 2, 2), (2.0, 3, 4), tokens=4)
    assert token_gaps(told) == [Gap(0.5, 2)]


@pytest.mark.parametrize("known", list(Counted), ids=lambda known: known.name)
def test_gaps_of_an_answer_sum_up_to_the_time_between_its_first_and_last_chunk(known):
    draw = random.Random(3)
    for _ in range(50):
        at, tokens, chunks = 1.0, 0, []
        for _ in range(draw.randint(2, 9)):
            at, tokens = at + draw.random(), tokens + draw.randint(1, 5)
            chunks.append((at, draw.randint(1, 9), tokens if known is Counted.EVERY_CHUNK else None))
        told = came(*chunks, tokens=None if known is Counted.CHUNKS else tokens)
        assert counted(told) is known
        gaps = token_gaps(told)
        assert sum(gap.seconds * gap.tokens for gap in gaps) == pytest.approx(chunks[-1][0] - chunks[0][0])
        first = tokens_of_chunks(told)[0]
        assert sum(gap.tokens for gap in gaps) == pytest.approx(
            len(chunks) - 1 if known is Counted.CHUNKS else tokens - first
        )


def test_quantiles_are_those_of_every_token_written_out():
    draw = random.Random(1)
    for _ in range(100):
        ranked = sorted(Gap(draw.random(), draw.randint(1, 6)) for _ in range(draw.randint(1, 12)))
        every = [gap.seconds for gap in ranked for _ in range(int(gap.tokens))]
        for share in (0.0, 0.5, 0.9, 0.99, 1.0):
            assert quantile(ranked, share) == np.quantile(every, share, method="inverted_cdf")


def test_a_report_counts_whole_answers_only_and_failures_by_kind():
    whole = came((1.0, 4, 1), (2.0, 4, 5), sent=0.5, tokens=5, ended=2.5)
    broken = [came((1.0, 4, 1), sent=0.0, tokens=1, ended=4.0) for _ in range(3)]
    for told, kind in zip(broken, ("timeout", "HTTP 500", "timeout"), strict=True):
        told.fault = Fault(kind, f"the first of {kind} | said")
    report = make_report(Asking(url="u", model="m", max_new_tokens=5), Pace(), [*broken, whole], None)
    assert (report.requests, report.completed, report.output_tokens, report.seconds) == (4, 1, 5, 4.0)
    assert (report.requests_per_second, report.output_tokens_per_second, report.tokens_per_chunk) == (0.25, 1.25, 2.5)
    assert {kind: failures.count for kind, failures in report.errors.items()} == {"timeout": 2, "HTTP 500": 1}
    assert report.milliseconds["time to first token"].max == 500
    assert "| timeout | 2 | the first of timeout / said |" in markdown_tables(report).splitlines()


# events and pages of text


STREAM = (
    ': a comment\r\n\r\ndata: {"a": "x\u2028y"}\r\n\r\nid: 7\r\ndata:{"b": 1}\n\n\n\ndata: two\ndata: lines\n\n'
    "event: ping\r\r: pong\ndata: [DONE]"
).encode()


async def read_events(blocks):
    async def given():
        for block in blocks:
            yield block

    return [data async for data in events(given())]


def test_events_are_the_same_however_the_bytes_are_cut():
    wanted = ['{"a": "x\u2028y"}'.encode(), b'{"b": 1}', b"two\nlines", b"[DONE]"]
    assert asyncio.run(read_events([STREAM])) == wanted
    assert asyncio.run(read_events([STREAM[i : i + 1] for i in range(len(STREAM))])) == wanted
    for cut in range(len(STREAM)):
        assert asyncio.run(read_events([STREAM[:cut], STREAM[cut:]])) == wanted


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "type": "x"}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"object": "error", "message": "too\\n  long", "code": 400}', "too long"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc": ["body"]}]'),
        (b"<html>\xff Bad gateway</html>", "<html>\ufffd Bad gateway</html>"),
        (b"", ""),
        (b"x" * 300, "x" * 200 + "..."),
    ],
    ids=["openai", "text", "vllm", "fastapi", "html", "empty", "long"],
)
def test_what_a_server_says_of_an_error(body, message):
    assert error_message(body) == message


METRICS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model="a"} 10.0
vllm:spec_decode_num_drafts_total{model="b"} 10.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{model="a"} 30.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 10.0
"""


def test_acceptance_is_the_difference_of_two_readings():
    then = read_acceptance(METRICS)
    assert then == Acceptance(20, 30, {0: 20, 1: 10})
    since = Acceptance(28, 38, {0: 26, 1: 12}).since(then)
    assert (since.length, since.per_position) == (2.0, [0.75, 0.25])
    assert read_acceptance(METRICS.replace("vllm:", "any:")) == then
    for page in ("", "<html>no metrics</html>", "python_gc 1.0", METRICS.replace("position", "place")):
        assert read_acceptance(page) is None


def test_arrivals_are_those_of_a_poisson_process_and_of_its_seed():
    due = Pace(rate=4.0, seed=5).arrivals(4000)
    assert due == Pace(rate=4.0, seed=5).arrivals(4000) != Pace(rate=4.0, seed=6).arrivals(4000)
    gaps = np.diff(due)
    assert due[0] == 0.0 and (gaps >= 0).all()
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)  # of an exponential law: its mean,
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)  # its deviation,
    assert statistics.median(gaps) == pytest.approx(0.25 * np.log(2), rel=0.1)  # and its median
    assert Pace().arrivals(3) == [0.0] * 3


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"rate": float("nan")}, {"rate": float("inf")}, {"timeout": 0.0}])
def test_a_pace_that_is_none(wrong):
    with pytest.raises(ConfigError, match="positive number"):
        Pace(**wrong)


# against a server


def test_what_is_asked():
    with stand_in(answer(PIECES)) as server:
        run(
            server,
            3,
            asking={"temperature": 0.5, "seed": 7, "body": {"ignore_eos": True}},
            key="secret",
            pace=Pace(concurrency=1),
        )
        run(
            server,
            2,
            asking={"chat": False, "body": {"max_tokens": None, "max_completion_tokens": 9}},
            pace=Pace(concurrency=1),
        )
    warm_up, *chats = server.bodies[:4]
    counting = {"include_usage": True, "continuous_usage_stats": True}
    wanted = {"model": "m", "max_tokens": 16, "temperature": 0.5, "stream": True, "ignore_eos": True}
    assert warm_up == chats[0]
    for i, body in enumerate(chats):
        message = {"role": "user", "content": f"question {i}"}
        assert body == {**wanted, "messages": [message], "seed": 7 + i, "stream_options": counting}
    plain = {"model": "m", "max_completion_tokens": 9, "temperature": 0.0, "stream": True, "stream_options": counting}
    assert server.bodies[5:] == [{**plain, "prompt": f"question {i}"} for i in range(2)]
    asked = [
        headers.get("authorization")
        for headers, path in zip(server.headers, server.paths, strict=True)
        if "comp" in path
    ]
    assert asked == ["Bearer secret"] * 4 + [None] * 3


@pytest.mark.parametrize(
    ("counts", "known"), [("asked", Counted.EVERY_CHUNK), ("end", Counted.AT_THE_END), ("never", Counted.CHUNKS)]
)
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
def test_tokens_are_counted_as_well_as_the_server_can(counts, known, chat):
    with stand_in(answer(PIECES, counts=counts)) as server:
        report = run(server, 5, asking={"chat": chat})
    assert report.counted == known.value
    assert (report.completed, report.errors) == (5, {})
    assert report.output_tokens == 5 * (3 if known is Counted.CHUNKS else 7)
    assert report.prompt_tokens == (None if known is Counted.CHUNKS else 35)
    assert {each["chunks"] for each in report.each} == {3}


def test_times_are_no_shorter_than_the_servers_pauses():
    with stand_in(answer(PIECES, wait=0.03)) as server:
        report = run(server, 3)
    assert report.milliseconds["time to first token"].median >= 30
    assert report.milliseconds["end to end"].median >= 90  # a busy machine may see the parts closer together
    first, end = (report.milliseconds[name].mean for name in ("time to first token", "end to end"))
    assert report.milliseconds["time between tokens"].mean <= (end - first) / 6


@pytest.mark.parametrize(
    ("pace", "most"), [(Pace(), 8), (Pace(concurrency=3), 3), (Pace(rate=1e6), 20), (Pace(rate=1e6, concurrency=2), 2)]
)
def test_so_many_requests_are_under_way_at_most(pace, most):
    with stand_in(answer(PIECES, wait=0.05), together=most) as server:
        report = run(server, 20, pace=pace)
    assert server.most == most
    assert ("sent behind schedule" in report.milliseconds) == (pace.rate is not None)
    if most == 2:  # ten turns of three pauses each
        assert report.milliseconds["sent behind schedule"].max >= 9 * 150


def test_how_many_are_under_way_does_not_depend_on_how_quickly_they_are_sent(monkeypatch):
    """On a busy machine the first of eight had been answered before the eighth was sent, and seven were counted."""
    ask = Client.ask

    async def late(client, number, text, due=None):
        await asyncio.sleep(0.05 * number)
        return await ask(client, number, text, due)

    monkeypatch.setattr(Client, "ask", late)
    test_so_many_requests_are_under_way_at_most(Pace(concurrency=8), 8)


def test_requests_arrive_when_they_are_due():
    pace = Pace(rate=40.0, seed=2)
    with stand_in(answer(PIECES)) as server:
        report = run(server, 12, pace=pace)
    sent = sorted(each["sent"] for each in report.each)
    assert all(at >= due - 1e-3 for at, due in zip(sent, pace.arrivals(12), strict=True))


FAULTS = {
    "HTTP 500": ("broken", lambda: [head(500, "application/json"), b'{"error": {"message": "it is broken"}}']),
    "HTTP 429": ("try later", lambda: [head(429, "text/plain"), b"try later"]),
    "error in the stream": (
        "out of slots",
        lambda: [head(), chunk("T"), event({"error": {"message": "out of slots"}})],
    ),
    "connection closed": ("", lambda: [head(), chunk("T"), CUT]),
    "ended early": ("after 1 chunks", lambda: [head(), chunk("T")]),
    "malformed event": ("not JSON", lambda: [head(), chunk("T"), event(b'{"choices": [')]),
    "no stream": ("application/json", lambda: [head(200, "application/json"), b'{"choices": []}']),
    "timeout": ("ReadTimeout", lambda: [head(), chunk("T"), 1.0]),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_are_counted_by_kind_and_the_others_go_on(kind):
    says, script = FAULTS[kind]
    good = answer(PIECES)

    def every_third(body):
        return script() if body["messages"][0]["content"] in ("question 1", "question 4") else good(body)

    with stand_in(every_third) as server:
        report = run(server, 6, pace=Pace(timeout=0.3, concurrency=2))
    assert {kind: failures.count for kind, failures in report.errors.items()} == {kind: 2}
    assert says in report.errors[kind].example
    assert (report.requests, report.completed, report.output_tokens) == (6, 4, 28)


@pytest.mark.parametrize(
    "broken",
    [b"[]", b"3", b'{"usage": 3}', b'{"choices": 3}', b'{"choices": [3]}', b"[" * 5000, b'{"error": "x"}', b"\xff"],
)
def test_events_that_are_no_chunks_end_the_answer(broken):
    with (
        stand_in(lambda body: [head(), event(broken)]) as server,
        pytest.raises(SpecDecError, match="none of 2 requests"),
    ):
        run(server, 2)


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": None},
        {"choices": [{"delta": None, "text": None}]},
        {"choices": [{"delta": {"content": 3, "tool_calls": [None, {"function": None}]}}], "usage": None},
        {"choices": [{"delta": {}}], "usage": {"completion_tokens": "3"}},
        {},
    ],
    ids=str,
)
def test_odd_chunks_are_passed_over(odd):
    with stand_in(lambda body: [head(), event(odd), chunk("T"), chunk(None, finish="stop"), usage(1)]) as server:
        report = run(server, 2)
    assert (report.completed, report.output_tokens) == (2, 2)


def test_tool_calls_and_thoughts_are_tokens_too():
    call = {"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    chunks = [event({"choices": [{"delta": delta}]}) for delta in ({"reasoning_content": "Hm"}, call)]
    with stand_in(lambda body: [head(), *chunks, chunk(None, finish="tool_calls"), usage(6)]) as server:
        report = run(server, 1)
    assert (report.each[0]["chunks"], report.output_tokens) == (2, 6)


def test_acceptance_is_that_of_the_measured_requests():
    def metrics():
        return METRICS.replace("10.0", f"{10 + 2 * len(server.bodies)}.0").replace(
            "30.0", f"{30 + 3 * len(server.bodies)}.0"
        )

    with stand_in(answer(PIECES), metrics) as server:
        report = run(server, 4)
    assert report.acceptance_length == 1 + 12 / 16  # of 4 requests, without the first
    assert "acceptance length 1.75" in markdown_tables(report)


def test_a_server_without_counters_has_no_acceptance():
    with stand_in(answer(PIECES)) as server:
        assert run(server, 1).acceptance_length is None


@pytest.mark.slow
def test_a_server_of_ours_says_what_every_chunk_brought_and_what_was_accepted():
    problems = read_prompts(HELD_OUT_PROBLEMS, 6)
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", config=EngineConfig(max_batch_size=4)) as engine:
        with served(engine) as (url, _, _):
            asked = Asking(url=url, model="tiny-gemma4", max_new_tokens=24)
            report = run_load(Server(url), asked, Pace(concurrency=3), problems)
        outputs = engine.generate([engine.chat_prompt(problem.text) for problem in problems], SamplingParams(24))
    assert (report.completed, report.counted) == (6, Counted.EVERY_CHUNK.value)
    assert report.output_tokens == sum(len(output.token_ids) for output in outputs)
    assert report.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
    drafted = sum(output.stats.round_tokens for output in outputs) / sum(output.stats.rounds for output in outputs)
    assert report.acceptance_length == pytest.approx(drafted, rel=0.1)  # the last drafts of an answer may be cut off
    assert report.tokens_per_chunk > 2


def test_nothing_answered_is_one_sentence():
    script = FAULTS["HTTP 500"][1]
    with stand_in(lambda body: script()) as server, pytest.raises(SpecDecError) as refused:
        run(server, 3)
    assert str(refused.value) == (
        f"{server.url}/v1/chat/completions: none of 3 requests was answered; 3 times HTTP 500: it is broken"
    )


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_of_everything_is_said_at_once(status):
    answers = [head(status, "application/json"), b'{"error": {"message": "no"}}']
    with stand_in(lambda body: answers) as server, pytest.raises(SpecDecError, match=f"HTTP {status}: no"):
        run(server, 50)
    assert len(server.bodies) == 1


def test_ctrl_c_reports_what_had_ended(monkeypatch):
    """Some answers are whole, two never end; Ctrl-C comes when these are all that is left."""
    good = answer(PIECES)

    def script(body):
        number = int(body["messages"][0]["content"].split()[1])
        if number < 5 or len(server.bodies) == 1:
            yield from good(body)
            return
        yield head()
        if number == 6:
            yield 0.2
            os.kill(os.getpid(), signal.SIGINT)
        yield 60.0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    try:
        with stand_in(script) as server, pytest.raises(Interrupted, match="5 of 7 requests had ended") as stop:
            run(server, 7)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (stop.value.report.completed, stop.value.report.output_tokens) == (5, 35)


# from the shell


def shell(*args):
    return CliRunner().invoke(app, ["bench", *args])


def test_tables_and_json_from_the_shell(tmp_path):
    path = tmp_path / "report.json"
    with stand_in(answer(PIECES)) as server:
        result = shell(
            "--serve",
            f"{server.url}/v1/",
            "--limit",
            "3",
            "--json",
            str(path),
            "--max-new-tokens",
            "9",
            "--rate",
            "1000",
        )
        alone = shell("--serve", server.url, "--limit", "2", "--json", "-", "--raw", "--model", "other")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("| milliseconds | mean | median | p90 | p99 | most |\n")
    for name in ("time to first token", "time between tokens", "end to end", "sent behind schedule"):
        assert re.search(rf"^\| {name} \|( [\d.]+ \|){{5}}$", result.stdout, re.MULTILINE)
    assert f"stand-in at {server.url} (chat), 1000 requests/s, any number at a time" in result.stdout
    assert "3 of 3 requests answered" in result.stdout
    report = json.loads(path.read_text())
    assert (report["model"], report["max_new_tokens"], report["output_tokens"]) == ("stand-in", 9, 21)
    assert len(report["each"]) == 3
    assert json.loads(alone.stdout)["model"] == "other" and json.loads(alone.stdout)["endpoint"] == "completions"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--serve", "http://h", "--target", "tiny-gemma4"], "--target is for an engine, not for a server"),
        (["--serve", "http://h", "--peer", "--batch-size", "1"], "--batch-size, --peer is for an engine"),
        (["--serve", "http://h", "--shape", "llama-8b"], "--shape is for an engine"),
        (["--rate", "3"], "--rate is for a server; name one with --serve"),
        (["--shape", "llama-8b", "--concurrency", "2", "--timeout", "300"], "--concurrency, --timeout is for a server"),
        (["--serve", "localhost:8000"], "serve='localhost:8000': an address such as"),
        (["--serve", "http://h", "--body", "[1]"], "--body is '[1]'; a JSON object is expected"),
        (["--serve", "http://h", "--body", "{"], "--body is '{'; a JSON object is expected"),
        (["--serve", "http://h", "--rate", "-1"], "rate=-1.0: a positive number"),
        (["--serve", "http://h", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--serve", "http://h", "--api-key", "a\nb"], "API key has characters"),
        (["--serve", "http://h", "--data", "missing.jsonl"], "missing.jsonl"),
        (["--serve", "http://127.0.0.1:1"], "http://127.0.0.1:1/v1/models cannot be asked"),
        (["--serve", "http://127.0.0.1:1", "--model", "m"], "completions: cannot connect"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_sentence(args, says):
    result = shell(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("specdec: ") and result.stderr.count("\n") == 1
    assert says in result.stderr


def test_without_httpx_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("specdec.evaluation.load_test.started_server.find_spec", lambda name: None)
    assert shell("--serve", "http://h").stderr == "specdec: --serve needs httpx: pip install 'specdec-runtime[serve]'\n"
