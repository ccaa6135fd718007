"""`specdec bench` of a pair: tokens per second with and without a drafter."""

import json
from dataclasses import asdict

from specdec.cli.bench import BenchOptions
from specdec.cli.bodies.settings import drafter_name, engine_config, prepare_output, shown_when_interrupted, spec_config
from specdec.config import SamplingParams
from specdec.evaluation.bench_run import markdown_table, run_bench
from specdec.evaluation.output_files import STDOUT, write_file
from specdec.text.prompt_files import read_prompts


def bench_pair(options: BenchOptions) -> None:
    prepare_output(options.pair)
    options.timing.require_unused()
    with shown_when_interrupted(lambda report: print(markdown_table(report))):
        report = run_bench(
            target=options.pair.target,
            drafter=drafter_name(options.pair),
            prompts=read_prompts(options.data, options.limit),
            spec=spec_config(options.pair),
            config=engine_config(options.pair, options.batch_size),
            params=SamplingParams(options.max_new_tokens, options.temperature, seed=options.seed),
            raw=options.raw,
            peer=options.peer,
            drafter_options=options.pair.drafter_options(),
            **options.pair.loading(),
        )
    if options.json_file is not None:
        write_file(options.json_file, json.dumps(asdict(report)))
    if options.json_file != STDOUT:
        print(markdown_table(report))
