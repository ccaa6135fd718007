"""Check what `make dist` built: the files in wheel and sdist, their metadata, and that the wheel works by itself.

    python tools/check_dist.py dist [--contents]

The wheel is installed with the pinned versions into a new environment in a temporary folder, and the demo of the sdist
runs there: nothing of the checkout is on the path. --contents: only look at what is inside.
"""

import argparse
import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = {"specdec": "specdec", "kvcache": "specdec/kvcache", "attention": "specdec/attention"}
PRODUCT |= {"draft_models": "specdec/draft_models"}  # root folder -> folder in the wheel
SHIPPED = (*PRODUCT, "docs", "examples", "bench", "tests", "tools", ".ci", ".github")  # with the sdist
AT_THE_ROOT = ("*.md", "*.toml", "*.txt", "LICENSE", "Makefile", "MANIFEST.in", ".pre-commit-config.yaml")
LEFT_BEHIND = ("__pycache__", ".pyc")


def files_of(root: Path, folder: str) -> Iterator[str]:
    """Paths from the root of what a folder holds, without what programs leave there."""
    for path in sorted((root / folder).rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and not any(part in name for part in LEFT_BEHIND):
            yield name


def sdist_faults(names: set[str], root: Path) -> list[str]:
    """What the checkout has and the sdist lacks. `names`: of its members, without the folder around them."""
    wanted = {name for folder in SHIPPED for name in files_of(root, folder)}
    wanted |= {path.name for pattern in AT_THE_ROOT for path in root.glob(pattern)}
    return [f"the sdist lacks {name}" for name in sorted(wanted - names)]


def wheel_faults(names: set[str], root: Path) -> list[str]:
    """Files of the product that the wheel lacks, and others that it would put next to the package."""
    wanted = {
        f"{inside}/{name.partition('/')[2]}"
        for folder, inside in PRODUCT.items()
        for name in files_of(root, folder)
        if name.endswith(".py") or folder == "specdec"
    }
    faults = [f"the wheel lacks {name}" for name in sorted(wanted - names)]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        faults.append("the wheel lacks the LICENSE")
    strangers = (name for name in sorted(names) if not name.startswith("specdec/") and ".dist-info/" not in name)
    return [*faults, *(f"the wheel installs {name} outside the package" for name in strangers)]


def metadata_faults(text: str, project: dict[str, object]) -> list[str]:
    """Lists where a METADATA file differs from the [project] table of pyproject.toml and the version."""
    metadata = email.message_from_string(text)
    keys = {"Name": "name", "Version": "version", "Requires-Python": "requires-python", "License-Expression": "license"}
    wanted = {key: project[name] for key, name in keys.items()}
    return [f"{key} is {metadata[key]}, not {value}" for key, value in wanted.items() if metadata[key] != value]


def contents_faults(wheel: Path, sdist: Path, root: Path) -> list[str]:
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    [project["version"]] = re.findall(
        r'^__version__ = "(.+)"$', (root / "specdec" / "__init__.py").read_text("utf-8"), re.M
    )
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode("utf-8")
    return [*sdist_faults(members, root), *wheel_faults(names, root), *metadata_faults(text, project)]


def run_demo(wheel: Path, sdist: Path, root: Path) -> None:
    """Install the wheel by itself, and run the demo of the sdist with it."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        venv.create(home / "venv", with_pip=True)
        python = home / "venv" / "bin" / "python"
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}

        def run(*command: str | Path) -> str:
            done = subprocess.run(
                [*map(str, command)], cwd=home, env=clean, stdout=subprocess.PIPE, text=True, check=True
            )
            return done.stdout

        install = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "-c", root / "constraints.txt")
        run(*install, "torch")  # first, by itself, so that no later requirement chooses another build of it
        run(*install, wheel)
        where = run(python, "-c", "import specdec; print(*specdec.__path__, sep='\\n')").splitlines()
        assert len(where) == 1 and Path(where[0]).is_relative_to(home.resolve()), f"specdec is imported from {where}"
        with tarfile.open(sdist) as archive:
            archive.extractall(home, filter="data")
        [unpacked] = home.glob("specdec_runtime-*/examples")
        (home / "demo.py").write_bytes((unpacked / "demo.py").read_bytes())
        specdec = python.parent / "specdec"
        for command in ((python, "demo.py", "--count", "2"), (specdec, "recipe", "MiMo-7B"), (specdec, "--help")):
            print(f"$ {' '.join(Path(word).name for word in map(str, command))}", flush=True)
            print(run(*command))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the wheel and the sdist are")
    parser.add_argument("--contents", action="store_true", help="only look at what is inside")
    args = parser.parse_args()
    [wheel], [sdist] = (list(args.folder.resolve().glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    faults = contents_faults(wheel, sdist, ROOT)
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        return 1
    if not args.contents:
        run_demo(wheel, sdist, ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
