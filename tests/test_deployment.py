"""The configuration of nginx in docs/deployment.md: nginx itself checks it where it is installed, and else crossplane,
a parser that knows nginx's directives. It streams, and bounds what the server leaves to it."""

import re
import shutil
import socket
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from server_process import running_server

from served_engine import until

PAGE = Path(__file__).resolve().parent.parent / "docs" / "deployment.md"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin") or shutil.which("nginx")
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs the checkout")


def documented(folder: Path, upstream: str = "127.0.0.1:8000", port: int = 8443) -> Path:
    """A whole configuration that includes the documented part, on a port of its own, with files in this folder."""
    [text] = re.findall(r"```nginx\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    part = text.replace("127.0.0.1:8000", upstream).replace("listen 443 ssl;", f"listen 127.0.0.1:{port};")
    part = re.sub(r"ssl_certificate\S* .*\n", "", part).replace("10s;", "1s;")
    (folder / "specdec.conf").write_text(part)
    places = [f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    lines = [f"pid {folder}/pid;", f"error_log {folder}/error.log;", "daemon off;", "events {}"]
    lines += ["http {", "access_log off;", *places, f"include {folder}/specdec.conf;", "}"]
    whole = folder / "nginx.conf"
    whole.write_text("\n".join(lines))
    return whole


def test_the_documented_configuration_is_one_that_nginx_reads(tmp_path):
    whole = documented(tmp_path)
    if NGINX is not None:
        run = subprocess.run([NGINX, "-t", "-c", str(whole)], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return
    crossplane = pytest.importorskip("crossplane", reason="needs nginx or crossplane")
    found = crossplane.parse(str(whole), strict=True)
    assert found["status"] == "ok", found["errors"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.ConnectError:
        return False


@pytest.mark.deep
@pytest.mark.skipif(NGINX is None, reason="needs nginx")
def test_streams_pass_event_by_event_and_a_slow_head_is_ended(tmp_path):
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "ignore_eos": True, "stream": True}
    with running_server() as server:
        port = free_port()
        command = [NGINX, "-c", str(documented(tmp_path, urlsplit(server.url).netloc, port))]
        with subprocess.Popen(command) as proxy, socket.socket() as slow:
            try:
                url = f"http://127.0.0.1:{port}"
                until(answers, url)
                slow.connect(("127.0.0.1", port))
                slow.sendall(b"GET /health HT")
                with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=60) as answer:
                    pieces = list(answer.iter_raw())
                assert len(pieces) > 4 and pieces[-1].endswith(b"data: [DONE]\n\n")
                slow.settimeout(60)
                with pytest.raises(ConnectionResetError):
                    slow.recv(1 << 16)
            finally:
                proxy.terminate()
