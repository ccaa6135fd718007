"""`specdec bench --serve URL`: load on a server, as tables and as JSON."""

import json
from typing import Any

from specdec.cli.bench import BenchOptions
from specdec.cli.bodies.settings import log_to_stderr, quiet_libraries
from specdec.config import SamplingParams
from specdec.errors import ConfigError, shown
from specdec.evaluation.load_test.load import run_load
from specdec.evaluation.load_test.load_client import Asking
from specdec.evaluation.load_test.load_report import markdown_tables
from specdec.evaluation.load_test.pace import Pace
from specdec.evaluation.load_test.started_server import Server, require_httpx
from specdec.evaluation.output_files import STDOUT, write_file
from specdec.progress import Interrupted
from specdec.text.prompt_files import read_prompts


def bench_server(options: BenchOptions) -> None:
    assert options.server.serve is not None, options
    quiet_libraries()
    log_to_stderr(options.pair)
    require_httpx()
    # as strict as with an engine of our own
    SamplingParams(options.max_new_tokens, options.temperature, seed=options.seed)
    added = _fields(options.server.body)
    pace = Pace(
        rate=options.server.rate,
        concurrency=options.server.concurrency,
        seed=options.seed,
        timeout=options.server.timeout,
    )
    prompts = read_prompts(options.data, options.limit)
    server = Server(options.server.serve, options.server.api_key)
    asking = Asking(
        url=server.url,
        model=options.server.model or server.first_model(),
        max_new_tokens=options.max_new_tokens,
        chat=not options.raw,
        temperature=options.temperature,
        seed=options.seed,
        body=added,
    )
    try:
        report = run_load(server, asking, pace, prompts)
    except Interrupted as stop:
        if stop.report is not None:
            print(markdown_tables(stop.report))
        raise
    if options.json_file is not None:
        write_file(options.json_file, json.dumps(report.as_json(), indent=2))
    if options.json_file != STDOUT:
        print(markdown_tables(report))


def _fields(body: str | None) -> dict[str, Any]:
    """The object of --body. Raises ConfigError for any other JSON, and for text that is no JSON."""
    if body is None:
        return {}
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f'--body is {shown(body)}; a JSON object is expected, such as {{"ignore_eos": true}}')
    return fields
