"""`examples/ray_serve.py`: two replicas, asked by the official client. Takes 50 s, so only with SPECDEC_RAY=1."""

import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest

from specdec import Engine, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
CHAT = [{"role": "user", "content": "Tom has 3 apples and buys 5 more. How many apples does he have?"}]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'specdec-runtime[ray]'"),
    pytest.mark.skipif(os.environ.get("SPECDEC_RAY") != "1", reason="takes 50 s; set SPECDEC_RAY=1"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "examples" / "ray_serve.py"), "--replicas", "2", "--port", str(port)]
    log = tmp_path_factory.mktemp("ray") / "log.txt"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first == f"ray serve: http://127.0.0.1:{port}, 2 replicas\n", log.read_text()
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def alone():
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp") as engine:
        yield lambda **fields: engine.chat(CHAT, SamplingParams(max_new_tokens=24, **fields))[0].text


def test_both_replicas_answer_and_say_the_same(url, alone):
    body = {"messages": CHAT, "max_tokens": 24, "temperature": 0.8, "seed": 5}
    wanted, replicas = alone(temperature=0.8, seed=5), set()
    for _ in range(60):  # each is drawn at random
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] == wanted
        replicas.add(answer.headers["x-replica"])
        if len(replicas) == 2:
            break
    assert len(replicas) == 2


def test_the_official_client_streams(client, alone):
    asked = {"model": "tiny-gemma4", "messages": CHAT, "max_tokens": 24, "temperature": 0}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == alone()
    assert len(chunks) > 4, "as it comes, not all at once"


def test_refusals_are_those_of_the_server(client):
    with pytest.raises(openai.BadRequestError, match="temperature=-1"):
        client.chat.completions.create(model="tiny-gemma4", messages=CHAT, temperature=-1)
    assert [model.id for model in client.models.list()] == ["tiny-gemma4"]
