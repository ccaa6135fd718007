"""Runs the client scripts against a server with the bundled pair and prints what works as a table.

    python tools/clients/run.py --python PATH [--python use_llm=PATH] [--node-modules FOLDER] [--server OPTION]

Install the clients yourself, in any environments that they can share; --python names an interpreter for
all scripts, or for one. Scripts whose client is missing are reported as such.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

from server_process import running_server  # noqa: E402

MODEL = "tiny-gemma4"


def results(command: list[str], folder: Path, env: dict[str, str]) -> list[dict[str, object]]:
    """What one script printed, a feature a line; or why it did not start."""
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [{"feature": "start", "works": False, "reason": str(error)}]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    return lines or [{"feature": "start", "works": False, "reason": " ".join(done.stderr.split())[-300:]}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", default=[])
    parser.add_argument("--node-modules", type=Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--server", action="append", default=[])
    asked = parser.parse_args()
    interpreters = dict(each.rpartition("=")[::2] for each in asked.python)  # "" is for all
    scripts = sorted([*HERE.glob("use_*.py"), *HERE.glob("use_*.mjs")])
    scripts = [path for path in scripts if not asked.only or path.stem in asked.only or path.name in asked.only]
    print("| script | feature | works | reason |\n|---|---|---|---|")
    with running_server(*asked.server) as server, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in HERE.iterdir():
            shutil.copy(path, folder) if path.is_file() else None
        if asked.node_modules is not None:
            (folder / "node_modules").symlink_to(asked.node_modules.resolve())
        for path in scripts:
            python = interpreters.get(path.stem) or interpreters.get("") or sys.executable
            program = "node" if path.suffix == ".mjs" else python
            env = os.environ | {"PYTHONPATH": "", "NO_PROXY": "127.0.0.1"}
            env["PATH"] = os.pathsep.join([str(Path(python).parent), env["PATH"]])
            for each in results([program, path.name, f"{server.url}/v1", MODEL], folder, env):
                works = "yes" if each["works"] else "no"
                print(f"| {path.name} | {each['feature']} | {works} | {each['reason'] or ''} |", flush=True)


if __name__ == "__main__":
    main()
