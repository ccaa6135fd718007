"""When a client disconnects, its work ends: waiting requests are dropped with their bodies, running ones are
counted."""

import gc
import json
import logging
import socket
import threading
import tracemalloc
import weakref
from functools import partial
from urllib.parse import urlsplit

import httpx
import pytest

from specdec.serving.fair_pool import CLIENT, FairPool
from specdec.serving.http import bodies

from marks import deep
from served_engine import bundled_engine, served, until

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once", "quick_collections")
MEGABYTE = 1 << 20


class Held:
    """What a job's function holds, such as a body."""


def work(pool: FairPool, go: threading.Event, count: int = 1):
    """(jobs, weak references to what each of them holds)"""
    held = [Held() for _ in range(count)]
    jobs = [pool.submit(lambda it=it: go.wait(120) and bool(it)) for it in held]
    return jobs, [weakref.ref(it) for it in held]


def alive(references) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def queued(pool: FairPool) -> int:
    """Jobs that have not begun."""
    return sum(map(len, list(pool._queues.values())))


def test_a_client_that_leaves_and_asks_again_has_no_more_threads_than_one_that_stays():
    """Each that left made room for the next: 18 prompts were read at once on 16 threads, for no client."""
    pool, go = FairPool(4, "test-leaving"), threading.Event()
    token = CLIENT.set("leaves")
    try:
        begun = 0
        for _ in range(20):
            [job], [held] = work(pool, go)
            begun += not job.cancel()
            assert job.running() or alive([held]) == 0  # what was dropped holds nothing, though its job is kept
        assert begun == 3 and queued(pool) == 0
        CLIENT.set("other")
        assert pool.submit(lambda: 7).result(120) == 7
        CLIENT.set("leaves")
        last = pool.submit(lambda: 8)
        assert not last.running()  # its turn comes when one of those has ended
        go.set()
        assert last.result(120) == 8
    finally:
        CLIENT.reset(token)
        go.set()
        pool.shutdown()


def test_a_finished_job_releases_its_data_even_if_its_error_is_kept():
    pool, held = FairPool(2, "test-held"), Held()
    reference = weakref.ref(held)
    job = pool.submit(partial(len, held))  # has no frame of its own
    del held
    assert isinstance(job.exception(120), TypeError)
    until(lambda: alive([reference]) == 0)
    pool.shutdown()


engine = bundled_engine(None, max_batch_size=2, max_model_len=512)


def sent(url: str, route: str, body: dict) -> socket.socket:
    """A connection on which a whole request was sent, and no answer was read."""
    address, raw = urlsplit(url), json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(head.encode() + raw)
    return connection


def test_bodies_of_clients_that_left_are_not_parsed_and_not_kept(engine):
    go = threading.Event()
    with served(engine, max_body_bytes=2 * MEGABYTE) as (url, *_):
        before = bodies._parser.submit(lambda: go.wait(120))  # another's, which takes long
        try:
            body = {"messages": [{"role": "user", "content": "x" * MEGABYTE}]}
            tracemalloc.start()
            connections = [sent(url, "/v1/chat/completions", body) for _ in range(6)]
            until(lambda: queued(bodies._parser) == 6)
            assert tracemalloc.get_traced_memory()[0] > 6 * MEGABYTE
            for connection in connections:
                connection.close()
            until(lambda: queued(bodies._parser) == 0, seconds=20)
            until(lambda: gc.collect() and tracemalloc.get_traced_memory()[0] < 2 * MEGABYTE)
            assert not before.done()
        finally:
            tracemalloc.stop()
            go.set()


ROUTES = {
    "chat": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
    "completion": ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 1}),
    "response": ("/v1/responses", lambda text: {"input": text, "max_output_tokens": 1}),
    "tokens": ("/tokenize", lambda text: {"prompt": text}),
    "tokens-as-they-are": ("/tokenize", lambda text: {"prompt": text, "add_special_tokens": False}),
    "tokens-of-a-chat": ("/tokenize", lambda text: {"messages": [{"role": "user", "content": text}]}),
}


@pytest.mark.parametrize("name", ROUTES)
def test_prompts_of_clients_that_left_are_dropped_before_they_are_read(name, engine):
    route, body_of = ROUTES[name]
    go, begun = threading.Event(), []

    def read(*_, **__):
        begun.append(1)
        assert go.wait(120)
        return [1, 2, 3]

    with served(engine) as (url, running, _), pytest.MonkeyPatch.context() as patch:
        pool = running._prompts
        blocked = [pool.submit(lambda: go.wait(120)) for _ in range(3)]  # of other addresses, all readers
        token = CLIENT.set("elsewhere")
        blocked += [pool.submit(lambda: go.wait(120)) for _ in range(3)]
        CLIENT.reset(token)
        waiting = queued(pool)
        patch.setattr(engine, "chat_prompt", read)
        patch.setattr(engine, "encode", read)
        try:
            connections = [sent(url, route, body_of("hello " * 40)) for _ in range(5)]
            until(lambda: queued(pool) == waiting + 5)
            for connection in connections:
                connection.close()
            until(lambda: queued(pool) == waiting, seconds=20)
            assert begun == []
        finally:
            go.set()
        assert all(job.result(120) for job in blocked)


@pytest.mark.parametrize("stream", [True, deep(False)], ids=["streamed", "whole"])
def test_slots_of_a_client_that_left_are_free_and_the_log_and_the_metrics_say_so(stream, engine, caplog):
    """How soon they are free is in test_async_engine.py."""
    caplog.set_level(logging.INFO, "specdec.serving")
    route, body_of = ROUTES["chat"]
    aborted = 'vllm:request_success_total{finished_reason="abort",model_name="tiny-gemma4"} 1.0'
    with served(engine) as (url, running, _):
        with sent(url, route, body_of("hello") | {"max_tokens": 400, "ignore_eos": True, "stream": stream}):
            until(lambda: engine.stats().full_slots.held)
        until(lambda: not running.samples)
        assert engine.stats().full_slots.held == 0
        until(lambda: aborted in httpx.get(f"{url}/metrics").text)
        until(lambda: any(("(client gone)" if stream else " 499 in") in message for message in caplog.messages))
