"""The command `llm`, with the model in its extra-openai-models.yaml."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import QUESTION, run


def ask(url: str, model: str, *options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"- model_id: served\n  model_name: {model}\n  api_base: {url}\n"]
        Path(folder, "extra-openai-models.yaml").write_text("".join(lines))
        command = [sys.executable, "-m", "llm", "-m", "served", "-o", "max_tokens", "20", *options, QUESTION]
        env = os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr[-300:]


def stream(url: str, model: str) -> None:
    ask(url, model)


def chat(url: str, model: str) -> None:
    ask(url, model, "--no-stream")


run(chat=chat, stream=stream)
