"""A few examples of each operation by schemathesis, where it is installed; tools/schemathesis.toml has more."""

import os
import subprocess
import sys

import pytest
from server_process import ROOT, running_server

pytest.importorskip("schemathesis")


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, "k-1"], ids=["open", "key"])
def test_no_check_of_schemathesis_fails(key, tmp_path):
    options = ["--max-model-len", "96", "--batch-size", "4"] + (["--api-key", key] if key else [])
    with running_server(*options) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(ROOT / "tools" / "schemathesis.toml")]
        command += ["run", f"{server.url}/openapi.json", "--checks", "all", "--max-examples", "3", "--seed", "1"]
        command += ["--phases", "fuzzing,stateful", "--request-timeout", "300", "--no-shrink"]
        command += ["--header", f"Authorization: Bearer {key}"] if key else []
        run = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | {"COLUMNS": "200"}
        )
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
        assert "16 selected" in run.stdout and " 500 in " not in server.log()
