"""`examples/ray_serve.py`: what a replica of several GPUs asks for; and two replicas (50 s, with SPECDEC_RAY=1)."""

import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import httpx
import openai
import pytest
from script_module import module_of

from specdec import Engine, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
CHAT = [{"role": "user", "content": "Tom has 3 apples and buys 5 more. How many apples does he have?"}]

EXAMPLE = ROOT / "examples" / "ray_serve.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return module_of(EXAMPLE)


@pytest.mark.parametrize(
    ("given", "gpus", "shared_by"),
    [
        ([], 0, 1),
        (["--gpus", "1"], 1, 1),
        (["--gpus", "0.5"], 0.5, 1),
        (["--tensor-parallel", "2"], 2, 2),
        (["--tensor-parallel", "2", "--gpus", "4"], 4, 2),
    ],
)
def test_a_replica_is_given_the_gpus_that_share_its_target(
    given: list[str], gpus: float, shared_by: int, example: ModuleType
):
    options = example.arguments(given)
    assert example.actor_options(options) == {"num_cpus": 1, "num_gpus": gpus}
    assert example.engine_config(options).tensor_parallel == shared_by


def test_fewer_gpus_than_share_the_target_are_refused(example: ModuleType):
    with pytest.raises(SystemExit, match="--gpus 1 a replica are fewer than --tensor-parallel 2"):
        example.actor_options(example.arguments(["--tensor-parallel", "2", "--gpus", "1"]))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    if find_spec("ray") is None or os.environ.get("SPECDEC_RAY") != "1":
        pytest.skip("takes 50 s and needs ray: pip install 'specdec-runtime[ray]', and set SPECDEC_RAY=1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(EXAMPLE), "--replicas", "2", "--port", str(port)]
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_official_client_streams(client, alone):
    asked = {"model": "tiny-gemma4", "messages": CHAT, "max_tokens": 24, "temperature": 0}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == alone()
    assert len(chunks) > 4, "as it comes, not all at once"


@pytest.mark.slow
def test_refusals_are_those_of_the_server(client):
    with pytest.raises(openai.BadRequestError, match="temperature=-1"):
        client.chat.completions.create(model="tiny-gemma4", messages=CHAT, temperature=-1)
    assert [model.id for model in client.models.list()] == ["tiny-gemma4"]
