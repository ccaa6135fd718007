"""Connections of a server that are late, idle or gone; its signals; and its log, whose reader does not read."""

import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest
from server_process import running_server

from specdec import Engine, EngineConfig
from specdec.errors import ConfigError
from specdec.serving import logs
from specdec.serving import server as serving
from specdec.serving.http.events import event
from specdec.serving.server_settings import ServeSettings

from marks import is_deep
from served_engine import served, until

pytestmark = pytest.mark.usefixtures("shallow_pair")

ANSWER = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 12}
ENDLESS = ANSWER | {"max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server():
    with running_server("--timeout-body", "1", "--stop-seconds", "2") as server:
        yield server


def connect(url: str, window: int = 0) -> socket.socket:
    parts = urlsplit(url)
    made = socket.socket()
    if window:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    made.settimeout(60)
    try:
        made.connect((parts.hostname, parts.port))
    except OSError:
        made.close()
        raise
    return made


def test_a_target_may_have_the_servers_address(server):
    """Clients of a proxy send such targets; there was nothing at them."""
    for target, status in (("/v1/models?a=b", b"200"), ("", b"200"), ("/v2", b"404")):
        with connect(server.url) as client:
            client.sendall(f"GET {server.url}{target} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n".encode())
            assert client.recv(1 << 16).split()[1] == status


def request(body: dict, length: int | None = None) -> bytes:
    raw = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw) if length is None else length}\r\n\r\n".encode() + raw


def read_all(made: socket.socket) -> bytes:
    blocks = []
    while block := made.recv(1 << 16):
        blocks.append(block)
    return b"".join(blocks)


def test_a_body_that_does_not_come_in_time_is_408_and_one_that_comes_slowly_and_in_time_is_read(server):
    body = json.dumps(ANSWER).encode() + b" " * 3000
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=ANSWER, timeout=60).json()
    chunked = (
        request(ANSWER).partition(b"Content-Length")[0] + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with connect(server.url) as late, connect(server.url) as by_byte:
        late.sendall(request(ANSWER, length=10_000))
        by_byte.sendall(chunked + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        said = read_all(late)
        assert json.loads(read_all(by_byte).partition(b"\r\n\r\n")[2])["choices"] == whole["choices"]
    assert said.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 1 s" in said


@pytest.mark.skipif(sys.platform != "linux", reason="an option of Linux")
def test_a_client_that_never_reads_is_given_up_and_its_request_with_it(monkeypatch):
    monkeypatch.setattr(serving, "WRITE_SECONDS", 1)
    config = EngineConfig(max_batch_size=4, max_model_len=4096)
    asked = ENDLESS | {"n": 4, "logprobs": True, "top_logprobs": 20}  # more than the system holds for a reader
    with (
        Engine.from_pretrained("tiny-gemma4", None, config=config) as engine,
        served(engine) as (url, running, _),
        connect(url, window=1024) as never_reads,
    ):
        never_reads.sendall(request(asked))
        until(lambda: len(running.samples) == 4)
        until(lambda: not running.samples)
        assert engine.stats().aborted == 4  # none was served to its end


@pytest.mark.slow
def test_more_idle_connections_than_files_end_no_stream_and_not_the_server(server):
    before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    with ExitStack() as held, httpx.Client(timeout=60) as client:
        used = len(os.listdir(f"/proc/{server.pid}/fd"))
        with client.stream("POST", f"{server.url}/v1/chat/completions", json=ENDLESS | {"max_tokens": 100}) as stream:
            lines = stream.iter_lines()
            next(lines)
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + 12, before[1]))
            for _ in range(40):
                held.enter_context(connect(server.url)).sendall(b"GET")
            until(lambda: "Too many open files" in server.log())
            assert [line for line in lines if line][-1] == "data: [DONE]"
        held.close()
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
        until(lambda: httpx.get(server.url + "/health", timeout=60).status_code == 200)


@pytest.mark.parametrize("kind", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.deep)])
def test_a_signal_lets_streams_end_refuses_half_sent_bodies_in_time_and_leaves_with_0(kind):
    with (
        running_server("--stop-seconds", "3600", "--timeout-body", "3600") as server,
        httpx.Client(timeout=60) as client,
        connect(server.url) as half,
    ):
        half.sendall(request(ANSWER, length=10_000))
        with client.stream("POST", f"{server.url}/v1/chat/completions", json=ENDLESS | {"max_tokens": 60}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(kind)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(240) == 0  # an hour, if the half-sent body were waited for
        assert read_all(half).startswith(b"HTTP/1.1 503 ")
        with pytest.raises(OSError, match="refused"):
            connect(server.url)


def test_an_unread_log_stops_no_request():
    """A pipe holds 64 KiB; the lines of 20 requests with a path of 6,000 characters are twice that."""
    reader, writer = os.pipe()
    try:
        with running_server(log_to=writer) as server, httpx.Client(timeout=60) as client:
            for _ in range(20):
                assert client.get(f"{server.url}/{'x' * 6000}").status_code == 404
            server.process.send_signal(signal.SIGTERM)
            while server.process.poll() is None:  # unread, the log is waited for, some seconds
                if not is_deep() and select.select([reader], [], [], 0.05)[0]:
                    os.read(reader, 1 << 16)
            assert server.process.wait(60) == 0
    finally:
        os.close(reader)
        os.close(writer)


def test_closing_an_unread_log_waits_only_a_moment(monkeypatch):
    monkeypatch.setattr(logs, "CLOSE_SECONDS", 0.01)
    reader, writer = os.pipe()
    handler = logs.NonBlockingHandler(writer)
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "y" * 100_000, (), None))
    began = time.monotonic()
    handler.close()
    assert time.monotonic() - began < 30
    os.close(reader)
    until(handler._lines.empty)
    os.close(writer)


@pytest.mark.slow
def test_tls_serves_and_a_key_that_does_not_fit_is_one_sentence(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    make += ["-pkeyopt", "ec_paramgen_curve:prime256v1"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(make, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl")
    with running_server("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)) as server:
        assert server.url.startswith("https://")
        import ssl

        trusted = ssl.create_default_context(cafile=str(certificate))
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=ANSWER, verify=trusted, timeout=60)
        assert answer.status_code == 200


def test_a_certificate_that_cannot_be_read_is_named_without_a_key_that_was_not_given(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.pem' cannot be used: No such file"):
        serving.require_certificate(ServeSettings(model_names=["m"], ssl_certfile=tmp_path / "absent.pem"))


def test_a_server_serves_with_its_settings_of_the_process() -> None:
    """The engine's thread gets Python's lock soon, nothing that stays is looked through, and both end with it."""
    before = sys.getswitchinterval()
    with serving._process_settings():
        assert sys.getswitchinterval() == pytest.approx(serving.SWITCH_SECONDS) and gc.get_freeze_count() > 10_000
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (pytest.approx(before), 0)
    gc.freeze()  # as conftest.py has it


def test_an_event_is_one_line_for_clients_that_split_at_unicodes_line_ends():
    """httpx does: U+2028 in an answer cut its event in two."""
    text = "a\u2028b\u2029c\x85d\x0be\n"
    [line, end] = event({"text": text}).decode().splitlines()
    assert not end and json.loads(line.removeprefix("data: ")) == {"text": text}
