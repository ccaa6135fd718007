"""Runs pytest again and again in one tree, each time in a fork of a process that has imported what the tests need.

    python pytest_forks.py < requests > answers         in the root of the tree; a line of JSON each

    request   {"arguments": ["-x", "tests/test_trees.py"], "seconds": 60}
    answer    {"status": 1, "output": "..."}             status null: no end in time; below 0: killed by a signal

Most of a short run of these tests goes into importing torch and transformers. Here that happens once. The code of the
tree itself is imported in every fork, so it may change in between. Needs `os.fork`.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path.cwd()
ENVIRONMENT = ROOT / "tests" / "conftest.py"
"""Sets the variables that libraries read when they are imported."""
PRELOADED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Plugins of pytest are imported before it could rewrite their asserts, and it would say so."""
SAMPLE = ("-q", "--collect-only", "tests")
POLL_SECONDS = 0.02


def fork_pytest(arguments: list[str], seconds: float, *, modules_to: Path | None = None) -> dict[str, object]:
    """One run in a process group of its own, which is ended with whatever the tests have left in it."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            status = 70
            try:
                import pytest

                status = int(pytest.main(arguments))
                if modules_to is not None:
                    modules_to.write_text("\n".join(foreign_modules()))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        deadline, ended, code = time.monotonic() + seconds, 0, 0
        while not ended and time.monotonic() < deadline:
            ended, code = os.waitpid(child, os.WNOHANG)
            if not ended:
                time.sleep(POLL_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"status": os.waitstatus_to_exitcode(code) if ended else None, "output": text}


def foreign_modules() -> list[str]:
    """What is imported now and is not of this tree, in the order in which it was."""
    names = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name != "__main__" and not Path(file).is_relative_to(ROOT):
            names.append(name)
    return names


def preload() -> None:
    """Import what collecting all tests imports, in a fork, and is not of this tree."""
    runpy.run_path(str(ENVIRONMENT))
    with tempfile.NamedTemporaryFile("r", prefix="modules-") as names:
        fork_pytest(list(SAMPLE), 600, modules_to=Path(names.name))
        for name in names.read().split():
            with suppress(BaseException):
                importlib.import_module(name)


def main() -> None:
    sys.path[:0] = [str(ROOT)]
    preload()
    for line in sys.stdin:
        request = json.loads(line)
        answer = fork_pytest([*PRELOADED, *request["arguments"]], request["seconds"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
