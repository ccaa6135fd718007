"""`examples/ray_serve.py`: its parts in this process; with SPECDEC_RAY=1 (and no xdist) clusters of two replicas."""

import asyncio
import contextlib
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec import Engine, SamplingParams
from specdec.cli.commands import ServeOptions
from specdec.errors import ConfigError

from package_files import module_of
from served_engine import until

ROOT = Path(__file__).resolve().parent.parent
CHAT = [{"role": "user", "content": "Tom has 3 apples and buys 5 more. How many apples does he have?"}]
ASKED = {"messages": CHAT, "max_tokens": 12, "temperature": 0}
EXAMPLE = ROOT / "examples" / "ray_serve.py"
HAS_RAY = find_spec("ray") is not None  # before a stand-in takes its name


class LostError(Exception):
    """Stands for Ray's error about a process that is gone."""


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example, with as much of Ray as a replica and the front end ask for."""
    names = iter(("first", "second"))

    def context() -> SimpleNamespace:
        return SimpleNamespace(replica_id=SimpleNamespace(unique_id=next(names)))

    with pytest.MonkeyPatch.context() as patch:
        for name, content in {
            "ray": {},
            "ray.exceptions": {"RayActorError": LostError},
            "ray.serve": {"get_replica_context": context},
        }.items():
            module = ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        yield module_of(EXAMPLE)


@pytest.fixture(scope="module")
def pair(example: ModuleType, shallow_folder: Path) -> Iterator[list[Any]]:
    """Two replicas in this process."""
    target, drafter = (str(shallow_folder / name) for name in ("tiny-gemma4", "tiny-gemma4-mtp"))
    options = ServeOptions(target=target, drafter=drafter, served_model_name=["tiny-gemma4"])
    close = example.Replica.__del__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "prepare_process", lambda options: None)  # the process is pytest's
        del example.Replica.__del__  # Ray awaits it, Python does not
        replicas = [example.Replica(options, example.serve_settings(options)) for _ in range(2)]
        yield replicas
        for each in replicas:
            asyncio.run(close(each))


class Handle:
    """Ray's handle of these replicas, without processes: one request after the other goes to the next of them."""

    def __init__(self, *replicas: Any) -> None:
        self.replicas, self.routed = list(replicas), []

    def options(self, *, stream: bool) -> "Handle":
        assert stream
        return self

    @property
    def answer(self) -> "Handle":
        return self

    def remote(self, *routed_by: Any, scope: Any, body: bytes) -> "Handle":
        self.routed.append([each.prompt for each in routed_by])
        scope = pickle.loads(pickle.dumps(scope))  # it goes to another process
        self.messages = self.replicas.pop(0).answer(*routed_by, scope=scope, body=body)
        return self

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.messages

    def cancel(self) -> None:
        """Every answer here is read to its end."""

    def broadcast(self, method: str) -> Any:
        async def results_async() -> list[Any]:
            return [await getattr(each, method)() for each in self.replicas]

        return SimpleNamespace(results_async=results_async)


class LostAfter:
    """A replica that is lost once it has sent `messages` of an answer."""

    def __init__(self, replica: Any, messages: int) -> None:
        self.replica, self.messages = replica, messages

    async def answer(self, *routed_by: Any, **request: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(self.replica.answer(*routed_by, **request)) as messages:
            left = self.messages
            while left:
                yield await anext(messages)
                left -= 1
        raise LostError


def ask(example: ModuleType, handle: Handle, path: str = "/v1/chat/completions", body: Any = ASKED) -> httpx.Response:
    """Body None: a GET."""

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(example.FrontEnd(handle, 1 << 20).__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    return asyncio.run(asked())


def content(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_an_answer_is_the_replicas_own_and_names_it(example, pair):
    first, second = pair
    answers = [ask(example, Handle(each)) for each in pair]
    assert [each.headers["x-replica"] for each in answers] == ["first", "second"]
    assert content(answers[0]) == content(answers[1])
    assert ask(example, Handle(first), "/v1/models", None).json()["data"][0]["id"] == "tiny-gemma4"
    refused = ask(example, Handle(second), body={"messages": 3})
    assert refused.status_code == 400 and "messages=3" in refused.text
    large = ask(example, Handle(first), body=ASKED | {"user": "x" * (5 << 20)})
    assert large.status_code == 413


def test_a_request_whose_replica_is_lost_before_the_answer_goes_to_another(example, pair):
    handle = Handle(LostAfter(pair[0], 0), pair[1])
    answer = ask(example, handle)
    assert answer.headers["x-replica"] == "second" and content(answer) == content(ask(example, Handle(pair[0])))
    assert handle.routed == [[CHAT[0]["content"]]] * 2


def test_a_client_may_ask_again_when_every_replica_was_lost(example, pair):
    answer = ask(example, Handle(*[LostAfter(pair[0], 0)] * example.MAX_LOST))
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "replica_lost"


def test_a_stream_whose_replica_is_lost_ends_with_an_error_that_clients_read(example, pair):
    answer = ask(example, Handle(LostAfter(pair[0], 3)), body=ASKED | {"stream": True})
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert len(events) == 3 and json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "replica_lost"


def test_an_answer_that_breaks_off_is_no_whole_answer(example, pair):
    with pytest.raises(RuntimeError, match="lost in the middle of an answer"):
        ask(example, Handle(LostAfter(pair[0], 1)))


def test_a_cancelled_answer_frees_its_request(example, pair):
    async def left() -> None:
        body = json.dumps(ASKED | {"max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
        path = "/v1/chat/completions"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"http_version": "1.1", "scheme": "http", "headers": [(b"content-type", b"application/json")]}
        messages = pair[0].answer(scope=scope, body=body)
        async with contextlib.aclosing(messages):
            for _ in range(3):
                await anext(messages)
            assert pair[0].engine.open_requests == 1
        while pair[0].engine.open_requests:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(left(), 60))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"died": "its thread has ended"}, "its thread has ended"),
        ({"seconds_in_step": 130.0}, "a step of the engine has not ended for 130 s"),
        ({"trouble": "the last 3 rounds with requests failed"}, "rounds with requests failed"),
    ],
)
def test_ray_is_told_of_a_replica_that_is_to_be_replaced(state, said, example, pair, monkeypatch):
    pair[0].check_health()
    well = {"died": None, "seconds_in_step": 1.0, "trouble": None}
    monkeypatch.setattr(pair[0], "engine", SimpleNamespace(**well | state))
    with pytest.raises(RuntimeError, match=said):
        pair[0].check_health()


def test_figures_of_all_replicas_are_one_text_that_names_them(example, pair):
    for each in pair:
        ask(example, Handle(each))
    text = ask(example, Handle(*pair), "/metrics", None).text
    families = {each.name: each for each in text_string_to_metric_families(text)}
    tokens = families["vllm:generation_tokens"]
    assert tokens.type == "counter"
    assert {each.labels["replica"]: each.value > 0 for each in tokens.samples} == {"first": True, "second": True}
    assert text.count("# TYPE vllm:generation_tokens_total counter") == 1


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [{"content": "Brief."}, {"content": [{"type": "text", "text": "Hi"}]}]}, "Brief.Hi"),
        ({"prompt": ["one", "two"]}, "onetwo"),
        ({"prompt": [5, 60]}, "5 60 "),
        ({"input": "hello"}, "hello"),
        ({"messages": [{"role": "assistant", "content": None}]}, ""),
        ({"messages": 3.5}, ""),
        ([1], ""),
        ("{", ""),
        ('{"prompt":' + "[" * 100_000, ""),
    ],
    ids=["chat", "texts", "tokens", "response", "no text", "no messages", "no object", "no JSON", "too deep"],
)
def test_requests_are_routed_by_their_text(body, text, example):
    sent = body if isinstance(body, str) else json.dumps(body)
    assert example.routed_text(sent.encode()) == text


@pytest.mark.parametrize(
    ("tensor_parallel", "gpus", "given"), [(1, None, 0), (1, 1, 1), (1, 0.5, 0.5), (2, None, 2), (2, 4, 4)]
)
def test_a_replica_is_given_the_gpus_that_share_its_target(tensor_parallel, gpus, given, example):
    options = example.ReplicaOptions(tensor_parallel=tensor_parallel, gpus=gpus)
    assert example.actor_options(options) == {"num_cpus": 1, "num_gpus": given}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tensor_parallel": 2}, "--gpus 1 a replica are fewer than --tensor-parallel 2"),
        ({"ssl_certfile": Path("x")}, "without TLS; put a proxy before it"),
        ({"root_path": "llm"}, "it begins with a slash"),
    ],
)
def test_settings_that_ray_cannot_serve_are_refused_before_anything_starts(changed, said, example):
    with pytest.raises(ConfigError, match=said):
        example.run_replicas(example.ReplicaOptions(**changed, gpus=1))


# ---- with Ray itself


def url_of(arguments: list[str], folder: Path) -> Iterator[tuple[str, int]]:
    """(URL, process) of two replicas."""
    if not HAS_RAY or os.environ.get("SPECDEC_RAY") != "1":
        pytest.skip("takes minutes and needs ray: pip install 'specdec-runtime[ray]', and set SPECDEC_RAY=1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(EXAMPLE), "--port", str(port), *arguments]
    log = folder / "log.txt"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first == f"ray serve: http://127.0.0.1:{port}, 2 replicas\n", log.read_text()
        yield f"http://127.0.0.1:{port}", process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module", params=["load", "prefix"])
def cluster(request, tmp_path_factory):
    """A replica's K/V pool has room for about 10 of the 20 prompts of PREFIXES."""
    arguments = ["--router", request.param, "--max-model-len", "190", "--fixed-drafts"]
    for url, pid in url_of(arguments, tmp_path_factory.mktemp("ray")):
        yield SimpleNamespace(url=url, pid=pid, router=request.param)


WORDS = ("apple", "river", "stone", "cloud", "green", "table", "window", "music", "paper", "horse", "light", "winter")
DRAWN = random.Random(5)
PREFIXES = [" ".join([f"{chr(97 + number)}{number}", *DRAWN.choices(WORDS, k=71)]) for number in range(20)]


@pytest.mark.slow
def test_hits_by_router(cluster):
    """About 100 of 200 by load, and 180 by prefix: every request but the first of each. The first test of a cluster:
    its caches are empty."""
    drawn, hits = random.Random(7), 0
    with httpx.Client(base_url=cluster.url, timeout=120) as client:
        for number in range(200):
            prompt = f"{drawn.choice(PREFIXES)} ask {number}"
            answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).json()["usage"]
            hits += answer["prompt_tokens_details"]["cached_tokens"] > 0.7 * answer["prompt_tokens"]
    print(f"{cluster.router} router, caches with room for half of the prefixes: {hits} hits of 200")
    assert hits >= 170 or cluster.router == "load"


@pytest.mark.slow
def test_the_official_client_streams_and_is_refused_in_the_servers_words(cluster):
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp") as engine:
        alone = engine.chat(CHAT, SamplingParams(max_new_tokens=24))[0].text
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "tiny-gemma4", "messages": CHAT, "max_tokens": 24, "temperature": 0}
        chunks = list(client.chat.completions.create(**asked, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == alone
        assert len(chunks) > 4, "as it comes, not all at once"
        with pytest.raises(openai.BadRequestError, match="temperature=-1"):
            client.chat.completions.create(model="tiny-gemma4", messages=CHAT, temperature=-1)
        assert [model.id for model in client.models.list()] == ["tiny-gemma4"]


def figure(url: str, beginning: str) -> float:
    """Sum over the replicas of the line that begins so."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(beginning))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots(stream, cluster):
    aborted, running = 'vllm:request_success_total{finished_reason="abort"', "vllm:num_requests_running{"
    before = figure(cluster.url, aborted)
    body = json.dumps({"prompt": "Tom has", "max_tokens": 170, "ignore_eos": True, "n": 32, "stream": stream})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", httpx.URL(cluster.url).port)) as client:
        client.sendall(f"{head}\r\n\r\n{body}".encode())
        until(lambda: figure(cluster.url, running) > 0)
    until(lambda: figure(cluster.url, aborted) > before)
    until(lambda: figure(cluster.url, running) == 0)


def replica_processes(pid: int) -> list[int]:
    """The replicas among the descendants of a process."""
    parents, found = {}, []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            status = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            parents[int(entry.name)] = int(status[1])
    for each in parents:
        above = each
        while above in parents and above != pid:
            above = parents[above]
        with contextlib.suppress(OSError):
            if above == pid and b"specdec:specdec" in Path(f"/proc/{each}/cmdline").read_bytes():
                found.append(each)
    return sorted(found)


@pytest.mark.slow
def test_a_killed_replica_costs_no_client_its_answer(cluster):
    """40 clients at a time, of whom none asks twice. The last test of a cluster."""
    started = threading.Event()

    def client(number: int) -> str:
        body = {"prompt": f"{PREFIXES[number % 20][:100]} {number}", "max_tokens": 20, "ignore_eos": True}
        body |= {"temperature": 0, "stream": number % 2 == 0}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=300) as answer:
            text = ""
            for part in answer.iter_text():
                text += part
                started.set()
        if answer.status_code == 503:
            return "error before the answer" if "replica_lost" in text else text
        assert answer.status_code == 200, text
        if number % 2:
            return "answer" if json.loads(text)["usage"]["completion_tokens"] == 20 else text
        events = text.removesuffix("\n\n").split("\n\n")
        if events[-1] == "data: [DONE]":
            return "answer"
        return "error in the stream" if "replica_lost" in events[-1] else text

    with ThreadPoolExecutor(40) as pool:
        clients = [pool.submit(client, number) for number in range(40)]
        assert started.wait(300)
        lost, _ = replica_processes(cluster.pid)
        os.kill(lost, signal.SIGKILL)
        outcomes = [each.result(timeout=300) for each in clients]
    counts = {outcome: outcomes.count(outcome) for outcome in outcomes}
    print(f"{cluster.router} router, one of two replicas killed under 40 clients: {counts}")
    assert counts.keys() <= {"answer", "error in the stream", "error before the answer"}
    assert counts["answer"] >= 20, "those of the other replica, and those that nothing was sent of"
    until(lambda: len(replica_processes(cluster.pid)) == 2, seconds=300)  # Ray starts another
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=ASKED, timeout=120)
    assert answer.status_code == 200
