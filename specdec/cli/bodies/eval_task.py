"""`specdec eval`: a task with a pair, reported as a table, as JSON and as a picture."""

import json
from io import BytesIO
from pathlib import Path

from accelerate import PartialState

from specdec.cli.bodies.settings import drafter_name, engine_config, prepare_output, shown_when_interrupted, spec_config
from specdec.cli.evaluate import EvalOptions
from specdec.config import SamplingParams
from specdec.evaluation.accuracy import evaluate
from specdec.evaluation.gsm8k_plot import require_matplotlib, save_plot
from specdec.evaluation.gsm8k_report import Report, markdown
from specdec.evaluation.output_files import STDOUT, require_distinct, write_file

BATCH_SIZES = {"gsm8k": 8}
"""By task; the others measure speed, for which one prompt at a time is the usual measure."""


def evaluate_task(options: EvalOptions) -> None:
    prepare_output(options.pair)
    require_distinct((options.json_file, options.markdown_file, options.png_file))
    if options.png_file is not None:
        require_matplotlib()
    params = SamplingParams(
        options.max_new_tokens, options.temperature, options.top_k, options.top_p, options.min_p, options.seed
    )
    # the files keep the report of a whole evaluation
    with shown_when_interrupted(lambda report: print(markdown(report))):
        report = evaluate(
            options.task,
            options.pair.target,
            drafter_name(options.pair),
            data=options.data,
            limit=options.limit,
            shots=options.shots,
            instruction=options.instruction,
            compare=options.compare,
            params=params,
            spec=spec_config(options.pair),
            config=engine_config(options.pair, options.batch_size or BATCH_SIZES.get(options.task, 1)),
            folder=options.transcripts,
            drafter_options=options.pair.drafter_options(),
            **options.pair.loading(),
        )
    if PartialState().is_main_process:
        write_report(report, options.json_file, options.markdown_file, options.png_file)


def write_report(report: Report, json_file: Path | None, markdown_file: Path | None, png_file: Path | None) -> None:
    """To the files that are named; the table is printed unless it has one, or standard output is taken."""
    if json_file is not None:
        write_file(json_file, json.dumps(report, indent=2))
    if markdown_file is not None:
        write_file(markdown_file, markdown(report))
    elif STDOUT not in (json_file, png_file):
        print(markdown(report))
    if png_file is not None:
        picture = BytesIO()
        save_plot(report, picture)
        write_file(png_file, picture.getvalue())
