"""`specdec eval`: a task with a pair, reported as a table, as JSON and as a picture."""

import json
from io import BytesIO
from pathlib import Path

from accelerate import PartialState

from specdec.commands.settings import drafter_name, engine_config, quiet_libraries
from specdec.config import SamplingParams, SpecConfig
from specdec.evaluation.evaluate import evaluate_gsm8k
from specdec.evaluation.files import STDOUT, require_distinct, write_file
from specdec.evaluation.report import markdown, require_matplotlib, save_plot


def evaluate(
    *,
    target: str,
    drafter: str,
    data: str,
    limit: int,
    compare: bool,
    shots: int | None,
    instruction: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    batch_size: int,
    num_steps: int,
    draft_topk: int,
    num_draft_tokens: int | None,
    transcripts: Path | None,
    json_file: Path | None,
    markdown_file: Path | None,
    png_file: Path | None,
    dtype: str | None,
    device: str | None,
) -> None:
    quiet_libraries()
    require_distinct((json_file, markdown_file, png_file))
    if png_file is not None:
        require_matplotlib()
    report = evaluate_gsm8k(
        target,
        drafter_name(target, drafter),
        data=data,
        limit=limit,
        shots=shots,
        instruction=instruction,
        compare=compare,
        params=SamplingParams(max_new_tokens, temperature, top_k, top_p, min_p, seed),
        spec=SpecConfig(num_steps, draft_topk, num_draft_tokens),
        config=engine_config(batch_size, dtype, device),
        folder=transcripts,
    )
    if not PartialState().is_main_process:
        return
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
