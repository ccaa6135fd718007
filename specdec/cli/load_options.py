"""`specdec bench --serve URL`: load on a server, as tables and as JSON."""

import json
from pathlib import Path

from specdec.cli.options import json_object
from specdec.config import SamplingParams
from specdec.evaluation.load_test.load import run_load
from specdec.evaluation.load_test.load_client import Asking
from specdec.evaluation.load_test.load_report import markdown_tables
from specdec.evaluation.load_test.pace import Pace
from specdec.evaluation.load_test.started_server import Server, require_httpx
from specdec.evaluation.output_files import STDOUT, write_file
from specdec.progress import Interrupted
from specdec.text.prompt_files import read_prompts


def load(
    *,
    serve: str,
    data: Path,
    limit: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    raw: bool,
    json_file: Path | None,
    rate: float | None,
    concurrency: int | None,
    model: str | None,
    api_key: str | None,
    body: str | None,
    timeout: float,
) -> None:
    require_httpx()
    SamplingParams(max_new_tokens, temperature, seed=seed)  # as strict as where the engine is our own
    added = {} if body is None else json_object("--body", body, such_as='{"ignore_eos": true}')
    pace = Pace(rate=rate, concurrency=concurrency, seed=seed, timeout=timeout)
    prompts = read_prompts(data, limit)
    server = Server(serve, api_key)
    asking = Asking(
        url=server.url,
        model=model or server.first_model(),
        max_new_tokens=max_new_tokens,
        chat=not raw,
        temperature=temperature,
        seed=seed,
        body=added,
    )
    try:
        report = run_load(server, asking, pace, prompts)
    except Interrupted as stop:
        if stop.report is not None:
            print(markdown_tables(stop.report))
        raise
    if json_file is not None:
        write_file(json_file, json.dumps(report.as_json(), indent=2))
    if json_file != STDOUT:
        print(markdown_tables(report))
