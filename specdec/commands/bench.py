"""`specdec bench`: tokens per second of a pair, with and without its drafter."""

import json
from dataclasses import asdict
from pathlib import Path

from specdec.commands.settings import drafter_name, engine_config, quiet_libraries
from specdec.config import SamplingParams, SpecConfig
from specdec.evaluation.bench import markdown_table, run_bench
from specdec.evaluation.data import read_prompts
from specdec.evaluation.files import STDOUT, write_file
from specdec.evaluation.progress import Interrupted


def bench(
    *,
    target: str,
    drafter: str,
    data: Path,
    limit: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch_size: int,
    num_steps: int,
    draft_topk: int,
    num_draft_tokens: int | None,
    peer: bool,
    raw: bool,
    json_file: Path | None,
    dtype: str | None,
    device: str | None,
) -> None:
    quiet_libraries()
    try:
        report = run_bench(
            target=target,
            drafter=drafter_name(target, drafter),
            prompts=read_prompts(data, limit),
            spec=SpecConfig(num_steps, draft_topk, num_draft_tokens),
            config=engine_config(batch_size, dtype, device),
            params=SamplingParams(max_new_tokens, temperature, seed=seed),
            raw=raw,
            peer=peer,
        )
    except Interrupted as stop:
        if stop.report is not None:
            print(markdown_table(stop.report))
        raise
    if json_file is not None:
        write_file(json_file, json.dumps(asdict(report)))
    if json_file != STDOUT:
        print(markdown_table(report))
