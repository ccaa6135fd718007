"""What is shipped and deployed: wheel and sdist are whole, the version has one place, CI and hooks call targets that
exist; docs/deployment.md and examples/ fit the server: nginx's configuration, a manifest for Kubernetes, a board for
Grafana. nginx itself checks its configuration where it is installed, else crossplane, a parser of its directives."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from server_process import running_server

import specdec
from specdec import Engine, SamplingParams
from specdec.cli.app import program
from specdec.serving.application import create_app
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.server import LAST_SECONDS, OVERDUE_SECONDS
from specdec.serving.server_settings import ServeSettings

from package_files import module_of
from served_engine import until

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the checkout")


@pytest.fixture(scope="module")
def check_dist() -> ModuleType:
    return module_of(ROOT / "tools" / "check_dist.py")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.mark.slow
def test_wheel_and_sdist_are_whole(check_dist, tmp_path):
    copy = tmp_path / "checkout"
    left = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info", ".*_cache", "*.safetensors")
    shutil.copytree(ROOT, copy, ignore=left)
    both = "from setuptools import build_meta as b; b.build_sdist('../dist'); b.build_wheel('../dist')"
    (tmp_path / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", both], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [wheel], [sdist] = (list((tmp_path / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    assert check_dist.contents_faults(wheel, sdist, copy) == []


def test_the_version_has_one_place():
    assert project()["dynamic"] == ["version"] and "version" not in project()
    sources = [path for folder in ("specdec", "tools", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in sources if f'"{specdec.__version__}"' in path.read_text("utf-8")] == ["__init__.py"]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def targets_called(text: str) -> set[str]:
    """Targets of every `make` in a workflow, a hook file or a script."""
    lines = re.findall(r"\bmake ((?:[\w-]+(?:=\S+)? ?)+)", text)
    return {word for line in lines for word in line.split() if "=" not in word}


@pytest.mark.parametrize("name", [".ci/run", ".github/workflows/ci.yml", ".pre-commit-config.yaml"])
def test_the_targets_that_are_called_exist(name):
    text = (ROOT / name).read_text("utf-8")
    called = targets_called(re.sub(r"(?m)^\s*#.*$", "", text))
    assert called and called <= make_targets()


@pytest.mark.parametrize("fails", [False, True])
def test_ci_runs_in_a_copy_where_a_users_checkout_may_lie(fails, tmp_path):
    """A folder with the package's name, its environment inside, spaces on the way: the tests were red in one."""
    checkout, programs, scratch = tmp_path / "checkout", tmp_path / "bin", tmp_path / "tmp"
    for folder in (checkout / ".ci", checkout / ".venv", checkout / "tests", programs, scratch, tmp_path / "shared"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    (checkout / "tests" / "two words.py").touch()
    (programs / "chromium").symlink_to("/bin/true")  # none is installed
    make = programs / "make"
    said = 'pwd\necho "$@"\nls -A\nls -d ../shared tests/*\necho 3 passed'
    make.write_text(f"#!/bin/sh\n{said}\nexit {2 if fails else 0}\n")
    make.chmod(0o755)
    variables = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(scratch)}
    run = ["bash", str(checkout / ".ci" / "run")]
    done = subprocess.run(run, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    place, *lines = done.stdout.splitlines()
    assert Path(place).is_relative_to(scratch) and place.endswith("/a b/specdec"), done.stderr
    assert lines == ["check test", ".ci", "tests", "../shared", "tests/two words.py", "3 passed"]
    assert done.returncode == (2 if fails else 0)
    assert not list(scratch.iterdir())


def test_the_workflow_runs_every_python_that_is_claimed():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    claimed = [c.rpartition(" ")[2] for c in project()["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert workflow["jobs"]["pinned"]["strategy"]["matrix"]["python"] == claimed == ["3.11", "3.12", "3.13"]
    assert project()["requires-python"] == f">={claimed[0]}"


def test_everything_that_is_needed_is_pinned():
    """A requirement without a line in constraints.txt would be another version tomorrow; two have a reason."""
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    extras = project()["optional-dependencies"].values()
    wanted = {re.match(r"[\w-]+", line)[0] for lines in (project()["dependencies"], *extras) for line in lines}
    assert wanted - pinned == {"triton", "setuptools"}  # torch chooses its triton; any setuptools from 77 on builds


@pytest.mark.parametrize("package", ["fastapi", "llguidance", "torch", "transformers", "typer", "uvicorn"])
def test_a_package_whose_older_releases_would_fail_has_one_least_version_wherever_it_is_named(package):
    extras = project()["optional-dependencies"].values()
    named = [line for lines in (project()["dependencies"], *extras) for line in lines if line.startswith(package)]
    assert len(set(named)) == 1 and ">=" in named[0]


def test_the_container_gets_all_that_is_installed():
    """What the Dockerfile copies is in the context, and is all that the build of the package reads."""
    copies = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    copied = {word for line in copies for word in line.split()}
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in ignored
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    tool = project["tool"]["setuptools"]
    folders = {tool["package-dir"].get(package, package.split(".")[0]) for package in tool["packages"]}
    folders = {folder for folder in folders if "/" not in folder}
    files = {"pyproject.toml", "constraints.txt", project["project"]["readme"], *project["project"]["license-files"]}
    assert copied == folders | files
    assert all((ROOT / each).exists() for each in copied)


def test_a_script_next_to_a_clone_named_specdec_imports_the_package(tmp_path):
    """The clone's folder has the package's name and no __init__.py, so Python takes it for a namespace package, unless
    a folder later on the path holds the package itself. An editable install in compat mode puts the checkout there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert settings["tool"]["distutils"]["editable_wheel"]["mode"] == "compat"
    (tmp_path / "specdec").symlink_to(ROOT)
    script = tmp_path / "my.py"
    script.write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\nfrom specdec import __version__\nprint(__version__)\n"
    )
    done = subprocess.run([sys.executable, "-S", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# deployment: pages and examples against the server's own options, routes and metrics


PAGE = ROOT / "docs" / "deployment.md"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin") or shutil.which("nginx")


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


EXAMPLES = ROOT / "examples"
OUTSIDE = {"instance", "replica"}
"""Labels that Prometheus and `examples/ray_serve.py` add."""


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The objects for Kubernetes, by kind."""
    objects = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text("utf-8")))
    assert all(each["apiVersion"] and each["metadata"]["name"] for each in objects)
    return {each["kind"]: each for each in objects}


@pytest.fixture(scope="module")
def pages(shallow_folder) -> dict[str, httpx.Response]:
    """Answers of a server that has served one request, by path; those that are 200."""

    async def ask() -> list[httpx.Response]:
        async with AsyncEngine(engine) as running:
            app = create_app(running, ServeSettings(["m"]))
            await running.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8, ignore_eos=True))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
                return [await client.get(path) for path in ("/live", "/ready", "/metrics")]

    with Engine.from_pretrained(shallow_folder / "tiny-gemma4", shallow_folder / "tiny-gemma4-mtp") as engine:
        return {each.url.path: each for each in asyncio.run(ask()) if each.status_code == 200}


def test_a_manifest_starts_the_server_that_it_probes(manifest, pages):
    """Its arguments are options of `specdec serve`; ports and paths are those of the server in the image."""
    template = manifest["Deployment"]["spec"]["template"]
    [container] = template["spec"]["containers"]
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", (EXAMPLES.parent / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    given = program.commands["serve"].make_context("serve", [*json.loads(entry[1])[2:], *container["args"]]).params
    assert given["host"] == "0.0.0.0"
    [port] = container["ports"]
    assert port["containerPort"] == given["port"]
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert all(each["port"] == port["name"] and each["path"] in pages for each in probes.values())
    assert probes["livenessProbe"]["path"] == "/live" and probes["readinessProbe"]["path"] == "/ready"
    notes = template["metadata"]["annotations"]
    assert notes["prometheus.io/path"] == "/metrics" and int(notes["prometheus.io/port"]) == given["port"]
    assert template["spec"]["terminationGracePeriodSeconds"] > given["stop_seconds"] + LAST_SECONDS + OVERDUE_SECONDS
    assert container["resources"]["limits"]["nvidia.com/gpu"] == given["tensor_parallel"] == 2


def test_the_objects_of_a_manifest_name_each_other(manifest):
    spec = manifest["Deployment"]["spec"]
    labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
    assert spec["replicas"] == 2
    assert spec["selector"]["matchLabels"] == labels == manifest["Service"]["spec"]["selector"]
    assert manifest["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    [container] = pod["containers"]
    assert [each["targetPort"] for each in manifest["Service"]["spec"]["ports"]] == [container["ports"][0]["name"]]
    [volume], [mount] = pod["volumes"], container["volumeMounts"]
    assert volume["name"] == mount["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == manifest["PersistentVolumeClaim"]["metadata"]["name"]
    dockerfile = (EXAMPLES.parent / "Dockerfile").read_text("utf-8")
    assert f"HF_HOME={mount['mountPath']}/" in dockerfile
    assert f"--uid {pod['securityContext']['runAsUser']} " in dockerfile


def test_a_board_asks_for_metrics_that_there_are(pages):
    """Its names and labels are those that /metrics prints; it takes rates only of what grows."""
    board = json.loads((EXAMPLES / "grafana.json").read_text("utf-8"))
    families = text_string_to_metric_families(pages["/metrics"].text)
    labels = {sample.name: sample.labels.keys() | OUTSIDE for each in families for sample in each.samples}
    [known] = [each["name"] for each in board["templating"]["list"] if each["type"] == "query"]
    assert len({each["id"] for each in board["panels"]}) == len(board["panels"]) > 10
    for panel in board["panels"]:
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            asked = target["expr"]
            names = re.findall(r"\b(?:vllm|specdec):\w+", asked)
            assert names and not set(names) - labels.keys(), asked
            assert all(name.endswith(("_total", "_bucket")) for name in re.findall(r"rate\(([\w:]+)", asked)), asked
            assert asked.count("(") == asked.count(")") and asked.count(f'{{{known}=~"${known}"}}') == len(names)
            by = {word for group in re.findall(r"by \(([^)]*)\)", asked) for word in group.split(", ")}
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert by <= set.intersection(*(labels[name] for name in names)) and shown <= by, asked
