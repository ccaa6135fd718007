"""`specdec serve` as a process: who is let in, how much is taken at a time, how it starts and how it stops."""

import functools
import json
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest
from server_process import ServerProcess, running_server
from typer.testing import CliRunner

from specdec.cli import app

KEY = "k-123"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 4}
ENDLESS = CHAT | {"max_tokens": 3000, "ignore_eos": True, "stream": True}
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = tmp_path_factory.mktemp("templates") / "plain.jinja"
    template.write_text(TEMPLATE)
    options = ["--api-key", KEY, "--batch-size", "1", "--max-waiting", "1", "--max-body-bytes", "20000"]
    options += ["--chat-template", str(template), "--cors-origin", "https://a.example", "--max-model-len", "3500"]
    with running_server(*options, env={"SPECDEC_API_KEY": "from-env"}) as server:
        yield server


def post(server: ServerProcess, body=CHAT, **options) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"} | options.pop("headers", {})
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60, **options)


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["message"]


@pytest.mark.parametrize("given", ["", "Bearer wrong", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", b"Bearer \xff"])
def test_without_a_right_key_nobody_is_let_in(given, server):
    status, code, message = refusal(post(server, headers={"Authorization": given}))
    assert (status, code) == (401, "invalid_api_key") and KEY not in message
    models = httpx.get(server.url + "/v1/models", headers={"Authorization": given})
    assert models.status_code == 401


def test_with_a_right_key_everybody_is(server):
    assert post(server).status_code == 200
    assert post(server, headers={"Authorization": "bearer from-env"}).status_code == 200
    assert httpx.get(server.url + "/health").status_code == httpx.get(server.url + "/metrics").status_code == 200
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_large_bodies_are_refused_whether_they_say_how_large_or_not(server):
    large = json.dumps(CHAT | {"user": "x" * 30000}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}

    def piecewise():
        for at in range(0, len(large), 1000):
            yield large[at : at + 1000]

    for content in (large, piecewise()):
        answer = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers)
        assert refusal(answer)[:2] == (413, "body_too_large")
    assert post(server).status_code == 200


def test_a_longer_text_than_the_limit_is_refused_with_the_numbers(server):
    status, code, message = refusal(post(server, CHAT | {"max_tokens": 3499}))
    assert (status, code) == (400, "context_length_exceeded")
    assert "max_tokens=3499" in message and "max_model_len=3500" in message


def test_more_than_may_wait_are_refused_with_429_and_when_to_come_again(server):
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
            assert "1 requests wait behind 1 that run" in message
            with pytest.raises(openai.RateLimitError):
                openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0).completions.create(
                    model="tiny-gemma4", prompt="x"
                )
            assert httpx.get(server.url + "/health").status_code == 200
    assert post(server, CHAT | {"n": 3}).status_code == 400
    answers = [post(server) for _ in range(3)]  # both are gone, with their places
    assert [answer.status_code for answer in answers] == [200] * 3


def test_one_that_waits_and_goes_away_leaves_its_place(server):
    """It never has a row, so no round tells of it."""
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
        address = f"{server.url}/v1/chat/completions"
        with client.stream("POST", address, json=ENDLESS):
            for _ in range(3):
                with client.stream("POST", address, json=ENDLESS) as waits:
                    assert waits.status_code == 200
                end = time.monotonic() + 20
                while 'num_requests_waiting{model_name="tiny-gemma4"} 0' not in httpx.get(server.url + "/metrics").text:
                    assert time.monotonic() < end


def test_the_chat_template_of_the_option_is_used(server):
    text = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": "[user] hi\n", "max_tokens": 8, "temperature": 0},
        headers={"Authorization": f"Bearer {KEY}"},
    ).json()["choices"][0]["text"]
    assert post(server, CHAT | {"max_tokens": 8}).json()["choices"][0]["message"]["content"] == text


def test_pages_of_other_origins_may_ask_only_if_they_are_named(server):
    def asked(origin):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        return httpx.options(f"{server.url}/v1/chat/completions", headers=headers)

    assert asked("https://a.example").headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in asked("https://b.example").headers


def test_a_signal_lets_streams_end_in_time_and_takes_no_more():
    """Of two streams one ends by itself, and one is told that it was ended."""
    short = CHAT | {"max_tokens": 25, "ignore_eos": True, "stream": True}
    with running_server("--stop-seconds", "5") as server, httpx.Client(timeout=60) as client:
        begin = functools.partial(client.stream, "POST", f"{server.url}/v1/chat/completions")
        with begin(json=short) as ends, begin(json=ENDLESS) as goes_on:
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            with pytest.raises(httpx.ConnectError):
                httpx.get(server.url + "/health")
            whole, cut = ([line for line in answer.iter_lines() if line] for answer in (ends, goes_on))
        assert whole[-1] == "data: [DONE]" and '"finish_reason":"length"' in whole[-2]
        assert "the server is stopping" in cut[-1] and json.loads(cut[-1].removeprefix("data: "))["error"]
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once():
    with running_server() as server:
        address = f"{server.url}/v1/chat/completions"
        stream = httpx.Client(timeout=60).send(httpx.Request("POST", address, json=ENDLESS), stream=True)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(15) == 0
        stream.close()


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
def test_without_the_extra_one_sentence_says_what_to_install(missing):
    argv = "sys.argv[1:] = ['serve']"
    program = f"import sys; sys.modules[{missing!r}] = None; {argv}; from specdec.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert run.stderr == (
        f"specdec: specdec serve needs {missing}, which is not installed; pip install 'specdec-runtime[serve]'\n"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--api-key", ""], "API key is empty"),
        (["--tool-parser", "poem"], "tool parser 'poem' is unknown"),
        (["--served-model-name", ""], "none empty"),
    ],
    ids=["key", "parser", "name"],
)
def test_bad_options_are_one_sentence_before_anything_is_loaded(options, said):
    run = serve("--target", "/not/there", *options)
    assert run.exit_code == 2 and said in run.stderr and run.stderr.count("\n") == 1
