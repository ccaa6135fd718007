"""`specdec bench`: tokens per second with and without a drafter, or milliseconds of a round."""

import json
from dataclasses import asdict
from pathlib import Path

from specdec.cli.options import PairOptions
from specdec.cli.phases import phases as run_phases_command
from specdec.cli.settings import drafter_name, engine_config, log_to_stderr, quiet_libraries, spec_config
from specdec.config import SamplingParams
from specdec.errors import ConfigError
from specdec.evaluation.bench_run import markdown_table, run_bench
from specdec.evaluation.output_files import STDOUT, write_file
from specdec.progress import Interrupted
from specdec.text.prompt_files import read_prompts


def require_unused(**options: object) -> None:
    """Raises ConfigError for an option that belongs to --shape and --phases."""
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{', '.join(given)} belongs to --shape or --phases; give one of these, or leave it out")


def bench(
    *,
    pair: PairOptions,
    data: Path,
    limit: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch_size: int,
    peer: bool,
    raw: bool,
    json_file: Path | None,
    shape: str | None,
    phases: bool,
    batches: str,
    contexts: str,
    rounds: int,
    drafts: str | None,
    acceptance: str,
    layers: int | None,
    shrink: int,
    profile: bool,
    plot_file: Path | None,
) -> None:
    quiet_libraries()
    log_to_stderr(pair)
    if shape is not None or phases:
        run_phases_command(
            shape=shape,
            pair=pair,
            data=data,
            limit=limit,
            batches=batches,
            contexts=contexts,
            rounds=rounds,
            drafts=drafts,
            acceptance=acceptance,
            layers=layers,
            shrink=shrink,
            peer=peer,
            profile=profile,
            seed=seed,
            json_file=json_file,
            plot_file=plot_file,
        )
        return
    require_unused(drafts=drafts, layers=layers, plot=plot_file, profile=profile or None)
    try:
        report = run_bench(
            target=pair.target,
            drafter=drafter_name(pair),
            prompts=read_prompts(data, limit),
            spec=spec_config(pair),
            config=engine_config(pair, batch_size),
            params=SamplingParams(max_new_tokens, temperature, seed=seed),
            raw=raw,
            peer=peer,
            drafter_options=pair.drafter_options(),
            **pair.loading(),
        )
    except Interrupted as stop:
        if stop.report is not None:
            print(markdown_table(stop.report))
        raise
    if json_file is not None:
        write_file(json_file, json.dumps(asdict(report)))
    if json_file != STDOUT:
        print(markdown_table(report))
