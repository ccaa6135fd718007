"""`specdec bench --serve URL`: load on a server, as tables and as JSON."""

import json

from specdec.cli.bench import BenchOptions
from specdec.cli.bodies.settings import prepare_output, shown_when_interrupted
from specdec.cli.options import json_object
from specdec.config import SamplingParams
from specdec.evaluation.load_test.load import run_load
from specdec.evaluation.load_test.load_client import Asking
from specdec.evaluation.load_test.load_report import markdown_tables
from specdec.evaluation.load_test.pace import Pace
from specdec.evaluation.load_test.started_server import Server, require_httpx
from specdec.evaluation.output_files import STDOUT, write_file
from specdec.text.prompt_files import read_prompts


def bench_server(options: BenchOptions) -> None:
    assert options.server.serve is not None, options
    prepare_output(options.pair)
    require_httpx()
    # refuses what an engine of our own would refuse
    SamplingParams(options.max_new_tokens, options.temperature, seed=options.seed)
    body = options.server.body
    added = {} if body is None else json_object("--body", body, ', such as {"ignore_eos": true}')
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
    with shown_when_interrupted(lambda report: print(markdown_tables(report))):
        report = run_load(server, asking, pace, prompts)
    if options.json_file is not None:
        write_file(options.json_file, json.dumps(report.as_json(), indent=2))
    if options.json_file != STDOUT:
        print(markdown_tables(report))
