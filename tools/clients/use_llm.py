"""The command `llm`, with the model in its extra-openai-models.yaml. Each feature is reported as one line of JSON.

python tools/clients/use_llm.py http://127.0.0.1:8000/v1 tiny-gemma4
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?"


def ask(url: str, model: str, *options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"- model_id: served\n  model_name: {model}\n  api_base: {url}\n"]
        Path(folder, "extra-openai-models.yaml").write_text("".join(lines))
        command = [sys.executable, "-m", "llm", "-m", "served", "-o", "max_tokens", "20", *options, QUESTION]
        env = os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr[-300:]


url, model = sys.argv[1:3]
for feature, options in (("stream", []), ("chat", ["--no-stream"])):
    reason = None
    try:
        ask(url, model, *options)
    except Exception as error:  # whatever a client raises is the result
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    print(json.dumps({"feature": feature, "works": reason is None, "reason": reason}), flush=True)
