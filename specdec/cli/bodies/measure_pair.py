"""`specdec bench` and `specdec eval` of a pair: a report as a table, as JSON and as a picture."""

import json
from dataclasses import asdict
from io import BytesIO

from accelerate import PartialState

from specdec.cli.bodies.settings import engine_config, pair_arguments, prepare_output, shown_when_interrupted
from specdec.cli.commands import BenchOptions, EvalOptions
from specdec.config import SamplingParams
from specdec.evaluation.accuracy import evaluate
from specdec.evaluation.bench_run import markdown_table, run_bench
from specdec.evaluation.gsm8k_report import markdown, require_matplotlib, save_plot
from specdec.evaluation.output_files import STDOUT, require_distinct, write_file
from specdec.text.prompt_files import read_prompts

BATCH_SIZES = {"gsm8k": 8}
"""By task; the others measure speed, for which one prompt at a time is the usual measure."""


def bench_pair(options: BenchOptions) -> None:
    prepare_output(options.pair)
    options.timing.require_unused()
    with shown_when_interrupted(lambda report: print(markdown_table(report))):
        report = run_bench(
            prompts=read_prompts(options.data, options.limit),
            params=SamplingParams(options.max_new_tokens, options.temperature, seed=options.seed),
            raw=options.raw,
            peer=options.peer,
            **pair_arguments(options.pair, engine_config(options.pair, options.batch_size)),
            **options.pair.loading(),
        )
    if options.json_file is not None:
        write_file(options.json_file, json.dumps(asdict(report)))
    if options.json_file != STDOUT:
        print(markdown_table(report))


def evaluate_task(options: EvalOptions) -> None:
    prepare_output(options.pair)
    require_distinct((options.json_file, options.markdown_file, options.png_file))
    if options.png_file is not None:
        require_matplotlib()
    config = engine_config(options.pair, options.batch_size or BATCH_SIZES.get(options.task, 1))
    # the files keep the report of a whole evaluation
    with shown_when_interrupted(lambda report: print(markdown(report))):
        report = evaluate(
            options.task,
            data=options.data,
            limit=options.limit,
            shots=options.shots,
            instruction=options.instruction,
            compare=options.compare,
            params=SamplingParams(**asdict(options.sampling)),
            folder=options.transcripts,
            **pair_arguments(options.pair, config),
            **options.pair.loading(),
        )
    if not PartialState().is_main_process:
        return
    if options.json_file is not None:
        write_file(options.json_file, json.dumps(report, indent=2))
    if options.markdown_file is not None:
        write_file(options.markdown_file, markdown(report))
    elif STDOUT not in (options.json_file, options.png_file):
        print(markdown(report))
    if options.png_file is not None:
        picture = BytesIO()
        save_plot(report, picture)
        write_file(options.png_file, picture.getvalue())
