"""`specdec eval`: a task with a pair, reported as a table, as JSON and as a picture."""

import json
from io import BytesIO
from pathlib import Path

from accelerate import PartialState

from specdec.cli.options import PairOptions
from specdec.cli.settings import drafter_name, engine_config, log_to_stderr, quiet_libraries, spec_config
from specdec.config import SamplingParams
from specdec.evaluation.accuracy import evaluate as run_task
from specdec.evaluation.gsm8k_plot import require_matplotlib, save_plot
from specdec.evaluation.gsm8k_report import Report, markdown
from specdec.evaluation.output_files import STDOUT, require_distinct, write_file
from specdec.progress import Interrupted

BATCH_SIZES = {"gsm8k": 8}
"""By task; the others measure speed, for which one prompt at a time is the usual measure."""


def evaluate(
    *,
    task: str,
    pair: PairOptions,
    data: str,
    limit: int,
    compare: bool | None,
    shots: int | None,
    instruction: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    batch_size: int | None,
    transcripts: Path | None,
    json_file: Path | None,
    markdown_file: Path | None,
    png_file: Path | None,
) -> None:
    quiet_libraries()
    log_to_stderr(pair)
    require_distinct((json_file, markdown_file, png_file))
    if png_file is not None:
        require_matplotlib()
    try:
        report = run_task(
            task,
            pair.target,
            drafter_name(pair),
            data=data,
            limit=limit,
            shots=shots,
            instruction=instruction,
            compare=compare,
            params=SamplingParams(max_new_tokens, temperature, top_k, top_p, min_p, seed),
            spec=spec_config(pair),
            config=engine_config(pair, batch_size or BATCH_SIZES.get(task, 1)),
            folder=transcripts,
            drafter_options=pair.drafter_options(),
            **pair.loading(),
        )
    except Interrupted as stop:  # what was finished is shown; the files keep the report of a whole evaluation
        if stop.report is not None:
            print(markdown(stop.report))
        raise
    if PartialState().is_main_process:
        write_report(report, json_file, markdown_file, png_file)


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
