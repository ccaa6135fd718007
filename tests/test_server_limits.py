"""`specdec serve` as a process: access, limits on concurrent work, start and stop."""

import asyncio
import ctypes
import functools
import json
import os
import signal
import socket
import sys
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from server_process import STOP_SECONDS, ServerProcess, running_server
from typer.testing import CliRunner

from specdec import Engine
from specdec.cli.app import app
from specdec.errors import ConfigError
from specdec.serving.server_settings import ServeSettings

from served_engine import served, until

KEY = "k-123"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 4}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ENDLESS = CHAT | {"max_tokens": 3000, "ignore_eos": True, "stream": True}
TEMPLATE = """{{ bos_token }}{% if tools %}{{ tools | tojson }}
{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content }}
{% endfor %}"""

pytestmark = pytest.mark.usefixtures("shallow_pair")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = tmp_path_factory.mktemp("templates") / "plain.jinja"
    template.write_text(TEMPLATE)
    options = ["--api-key", KEY, "--batch-size", "1", "--max-waiting", "1", "--max-body-bytes", "20000"]
    options += ["--chat-template", str(template), "--cors-origin", "https://a.example", "--max-model-len", "3500"]
    with running_server(*options, env={"SPECDEC_API_KEY": "from-env"}) as server:
        yield server


def post(server: ServerProcess, body=CHAT, path="chat/completions", headers=None) -> httpx.Response:
    """body: bytes, pieces of bytes, or an object, of which half a surrogate pair is escaped."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"} | (headers or {})
    content = json.dumps(body) if isinstance(body, dict) else body
    return httpx.post(f"{server.url}/v1/{path}", content=content, headers=headers, timeout=60)


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["message"]


@pytest.mark.parametrize("given", ["", "Bearer wrong", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", b"Bearer \xff"])
def test_requests_without_a_valid_key_are_refused(given, server):
    status, code, message = refusal(post(server, headers={"Authorization": given}))
    assert (status, code) == (401, "invalid_api_key") and KEY not in message
    models = httpx.get(server.url + "/v1/models", headers={"Authorization": given})
    assert models.status_code == 401


def test_requests_with_a_valid_key_are_served(server):
    assert post(server).status_code == 200
    assert post(server, headers={"Authorization": "bearer from-env"}).status_code == 200
    assert httpx.get(server.url + "/health").status_code == httpx.get(server.url + "/metrics").status_code == 200
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_large_bodies_are_refused_whether_they_say_how_large_or_not(server):
    large = json.dumps(CHAT | {"user": "x" * 30000}).encode()
    for content in (large, (large[at : at + 1000] for at in range(0, len(large), 1000))):
        assert refusal(post(server, content))[:2] == (413, "body_too_large")
    assert post(server).status_code == 200


@pytest.mark.parametrize(("key", "status", "chunked"), [(KEY, 413, True), ("wrong", 401, False)])
def test_a_client_that_sends_all_before_it_reads_sees_why_it_was_refused(server, key, status, chunked):
    """Six megabytes, more than the system holds for a server that does not read."""
    piece, pieces = b"x" * (1 << 16), 96
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(piece) * pieces}"
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: a", f"Authorization: Bearer {key}", length, "", ""]
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as client:
        client.sendall("\r\n".join(lines).encode())
        for _ in range(pieces):
            client.sendall(b"10000\r\n%s\r\n" % piece if chunked else piece)
        client.sendall(b"0\r\n\r\n" if chunked else b"")
        assert client.recv(100).startswith(b"HTTP/1.1 %d " % status)


def test_no_number_of_tokens_is_named_that_was_not_sent(server):
    """The answer of a prompt that is too long by itself spoke of max_tokens=1, or of the default of completions."""
    unasked = {"messages": [{"role": "user", "content": "7 " * 4000}]}
    completions = [post(server, {"prompt": [5] * n}, "completions") for n in (3500, 3490)]
    for answer in (post(server, unasked), completions[0]):
        status, code, message = refusal(answer)
        assert (status, code) == (400, "context_length_exceeded")
        assert "leaves no room for an answer, with max_model_len=3500; shorten the prompt by" in message
        assert "max_tokens" not in message
    assert completions[1].status_code == 200 and completions[1].json()["usage"]["completion_tokens"] <= 10


def test_requests_beyond_the_queue_limit_get_429_with_retry_after(server):
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
        address = f"{server.url}/v1/chat/completions"
        with (
            client.stream("POST", address, json=ENDLESS) as running,
            client.stream("POST", address, json=ENDLESS) as waits,
        ):
            assert running.status_code == waits.status_code == 200
            answer = post(server)
            status, code, message = refusal(answer)
            assert (status, code, answer.headers["retry-after"]) == (429, "queue_full", "1")
            assert "1 requests run and 1 wait" in message
            with pytest.raises(openai.RateLimitError):
                openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0).completions.create(
                    model="tiny-gemma4", prompt="x"
                )
            assert httpx.get(server.url + "/health").status_code == 200
    assert post(server, CHAT | {"n": 3}).status_code == 400
    until(lambda: post(server).status_code == 200)  # both are gone, with their places, once the server has seen it
    assert [post(server).status_code for _ in range(2)] == [200] * 2


def test_the_chat_template_of_the_option_is_used(server):
    plain = post(server, {"prompt": "[user] hi\n", "max_tokens": 8, "temperature": 0}, "completions").json()
    chat = post(server, CHAT | {"max_tokens": 8}).json()
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]


REFUSED = {
    "unknown": ({"foo": 1}, 400, "foo", "foo is not a field of this server"),
    "unknown-inside": ({"speculation": {"depth": 1}}, 400, "speculation.depth", "is not a field"),
    "range": ({"temperature": -1}, 400, "temperature", "temperature=-1.0: a finite number from 0 is expected"),
    "role": ({"messages": [{"role": "poet", "content": "x"}]}, 400, "messages[0].role", "'user', 'assistant'"),
    "no-content": ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "is missing"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400, "messages[0].content", "a part of type 'image_url'",
    ),
    "model": ({"model": "other"}, 404, "model", "the model 'other' is not served here; this server has tiny-gemma4"),
    "long": ({"max_tokens": 5000}, 400, "messages", "more than max_model_len=3500"),
    "two-limits": ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_completion_tokens", "differ"),
    "top-alone": ({"top_logprobs": 2}, 400, "top_logprobs", "goes with logprobs=true"),
    "many-top": ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "from 0 to 20"),
    "usage-alone": ({"stream_options": {"include_usage": True}}, 400, "stream_options", "goes with stream=true"),
    "stored": ({"store": "yes"}, 400, "store", "store='yes': true or false is expected"),
    "template": ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, "chat_template_kwargs", "runs its own"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "name it with --tool-parser"),
    "no-such-tool": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        400, "tool_choice", "it has weather",
    ),
    "bad-regex": ({"guided_regex": "("}, 400, "guided_regex", "regex cannot be followed"),
    "bad-schema": ({"structured_outputs": {"json": "{"}}, 400, "structured_outputs.json", "is not JSON"),
    "tool-choice": ({"tool_choice": "required"}, 400, "tool_choice", "there are none"),
    "formats": ({"guided_json": {}, "response_format": {"type": "json_object"}}, 400, "response_format", "both given"),
    "deeper": ({"speculation": {"num_steps": 9}}, 400, "speculation", "made for at most 4"),
    "surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None, "read as JSON"),
    "cut": (b'{"model":', 400, None, "read as JSON"),
    "empty": (b"", 400, None, "the body is missing"),
    "list": (b"[1]", 400, None, "object"),
    "bytes": (b"\xff\xfe", 400, None, "read as JSON"),
    "nan": (CHAT | {"temperature": float("nan")}, 400, "temperature", "a finite number from 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_fields_are_refused_in_openais_shape(case, server):
    change, status, param, said = REFUSED[case]
    answer = post(server, CHAT | change if isinstance(change, dict) else change)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (answer.status_code, error["param"]) == (status, param)
    assert said in error["message"] and "\n" not in error["message"]


def test_a_path_that_is_not_served_is_told_where_they_are_listed(server):
    answer = post(server, {"input": "a"}, "embeddings")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "there is nothing at /v1/embeddings; /openapi.json lists what there is"
    listed = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert "/v1/embeddings" not in listed and "/v1/chat/completions" in listed


def test_pages_of_other_origins_may_ask_only_if_they_are_named(server):
    def asked(origin, method="POST"):
        headers = {"Origin": origin, "Access-Control-Request-Method": method}
        return httpx.options(f"{server.url}/v1/responses/resp_1", headers=headers)

    for method in ("GET", "POST", "DELETE"):
        answer = asked("https://a.example", method)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in asked("https://b.example").headers


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/", "https://A.example", "localhost:3000", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin):
    with pytest.raises(ConfigError, match=r"no browser sends this"):
        ServeSettings(model_names=["m"], cors_origins=[origin])
    ServeSettings(model_names=["m"], cors_origins=["*", "null", "http://[::1]:3000", "chrome-extension://abc"])


def takes_no_more(server: ServerProcess) -> bool:
    try:
        httpx.get(server.url + "/health", timeout=60)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it was taken, and dropped
        pass
    return False


def test_a_request_to_a_server_that_is_stopping_is_sent_to_another_one():
    """It was told to make a new engine, which no client can."""
    with Engine.from_pretrained("tiny-gemma4") as engine, served(engine) as (url, running, loop):
        asyncio.run_coroutine_threadsafe(running.close(), loop).result(60)
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["message"] == "the server is stopping; ask another one"


@pytest.mark.deep
def test_a_signal_lets_streams_end_in_time_and_takes_no_more():
    """One of two streams ends by itself, and one is told that it was ended."""
    short = CHAT | {"max_tokens": 25, "ignore_eos": True, "stream": True}
    with running_server("--stop-seconds", "5") as server, httpx.Client(timeout=60) as client:
        begin = functools.partial(client.stream, "POST", f"{server.url}/v1/chat/completions")
        with begin(json=short) as ends, begin(json=ENDLESS) as goes_on:
            server.process.send_signal(signal.SIGTERM)
            until(lambda: takes_no_more(server))
            whole, cut = ([line for line in answer.iter_lines() if line] for answer in (ends, goes_on))
        assert whole[-1] == "data: [DONE]" and '"finish_reason":"length"' in whole[-2]
        assert "the server is stopping" in cut[-1] and json.loads(cut[-1].removeprefix("data: "))["error"]
        assert server.process.wait(STOP_SECONDS) == 0
        assert "Traceback" not in server.log()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once():
    with running_server("--stop-seconds", "3600") as server:
        address = f"{server.url}/v1/chat/completions"
        stream = httpx.Client(timeout=60).send(httpx.Request("POST", address, json=ENDLESS), stream=True)
        server.process.send_signal(signal.SIGINT)
        until(lambda: takes_no_more(server))  # two signals at once are one
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(STOP_SECONDS) == 0  # an hour, if its stream were waited for
        stream.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="signals to a thread of another process")
def test_a_signal_that_another_thread_gets_ends_the_server():
    """The system chooses the thread. The main one waited for the server's without an end, and saw no such signal."""
    with running_server() as server:
        pid = server.process.pid
        other = max(int(each) for each in os.listdir(f"/proc/{pid}/task"))
        assert other != pid and ctypes.CDLL(None).tgkill(pid, other, signal.SIGTERM) == 0
        assert server.process.wait(STOP_SECONDS) == 0


# what the command itself says


def serve(*options: str):
    return CliRunner().invoke(app, ["serve", "--port", "0", *options])


def test_a_port_that_is_taken_is_one_sentence_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = serve("--port", str(taken.getsockname()[1]), "--target", "/not/there")
    assert run.exit_code == 2 and run.stdout == ""
    assert run.stderr.startswith("specdec: 127.0.0.1:") and run.stderr.count("\n") == 1
    assert "cannot be listened on" in run.stderr


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "prometheus_client"])
def test_without_the_extra_one_sentence_says_what_to_install(missing, monkeypatch):
    monkeypatch.delitem(sys.modules, "specdec.cli.actions.run_server", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    run, advice = serve(), "which is not installed; pip install 'specdec-runtime[serve]'\n"
    assert (run.exit_code, run.stderr) == (2, f"specdec: specdec serve needs {missing}, {advice}")
