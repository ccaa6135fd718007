"""Hostile clients leak nothing in a server, and good streams next to them equal those of a quiet server.

SPECDEC_SOAK is how often they come, once by default; a release is given SPECDEC_SOAK=20.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, running_server

from specdec import Engine, EngineConfig, SpecConfig

from package_files import module_of
from served_engine import served

TIMES = int(os.environ.get("SPECDEC_SOAK", "1"))
TOOL = Path(__file__).resolve().parent.parent / "tools" / "hostile.py"
KINDS = ["a head of 200 kB", "a body of 8 MB in chunks", "a body half sent, then gone", "streams that nobody reads"]
KINDS += ["streams left in the middle", "streams reset in the middle", "noise, HTTP/2, TLS", "65 pipelined requests"]
KINDS += ["false lengths", "odd paths and methods", "bad UTF-8", "nested two million deep"]
NOTHING_OPEN = {f"vllm:{name}": 0.0 for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}

pytestmark = [
    pytest.mark.usefixtures("shallow_pair"),
    pytest.mark.skipif(not TOOL.exists(), reason="needs the checkout"),
]


@pytest.fixture(scope="module")
def hostile():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOL.parent))  # for what it shares with others
        return module_of(TOOL)


def crowd(hostile, url: str) -> list[str]:
    """All kinds at the same time. -> what good streams and /health showed that is wrong"""

    async def together():
        client = hostile.Client(url, seconds=0.5)
        texts = [await hostile.good_stream(client, seed) for seed in range(2)]
        return await hostile.beside(client, KINDS, 1, texts)

    return asyncio.run(together()).wrong


def held(server: ServerProcess) -> dict[str, int]:
    """Files, sockets and pipes that the process has open."""
    kinds = Counter()
    for link in Path("/proc", str(server.pid), "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kinds[os.readlink(link).partition(":")[0]] += 1
    return dict(kinds)


def open_work(server: ServerProcess) -> dict[str, float]:
    """What /metrics says of requests and slots."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=30.0).text)
    return {family.name: family.samples[0].value for family in families if family.name in NOTHING_OPEN}


def settled(read, expected, seconds=20.0):
    """What `read` gives when it is as expected, or else in the end."""
    until = time.monotonic() + seconds
    while (found := read()) != expected and time.monotonic() < until:
        time.sleep(0.1)
    return found


@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_crowd_leaves_nothing_behind_and_changes_no_stream(hostile):
    with running_server(*hostile.OPTIONS) as server:
        assert crowd(hostile, server.url) == []  # so that all is there that is made once
        before = settled(lambda: held(server), None, seconds=1.0)
        for _ in range(TIMES):
            assert crowd(hostile, server.url) == []
        assert settled(lambda: held(server), before) == before
        assert settled(lambda: open_work(server), NOTHING_OPEN) == NOTHING_OPEN
        assert "Traceback" not in server.log() and " ERROR " not in server.log()


@pytest.fixture
def engine():
    config = EngineConfig(max_batch_size=8, max_model_len=512)
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", spec=SpecConfig(4), config=config) as engine:
        yield engine


@pytest.mark.slow
def test_a_crowd_leaves_no_slot_no_request_and_no_task(engine, hostile):
    async def tasks():
        return len(asyncio.all_tasks())

    with served(engine) as (url, running, loop):

        def inside():
            slots = engine.stats().full_slots.held, engine.stats().swa_slots.held
            there = asyncio.run_coroutine_threadsafe(tasks(), loop).result(10)
            return slots, running.open_requests, len(running.samples), len(engine.scheduler.running), there

        before = inside()
        assert crowd(hostile, url) == []
        assert settled(inside, before) == before == ((0, 0), 0, 0, 0, before[-1])
        engine.table.allocator.check()
