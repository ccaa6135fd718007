"""What is shipped: wheel and sdist are whole, the version has one place, and CI and hooks call targets that exist."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from script_module import module_of

import specdec

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


def test_a_script_beside_a_clone_named_specdec_imports_the_package(tmp_path):
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
