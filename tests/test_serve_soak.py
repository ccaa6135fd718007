"""A server process among 64 clients who stream, read slowly, go away, send nonsense and send too much.

SPECDEC_SOAK is for how many seconds, 2 by default; a release is given SPECDEC_SOAK=120. Afterwards every answer that
ended is that of the Python API to the same job alone, and the process holds what it held before.
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, running_server

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.models.bundled import HELD_OUT_PROBLEMS
from specdec.serving.streams import Streams
from specdec.text.prompt_files import read_prompts

from http_crowd import Crowd, Job, Probe
from marks import deep_cases, is_deep
from served_engine import served

SECONDS = float(os.environ.get("SPECDEC_SOAK", "2"))
JOBS = 6 if SECONDS < 30 else 48
LENGTHS = (4, 16, 48) if SECONDS < 30 else (4, 24, 64, 120)
BODY_LIMIT = 1 << 18
NOTHING_OPEN = {f"vllm:{name}": 0.0 for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
OPTIONS = ("--batch-size", "16", "--max-model-len", "512", "--max-body-bytes", str(BODY_LIMIT))

pytestmark = pytest.mark.usefixtures("shallow_pair")


def make_jobs(count, seed=11):
    draw = random.Random(seed)
    problems = read_prompts(HELD_OUT_PROBLEMS, count)
    jobs = []
    for number, problem in enumerate(problems):
        fields = {
            "temperature": draw.choice([0.0, 0.7, 1.3]),
            "seed": number,
            "max_tokens": draw.choice(LENGTHS),
        }
        if draw.random() < 0.3:
            fields["top_p"] = 0.9
        if draw.random() < 0.4:
            fields["speculation"] = draw.choice([False, {"num_steps": 2}, {"num_steps": 1}])
        jobs.append(Job(problem.text, draw.random() < 0.7, fields))
    return jobs


def alone(engine, job):
    """(text, finish_reason) of the Python API."""
    fields = job.fields
    params = SamplingParams(
        fields["max_tokens"], fields["temperature"], top_p=fields.get("top_p", 1.0), seed=fields["seed"]
    )
    [out] = engine.generate(engine.chat_prompt(job.prompt) if job.chat else engine.encode(job.prompt), params)
    return out.text, out.finish_reason


def held(server: ServerProcess) -> dict[str, int]:
    """What the process has open."""
    process = Path("/proc", str(server.pid))
    kinds = Counter()
    for link in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kinds[os.readlink(link).partition(":")[0]] += 1
    return dict(kinds)


def open_work(server: ServerProcess) -> dict[str, float]:
    """What /metrics says of requests and slots."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=30.0).text)
    return {family.name: family.samples[0].value for family in families if family.name in NOTHING_OPEN}


def memory(server: ServerProcess) -> float:
    """MB of its own."""
    [line] = [line for line in Path("/proc", str(server.pid), "status").read_text().splitlines() if "VmRSS" in line]
    return int(line.split()[1]) / 1024


def settled(read, wanted, seconds=20.0):
    """What `read` gives when it is `wanted`, or else in the end."""
    until = time.monotonic() + seconds
    while (found := read()) != wanted and time.monotonic() < until:
        time.sleep(0.1)
    return found


@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_crowd_leaves_nothing_behind_and_gets_the_answers_of_lone_runs():
    jobs = make_jobs(JOBS)
    with running_server(*OPTIONS) as server:
        Crowd(server.url, jobs, clients=8, seed=1, body_limit=BODY_LIMIT).run(0.5)  # whatever is made once
        time.sleep(0.5)
        before, memory_before = held(server), memory(server)
        crowd = Crowd(server.url, jobs, body_limit=BODY_LIMIT)
        began = time.monotonic()
        with Probe(server.url) as probe:
            crowd.run(SECONDS)
        seconds = time.monotonic() - began
        after = settled(lambda: held(server), before)
        work = settled(lambda: open_work(server), NOTHING_OPEN)
        memory_after = memory(server)
        log = server.log()
    answered = sum(crowd.answers[job].total() for job in crowd.answers)
    times = sorted(1e3 * each for each in probe.seconds)
    print(
        f"\n{seconds:.1f} s: {dict(crowd.count)}, {answered} answers of {len(crowd.answers)} jobs",
        f"/health {len(times)} times: median {statistics.median(times):.1f} ms, "
        f"p99 {times[int(0.99 * len(times))]:.1f}, most {times[-1]:.1f}",
        f"open {sum(before.values())} files before and {sum(after.values())} after; "
        f"{memory_before:.0f} MB before and {memory_after:.0f} MB after",
        sep="\n",
    )
    assert crowd.wrong == []
    assert probe.bad == []
    assert after == before
    assert work == NOTHING_OPEN
    assert "Traceback" not in log and "ERROR" not in log
    assert answered > 0
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", spec=SpecConfig(4)) as engine:
        for job, found in crowd.answers.items():
            assert set(found) == {alone(engine, job)}, job


# in this process, where one can look inside


@pytest.fixture
def engine():
    config = EngineConfig(max_batch_size=8, max_model_len=512)
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", spec=SpecConfig(4), config=config) as engine:
        yield engine


@pytest.mark.slow
def test_a_crowd_leaves_no_slot_no_request_and_no_task(engine):
    async def tasks():
        return len(asyncio.all_tasks())

    with served(engine, BODY_LIMIT) as (url, running, loop):

        def inside():
            slots = engine.stats().full_slots.held, engine.stats().swa_slots.held
            there = asyncio.run_coroutine_threadsafe(tasks(), loop).result(10)
            return slots, running.open_requests, len(running.samples), len(engine.scheduler.running), there

        before = inside()
        crowd = Crowd(url, make_jobs(4), clients=32, body_limit=BODY_LIMIT)
        crowd.run(1.0 if is_deep() else 0.5)
        assert crowd.wrong == []
        assert crowd.count["leaves"] > 0 and crowd.count["streams"] > 0
        assert settled(inside, before) == before == ((0, 0), 0, 0, 0, before[-1])
        engine.table.allocator.check()


@deep_cases("whole")
@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_goes_away_frees_its_slots_within_one_round(engine, monkeypatch, stream):
    """The round under way when its leaving is seen is the last one with it; the slots it held are free after it."""
    rounds, seen = [], {}
    step, abort = engine.step, Streams.abort

    def counted_step():
        more = step()
        rounds.append(({request.number for request in engine.scheduler.running}, engine.stats().full_slots.held))
        return more

    def counted_abort(streams):
        for sample in streams.samples:
            if not sample.handle.finished:
                seen.setdefault(sample.handle.id, len(rounds))
        abort(streams)

    monkeypatch.setattr(engine, "step", counted_step)
    monkeypatch.setattr(Streams, "abort", counted_abort)
    fields = {"max_tokens": 300, "ignore_eos": True, "temperature": 0, "stream": stream}

    def request(prompt):
        body = json.dumps({"messages": [{"role": "user", "content": prompt}], **fields}).encode()
        head = ["POST /v1/chat/completions HTTP/1.1", "host: h", "content-type: application/json"]
        return "\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body

    with served(engine, BODY_LIMIT) as (url, running, _):
        place = urlsplit(url)
        stays, leaves = (socket.create_connection((place.hostname, place.port)) for _ in range(2))
        with stays, leaves:
            stays.sendall(request("How many?"))
            assert settled(lambda: len(rounds) > 3, True)
            leaves.sendall(request("apples and " * 75))
            # both run, and the prompt of 150 words is read
            assert settled(lambda: bool(rounds) and len(rounds[-1][0]) == 2 and rounds[-1][1] > 180, True)
            leaves.close()
            assert settled(lambda: len(seen), 1) == 1
            [(gone, at)] = seen.items()
            assert settled(lambda: len(rounds) > at + 3, True)
            assert all(gone not in there for there, _ in rounds[at + 1 :])
            assert rounds[at + 1][1] < rounds[at - 1][1] - 100, "slots of 150 words, less what the other took meanwhile"
            assert len(running.samples) == 1
        assert settled(lambda: len(running.samples), 0) == 0
        assert engine.stats().full_slots.held == 0
