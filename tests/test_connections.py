"""Connections of a server that are idle, late, half closed or too many; and its log, whose reader does not read."""

import json
import os
import select
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace
from urllib.parse import urlsplit

import h11
import httpx
import pytest
from server_process import running_server
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.errors import ConfigError
from specdec.serving.http.connections import PIECE, Connection
from specdec.serving.server import listen
from specdec.serving.server_settings import ServeSettings

from served_engine import until

ANSWER = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 12}
ENDLESS = ANSWER | {"max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server():
    """At most 20 connections, a head within 1 s, a request within 2 s."""
    options = ["--max-connections", "20", "--timeout-headers", "1", "--timeout-body", "2", "--stop-seconds", "2"]
    with running_server(*options) as server:
        yield server


def connect(server) -> socket.socket:
    parts = urlsplit(server.url)
    made = socket.create_connection((parts.hostname, parts.port), timeout=60)
    made.settimeout(60)
    return made


def request(body: dict, length: int | None = None) -> bytes:
    raw = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw) if length is None else length}\r\n\r\n".encode() + raw


def read_all(made: socket.socket) -> bytes:
    blocks = []
    while block := made.recv(1 << 16):
        blocks.append(block)
    return b"".join(blocks)


@pytest.mark.deep
def test_a_client_that_closes_its_half_gets_its_answer_whole_and_streamed(server):
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=ANSWER, timeout=60).json()
    for stream in (False, True):
        with connect(server) as made:
            made.sendall(request(ANSWER | {"stream": stream}))
            made.shutdown(socket.SHUT_WR)
            said = read_all(made)
        head, _, body = said.rpartition(b"HTTP/1.1 200 OK")[2].partition(b"\r\n\r\n")
        assert head and (b"[DONE]" in body if stream else json.loads(body)["choices"] == whole["choices"])


def test_a_client_that_closes_both_halves_is_noticed_before_its_answer_is_made(server):
    for stream in (False, True):
        with connect(server) as made:
            made.sendall(request(ENDLESS | {"stream": stream}))
            until(lambda: running(server) == 1)
        until(lambda: running(server) == 0)
        until(lambda said: said in server.log(), "(client gone)" if stream else " 499 in ")  # it did not just end


def running(server) -> float:
    text = httpx.get(server.url + "/metrics", timeout=60).text
    return float(text.split("vllm:num_requests_running{")[-1].split("\n")[0].split()[-1])


def test_a_head_and_a_body_that_do_not_come_in_time_are_ended_with_408(server):
    parts = (b"GET /health HT", request(ANSWER, length=10_000), b"")
    with ExitStack() as held:
        late = [held.enter_context(connect(server)) for _ in parts]  # all wait at the same time
        for made, part in zip(late, parts, strict=True):
            made.sendall(part)
        head, body, nothing = map(read_all, late)
    assert head.startswith(b"HTTP/1.1 408 ") and body.startswith(b"HTTP/1.1 408 ")
    assert nothing == b""  # nothing came: nothing is said


def test_idle_connections_up_to_the_bound_keep_no_client_out_and_end_no_stream(server):
    with ExitStack() as held, httpx.Client(timeout=60) as client:
        address = f"{server.url}/v1/chat/completions"
        with client.stream("POST", address, json=ENDLESS | {"max_tokens": 200}) as stream:
            lines = stream.iter_lines()
            next(lines)
            for _ in range(60):
                held.enter_context(connect(server))
            for _ in range(3):
                assert httpx.get(server.url + "/health", timeout=60).status_code == 200
            assert list(lines)[-2] == "data: [DONE]"
    log = server.log()  # of two lines that say the same, ten seconds apart, at most
    assert 1 <= log.count("those that have waited longest for a request are closed") <= 2
    assert "new ones are refused" not in log  # they would get in later, when idle ones are late


def test_chunks_of_one_byte_are_parsed_a_piece_a_turn(monkeypatch):
    """256 kB of them in one turn of the loop kept everybody waiting for seconds."""
    fed, turns, reading = [], [], []
    monkeypatch.setattr(H11Protocol, "data_received", lambda self, data: fed.append(data))
    made = Connection.__new__(Connection)
    made._since, made._accepted, made._unparsed = 0.0, None, b""
    made.headers, made.conn = [(b"transfer-encoding", b"chunked")], SimpleNamespace(their_state=h11.SEND_BODY)
    made.flow, made.loop = SimpleNamespace(read_paused=False), SimpleNamespace(call_soon=turns.append)
    made.transport = SimpleNamespace(
        is_closing=lambda: False,
        pause_reading=lambda: reading.append(False),
        resume_reading=lambda: reading.append(True),
    )
    sent = b"1\r\na\r\n" * 1000
    made.data_received(sent)
    assert fed == [sent[:PIECE]] and reading[-1] is False
    made.data_received(b"more")
    while turns:
        turns.pop()()
    assert b"".join(fed) == sent + b"more" and max(map(len, fed)) <= PIECE and reading[-1] is True
    made.conn.their_state, made.headers = h11.SEND_BODY, [(b"content-length", b"4000000")]
    made.data_received(b"x" * (PIECE * 2))
    assert fed[-1] == b"x" * (PIECE * 2)


def test_a_body_in_chunks_of_one_byte_is_read_whole(server):
    body = json.dumps(ANSWER).encode() + b" " * 3000
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=ANSWER, timeout=60).json()
    with connect(server) as made:
        made.sendall(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        said = read_all(made)
    assert json.loads(said.partition(b"\r\n\r\n")[2])["choices"] == whole["choices"]


@pytest.mark.slow
def test_running_out_of_files_is_said_once_and_keeps_no_client_out(tmp_path):
    """Idle connections up to `ulimit -n`: the server closes the oldest instead of writing 2,000 tracebacks a second."""
    with running_server("--timeout-headers", "30") as server, ExitStack() as held:
        import resource

        used = len(os.listdir(f"/proc/{server.pid}/fd"))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + 12, used + 12))
        for _ in range(40):
            held.enter_context(connect(server))
        until(lambda: "no connection can be taken" in server.log())
        time.sleep(0.5)  # for the lines that must not come
        assert len(server.log()) < 4000, server.log()[:4000]
        assert "Traceback" not in server.log() and "no connection can be taken" in server.log()
    # at the start the bound follows from the limit, so nothing of this happens
    with pytest.raises(ConfigError, match=r"max_connections=1000000000 is more than the \d+"):
        ServeSettings(["a"], max_connections=1_000_000_000).resolved_connections()


@pytest.mark.parametrize("kind", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.deep)])
def test_a_signal_lets_streams_end_drops_half_sent_bodies_in_time_and_leaves_with_0(kind):
    with (
        running_server("--stop-seconds", "3600") as server,
        httpx.Client(timeout=60) as client,
        connect(server) as half,
    ):
        half.sendall(request(ANSWER, length=10_000))
        with client.stream("POST", f"{server.url}/v1/chat/completions", json=ENDLESS | {"max_tokens": 60}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(kind)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(240) == 0  # an hour, if the half-sent body were waited for
        assert read_all(half) == b""
        with pytest.raises(OSError, match="refused"):
            connect(server)


def test_a_log_that_nobody_reads_stops_no_request():
    """A pipe holds 64 KiB; the lines of 20 requests with a path of 6,000 characters are twice that."""
    reader, writer = os.pipe()
    try:
        with running_server(log_to=writer) as server, httpx.Client(timeout=60) as client:
            for _ in range(20):  # more refusals are paced
                assert client.get(f"{server.url}/{'x' * 6000}").status_code == 404
            assert server.stop() == 0
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.slow
def test_tls_serves_and_a_key_that_does_not_fit_is_one_sentence(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
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


@pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="needs Linux")
def test_a_connection_is_not_taken_before_it_sends_something() -> None:
    """Connections that came and went, thousands a second, and idle ones, made protocols of which nothing came."""
    with closing(listen("127.0.0.1", 0)) as bound:
        bound.listen()
        with socket.create_connection(bound.getsockname()) as client:
            assert select.select([bound], [], [], 0.2)[0] == []
            client.sendall(b"G")
            assert select.select([bound], [], [], 10.0)[0] == [bound]
