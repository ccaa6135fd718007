"""GuideLLM: a short benchmark with synthetic prompts; it needs the model's tokenizer (SPECDEC_TOKENIZER, a folder)."""

import os
import shutil
import subprocess
import tempfile

from checks import run


def benchmark(url: str, model: str) -> None:
    command = shutil.which("guidellm")
    assert command is not None, "guidellm is not on the path"
    options = {
        "backend": f"kind=openai_http,target={url.removesuffix('/v1')},model={model}",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=4",
        "tokenizer": f"kind=huggingface_auto,model={os.environ['SPECDEC_TOKENIZER']}",
        "data": "kind=synthetic_text,prompt_tokens=24,output_tokens=12",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [command, "run", *words, "--disable-console-interactive"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-300:]


run(benchmark=benchmark)
