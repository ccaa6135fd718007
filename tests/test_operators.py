"""What an operator needs: fair intake, limits, keys and options from files, probes, a log that never blocks."""

import asyncio
import gc
import json
import logging
import os
import socket
import threading
import time

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from specdec.cli.actions.run_server import by_name, read_key_file
from specdec.cli.app import app as shell
from specdec.cli.app import program
from specdec.errors import ConfigError, QueueFullError
from specdec.serving.fair_pool import CLIENT, FairPool, wait_for
from specdec.serving.http import clients
from specdec.serving.http.clients import ClientLimits, Guard
from specdec.serving.http.middleware import RequestLog
from specdec.serving.logs import JsonFormatter, NonBlockingHandler

from processes import run
from served_engine import until

# intake


def blocked(pool: FairPool, count: int, client: str) -> tuple[threading.Event, list]:
    """`count` jobs of a client, which end when the event is set."""
    go, token = threading.Event(), CLIENT.set(client)
    jobs = [pool.submit(lambda: go.wait(120)) for _ in range(count)]
    CLIENT.reset(token)
    return go, jobs


def test_one_clients_slow_prompts_leave_a_thread_for_others():
    pool = FairPool(4, "test")
    go, jobs = blocked(pool, 20, "slow")
    until(lambda: [job.running() for job in jobs].count(True) >= 3)
    time.sleep(0.2)  # in which another could begin
    assert [job.running() for job in jobs].count(True) == 3
    CLIENT.set("quick")
    assert pool.submit(lambda: 7).result(120) == 7
    go.set()
    assert all(job.result(120) for job in jobs)
    pool.shutdown()


def test_a_job_is_submitted_without_waiting_until_its_thread_runs(monkeypatch):
    later = []
    monkeypatch.setattr("_thread.start_new_thread", lambda *call: later.append(call))
    job = FairPool(2, "test").submit(lambda: 7)
    threading.Thread(None, later[0][0], "later", later[0][1]).start()
    assert job.result(120) == 7


def test_slow_prompts_of_clients_that_have_left_do_not_begin():
    pool = FairPool(2, "test")
    go, jobs = blocked(pool, 6, "slow")
    assert [job.cancel() for job in jobs] == [False] + [True] * 5 and not pool._queues  # their prompts are dropped
    CLIENT.set("slow")
    last = pool.submit(lambda: 7)
    assert not last.running()  # the one that has begun counts until it ends
    go.set()
    assert last.result(120) == 7
    assert [job.cancelled() for job in jobs].count(False) == 1
    pool.shutdown()


def test_a_slow_job_is_refused_and_so_is_one_that_waits_for_it():
    async def scene(pool):
        go, jobs = blocked(pool, 2, "")
        try:
            while not jobs[0].running():
                await asyncio.sleep(0.01)
            with pytest.raises(ConfigError, match=r"takes longer than the 0.2 s"):
                await wait_for(jobs[0], 0.2)
            with pytest.raises(QueueFullError, match="try again later"):
                await wait_for(blocked(pool, 1, "")[1][0], 0.01)
        finally:
            go.set()

    pool = FairPool(2, "test")
    asyncio.run(scene(pool))
    pool.shutdown()


def test_an_error_after_its_client_left_is_no_traceback_in_the_log():
    """Cancelled while a grammar was compiled that was then refused: "Future exception was never retrieved"."""

    async def scene(pool):
        go, said = threading.Event(), []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))

        def fails():
            go.wait(20)
            raise ConfigError("no")

        job = pool.submit(fails)
        waiting = asyncio.create_task(wait_for(job))
        while not job.running():
            await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.wait({waiting})
        go.set()
        while not job.done():
            await asyncio.sleep(0.001)
        del waiting, job
        await asyncio.sleep(0.01)
        gc.collect()
        return said

    pool = FairPool(2, "test")
    assert asyncio.run(scene(pool)) == []
    pool.shutdown()


# limits of a client


async def answer(scope, receive, send):
    """Says whose share of intake the request is taken from."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": CLIENT.get().encode()})


def guarded(root_path: str = "", **limits: int) -> TestClient:
    app = Guard(answer, {"key-1": "k-1", "web": "k-2"}, ClientLimits(**limits))
    return TestClient(RequestLog(app), root_path=root_path)


def ask(client: TestClient, key: str):
    return client.post("/v1/completions", headers={"Authorization": f"Bearer {key}"})


def test_a_key_that_asks_more_than_its_rate_gets_429_with_retry_after_and_others_do_not():
    client = guarded(per_minute=3)
    assert [ask(client, "k-1").status_code for _ in range(5)] == [200, 200, 200, 429, 429]
    refused = ask(client, "k-1")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded" and 1 <= int(refused.headers["retry-after"]) <= 20
    assert client.post("/v1/completions", headers={"Authorization": "bearer  k-2"}).status_code == 200


def test_requests_of_a_minute_come_back_one_by_one():
    limits = ClientLimits(per_minute=2)
    taken = [at for at in (0, 0, 29, 30, 31, 600, 600, 600) if limits.refusal("a", at) is None]
    assert taken == [0, 0, 30, 600, 600]  # no more than a minute's are saved up
    for limits in (ClientLimits(per_minute=rate) for rate in range(1, 100)):  # whatever 60 / rate is rounded to
        assert not any(limits.take("a", 1e5 + 0.1) for _ in range(limits.per_minute))
        assert int(limits.refusal("a", 1e5 + 0.1).headers["Retry-After"]) > 60 / limits.per_minute - 1e-3


def test_clients_that_sent_nothing_in_the_last_minute_are_forgotten(monkeypatch):
    monkeypatch.setattr(clients, "MAX_REMEMBERED", 10)
    rate = ClientLimits(per_minute=2)
    assert not any(rate.take(f"client {number}", 10.0 * number) for number in range(99))
    assert len(rate._spent_until) == 3
    assert [rate.take("client 97", 981.0) for _ in range(2)] == [0, pytest.approx(19.0)]


def test_refusals_of_a_client_over_its_limits_are_one_line_of_the_log(caplog):
    """Four clients that asked for 40 streams at once, over and over, got 400 refusals a second, and a line for each."""
    client = guarded(per_minute=1)
    with caplog.at_level(logging.INFO, "specdec.serving"):
        assert [ask(client, "k-1").status_code for _ in range(9)] == [200] + [429] * 8
    access, refusals = (record.getMessage() for record in caplog.records)
    assert " 200 in " in access and refusals == "refused (429) 1 request of key-1: it exceeds its own limits"


def test_a_key_has_no_more_open_requests_than_its_limit(caplog):
    limits = ClientLimits(at_a_time=1)
    limits.open["a"] = 1
    assert [limits.refusal("a", at).status for at in (0, 1, 20)] == [429] * 3 and limits.refusal("b", 20) is None
    assert [record.args[0] for record in caplog.records] == ["1 request", "2 requests"]  # since the last line


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/responses", "/llm/tokenize", "/other/v1/responses"])
def test_limits_of_a_key_count_the_paths_that_need_it_and_no_others(path):
    """Only /v1/ was counted: any number of long texts could be tokenised."""
    client = guarded(per_minute=1, root_path="/llm")
    for method, second in (("GET", 200), ("POST", 200 if "other" in path else 429)):
        asked = [client.request(method, path, headers={"Authorization": "Bearer k-1"}).status_code for _ in range(2)]
        assert asked == [200, second]
    assert guarded(root_path="/v").post("/v1/completions").status_code == 401  # it is not below /v/


# keys


def test_keys_come_from_a_file_with_names_and_comments(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# who  key\nresearch sk-1\n\nweb\tsk#2  # of the page\nsk-3\n")
    assert read_key_file(path) == {"research": "sk-1", "web": "sk#2", "line-5": "sk-3"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a b c", "3 words"),
        ("a k\na l", "the name 'a'"),
        ("a k\nb k", "already, under"),
        ("# no", "no key"),
        ("ä", "ASCII"),
    ],
)
def test_a_file_of_keys_that_is_none_is_refused_without_showing_a_key(text, said, tmp_path):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_key_file(path)


# options


def parsed(arguments: list[str], env: dict[str, str] | None = None) -> dict:
    """What the options of serve come out as."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        command = program.commands["serve"]
        return command.make_context("serve", arguments, **command.context_settings).params


@pytest.mark.parametrize("kind", ["yaml", "toml"])
def test_options_come_from_the_shell_then_the_environment_then_the_file_then_the_default(kind, tmp_path):
    path = tmp_path / f"serve.{kind}"
    yaml = "max-waiting: 1\nport: 1\nbatch_size: 1\nserved-model-name: [a, b]\ndeterministic: true\nnum-steps: 2\n"
    path.write_text(yaml if kind == "yaml" else yaml.replace(": ", " = ").replace("[a, b]", '["a", "b"]'))
    env = {"SPECDEC_SERVE_PORT": "2", "SPECDEC_SERVE_BATCH_SIZE": "2", "SPECDEC_SERVE_STOP_SECONDS": "3"}
    found = parsed(["--config", str(path), "--batch-size", "3"], env)
    assert (found["max_waiting"], found["port"], found["batch_size"], found["stop_seconds"]) == (1, 2, 3, 3.0)
    assert found["served_model_name"] == ["a", "b"] and found["deterministic"] is True and found["num_steps"] == 2
    assert found["host"] == "127.0.0.1"
    assert parsed([], env | {"SPECDEC_SERVE_CONFIG": str(path)})["max_waiting"] == 1


LATIN = "it is not UTF-8 text"


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--config", "max-wating: 1", "'max-wating' is not an option"),
        ("--config", "port: true", "an integer is expected"),
        ("--config", "port: '8000'", "an integer is expected"),
        ("--config", "deterministic: 1", "true or false is expected"),
        ("--config", "host: 1", "a text is expected"),
        ("--config", "- a", "holds no table"),
        ("--config", "a: [", "cannot be read"),
        ("--config", "port: 1\nPORT: 2", "'PORT' is not an option"),
        ("--config", "max-waiting: 1\nmax_waiting: 2", "is there twice"),
        ("--config", "a: " + "[" * 600 + "]" * 600, "cannot be read: it is nested too deep"),
        ("--config", "# f\xfcr", LATIN),
        ("--chat-template", "# f\xfcr", LATIN),
        ("--api-key-file", "# f\xfcr", LATIN),
        # TOML was a RecursionError with its traceback
        pytest.param("--config", "a = " + "[" * 1500 + "]" * 1500, "cannot be read: it is nested too deep", id="toml"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_with_a_mistake_is_one_sentence_with_its_name(option, text, said, tmp_path):
    """Before any port is taken: the command needed a free one to say so of a template."""
    path = tmp_path / ("serve.toml" if " = " in text else "serve.yaml")
    path.write_bytes(text.encode("latin-1"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = ["--port", str(taken.getsockname()[1])]
        run = CliRunner().invoke(shell, ["serve", "--target", "/not/there", *port, option, str(path)])
    assert run.exit_code == 2 and said in run.stderr and run.stderr.count("\n") == 1
    assert path.name in run.stderr


def test_a_variable_that_is_no_option_or_empty_is_refused_by_name_and_kubernetes_links_are_not():
    run = CliRunner().invoke(shell, ["serve"], env={"SPECDEC_SERVE_PROT": "1"})
    assert run.exit_code == 2 and "SPECDEC_SERVE_PROT is not an option" in run.stderr
    run = CliRunner().invoke(shell, ["serve", "--target", "/not/there"], env={"SPECDEC_API_KEY": ""})
    assert run.exit_code == 2 and "SPECDEC_API_KEY is set, but empty" in run.stderr
    assert parsed([], {"SPECDEC_SERVE_SERVICE_HOST": "10.0.0.1", "SPECDEC_SERVE_PORT_80_TCP": "x"})["port"] == 8000


# the log


def test_a_log_drops_lines_rather_than_waiting_for_its_reader_and_says_how_many():
    reader, writer = os.pipe()
    handler = NonBlockingHandler(writer)
    for _ in range(100):
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "y" * 100_000, (), None))
    assert handler.dropped > 40
    text = b""
    while b"lines of this log were dropped" not in text:
        text += os.read(reader, 1 << 20)
    handler.close()
    os.close(reader)
    os.close(writer)


def test_every_key_is_accepted_under_its_own_name():
    """A key of the file that was called key-1 took the place of the first --api-key, which was let in no more."""
    client = TestClient(RequestLog(Guard(answer, by_name(list("abc"), {"key-1": "c"}), ClientLimits(at_a_time=1))))
    asked = [ask(client, key) for key in "abcd"]
    assert [each.text for each in asked[:3]] == ["key-2", "key-3", "key-1"] and asked[3].status_code == 401
    named = {"key-1": "c", "key-3": "d"}
    assert by_name(list("abc"), named) == named | {"key-2": "a", "key-4": "b"}


def test_the_access_log_is_json_with_the_request_id_and_the_keys_name(caplog):
    client = guarded()
    with caplog.at_level(logging.INFO, "specdec.serving"):
        client.post("/v1/x", headers={"Authorization": "Bearer k-2", "X-Request-Id": "id-7"})
    line = json.loads(JsonFormatter().format(caplog.records[-1]))
    assert (line["request_id"], line["client"], line["status"], line["method"]) == ("id-7", "web", 200, "POST")
    assert line["path"] == "/v1/x" and "k-2" not in json.dumps(line)


# probes, and an engine that has died

DIES = """
import os, signal, threading, time
import httpx
from specdec import Engine, EngineConfig
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http import probes
from specdec.serving.server import listen, run_app, address
from specdec.serving.server_settings import ServeSettings

probes.PROBE_SECONDS = 0.1
probes.MAX_FAILED = 2
class Broken(BaseException): pass

hold = threading.Event()
config = EngineConfig(max_batch_size=1, max_model_len=64)
whole = Engine.from_pretrained("tiny-gemma4", None, config=config)
settings = ServeSettings(model_names=["m"], liveness_seconds=0.3, stop_seconds=0.2)

def serve(how):
    engine = Engine(whole.target, tokenizer=whole.tokenizer, config=config)
    def step():
        if how == "dies":
            raise Broken("gone")
        if how == "fails":
            raise RuntimeError("CUDA error")
        hold.wait(300)
        return []
    def ask():
        fields = {"prompt": "a", "max_tokens": 2}
        try:
            if how == "hangs":
                assert httpx.get(url + "/live").status_code == 200
                options = {"json": fields, "timeout": 300}
                asked = threading.Thread(target=httpx.post, args=(url + "/v1/completions",), kwargs=options)
                asked.daemon = True
                asked.start()
                while httpx.get(url + "/live").status_code == 200:
                    time.sleep(0.05)
                statuses = [httpx.get(url + path).status_code for path in ("/live", "/ready", "/ping", "/health")]
                print(statuses, flush=True)
                hold.set()
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                for _ in range(4):
                    httpx.post(url + "/v1/completions", json=fields, timeout=120)
        except httpx.HTTPError:
            pass
    served = AsyncEngine(engine)
    engine.steps.run = step
    with listen("127.0.0.1", 0) as bound:
        url = address(bound)
        died = run_app(served, settings, bound, lambda: threading.Thread(target=ask, daemon=True).start())
    print(how, died, sep=": ", flush=True)

for how in ("dies", "fails", "hangs"):
    serve(how)
"""


@pytest.mark.usefixtures("shallow_pair")
def test_an_engine_that_dies_or_only_fails_ends_the_process_and_one_that_hangs_is_not_live():
    """`run_app` returns why the process is to end; None where a signal ended it."""
    done = run(["-c", DIES])
    dies, fails, *hangs = done.stdout.splitlines() or [done.stderr[-2000:], ""]
    assert dies == "dies: the engine's thread ended: Broken: gone"
    assert fails.startswith("fails: the engine makes no token any more")
    assert hangs == ["[503, 503, 503, 503]", "hangs: None"], done.stderr[-2000:]


def test_an_open_address_without_a_key_is_a_warning(caplog):
    from specdec.cli.actions.run_server import _warn_of_open_doors
    from specdec.serving.server import listen
    from specdec.serving.server_settings import ServeSettings

    with listen("0.0.0.0", 0) as bound, caplog.at_level(logging.WARNING):
        _warn_of_open_doors(ServeSettings(["m"], api_keys={"a": "k"}, cors_origins=["*"]), bound)
        assert not caplog.records
        _warn_of_open_doors(ServeSettings(["m"], cors_origins=["*"]), bound)
    assert "no API key is set" in caplog.messages[0] and "--cors-origin '*'" in caplog.messages[1]
