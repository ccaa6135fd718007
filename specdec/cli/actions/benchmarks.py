"""`specdec bench` and `specdec eval`: measure a pair or the phases of a round; report as table, JSON and picture."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from accelerate import PartialState

from specdec.cli.actions.settings import (
    drafter_name,
    engine_config,
    load_engine,
    pair_arguments,
    prepare_output,
    request_params,
    shown_when_interrupted,
)
from specdec.cli.commands import BenchOptions, EvalOptions
from specdec.cli.output_files import require_distinct, write_report
from specdec.config import SamplingParams, SpecConfig
from specdec.draft_models.lookup import model_of
from specdec.errors import ConfigError
from specdec.evaluation.accuracy import evaluate
from specdec.evaluation.accuracy_report import drawn, markdown
from specdec.evaluation.bench_run import Bench, markdown_table
from specdec.evaluation.data_sets import DATA_SETS, choose, load_data
from specdec.measurement.model_shapes import ON_REQUEST, find_shape
from specdec.measurement.phase_report import drawn_phases, phase_table, require_matplotlib
from specdec.measurement.phase_run import PLAIN, BenchSubject, Plan, run_phases
from specdec.measurement.random_weights import random_subject
from specdec.text.prompt_files import Problem, read_prompts


def bench(options: BenchOptions) -> None:
    (bench_rounds if options.shape is not None or options.phases else bench_pair)(options)


def bench_rounds(options: BenchOptions) -> None:
    prepare_output(options)
    require_outputs(options.json_file, options.plot_file)
    plan = Plan(
        batches=parse_integers("batches", options.batches),
        contexts=parse_integers("contexts", options.contexts),
        rounds=options.rounds,
        peer=options.peer,
        profiled=options.profile,
        command=shlex.join(["specdec", *sys.argv[1:]]),
    )
    with shown_when_interrupted(phase_table):
        subject = pair_subject(options) if options.shape is None else shape_subject(options.shape, options)
        report = run_phases(subject, plan)
    plot = options.plot_file, partial(drawn_phases, report)
    write_report(report.as_json(), phase_table(report), options.json_file, plot)


def require_outputs(*files: Path | None) -> None:
    """Raise ConfigError, before any work, if two files are one, or if the last, a picture, cannot be drawn."""
    require_distinct(files)
    if files[-1] is not None:
        require_matplotlib()


def shape_subject(name: str, options: BenchOptions) -> BenchSubject:
    """The subject of `--shape`: random weights, and prompts of random tokens."""
    if (options.target, options.drafter) != ("tiny-gemma4", "auto"):
        raise ConfigError("--shape makes its own target and drafter; leave out --target and --drafter")
    shape = find_shape(name)
    drafts = {PLAIN: None, **shape.drafts, **(ON_REQUEST if shape.drafts else {})}
    return random_subject(
        shape,
        choose_drafts(drafts, options.drafts),
        weights=options.weights,
        layers=options.layers,
        divisor=options.shrink,
        config=engine_config(options, batch_size=1),
        assumed=parse_numbers("suppose_acceptance", options.suppose_acceptance or "2,3"),
        seed=options.seed,
    )


def pair_subject(options: BenchOptions) -> BenchSubject:
    """The subject of `--phases`: a real pair, on prompts of the data joined to the length of each context."""
    supposed = options.suppose_acceptance
    if options.layers is not None or options.shrink != 1 or options.weights is not None:
        raise ConfigError("--layers, --shrink and --weights are for --shape; a target is measured as it is")
    _, problems = bench_prompts(options)
    engine = load_engine(options, batch_size=1, tensor_parallel=1)  # engines split it later
    drafter, spec = drafter_name(options), engine.spec
    ids = [engine.chat_prompt(problem.text) for problem in problems]
    engine.close()
    shapes: dict[str, SpecConfig | None] = {PLAIN: None}
    if drafter is not None:
        shapes["chain" if spec.topk == 1 else "tree"] = spec
    return BenchSubject(
        name=options.target if drafter is None else f"{options.target} with {drafter}",
        target=engine.target,
        drafter=None if engine.drafter is None else model_of(engine.drafter),  # drafts are fixed, so the model's
        drafts=choose_drafts(shapes, options.drafts),
        prompts=partial(joined_prompts, ids),
        assumed=() if supposed is None else parse_numbers("suppose_acceptance", supposed),
        tensor_parallel=options.tensor_parallel,
    )


def joined_prompts(ids: Sequence[list[int]], batch: int, context: int) -> list[list[int]]:
    """Request i ends with prompt i. Earlier prompts fill the context before it, the first one cut."""
    made = []
    for request in range(batch):
        number, tokens = request, list[int]()
        while len(tokens) < context:
            tokens = [*ids[number % len(ids)], *tokens]
            number -= 1
        made.append(tokens[-context:])
    return made


def choose_drafts(known: Mapping[str, SpecConfig | None], named: str | None) -> dict[str, SpecConfig | None]:
    """The named drafts, in the order of `known`; named None: all but those of ON_REQUEST."""
    names = known.keys() - ON_REQUEST.keys() if named is None else {word.strip() for word in named.split(",")}
    if unknown := names - known.keys():
        raise ConfigError(f"drafts={named!r}: {min(unknown)!r} is not one of {', '.join(known)}")
    return {name: spec for name, spec in known.items() if name in names}


def parse_integers(name: str, words: str) -> list[int]:
    """Parse "1,8,32" or "1k,16k": ascending, without repeats."""
    found = []
    for word in (word.strip().lower() for word in words.split(",")):
        digits, factor = (word[:-1], 1024) if word.endswith("k") else (word, 1)
        if not digits.isdecimal() or not int(digits):
            raise ConfigError(f"{name}={words!r}: positive whole numbers are expected, such as 1,8,32 or 1k,16k")
        found.append(int(digits) * factor)
    return sorted(set(found))


def parse_numbers(name: str, words: str) -> list[float]:
    """Parse "2,3.5": numbers from 1 on, ascending, without repeats."""
    try:
        found = [float(word) for word in words.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= number < 1000 for number in found):
        raise ConfigError(f"{name}={words!r}: numbers from 1 on are expected, such as 2,3.5")
    return sorted(set(found))


def bench_prompts(options: BenchOptions) -> tuple[str, list[Problem]]:
    """The prompts, and their source in words. A named data set gives the first prompts of each category in turn."""
    if options.data in DATA_SETS:
        source, problems = load_data(options.data, str(options.data_folder or "hub"))
        chosen = choose(problems, options.limit or len(problems))
        return f"{options.data}, {source}", [problems[i] for i in chosen]
    if options.data_folder is not None:
        raise ConfigError(f"--data-folder is for {', '.join(DATA_SETS)}, and --data is {options.data!r}; leave it out")
    if not Path(options.data).exists():
        known = ", ".join(DATA_SETS)
        raise ConfigError(f"data={options.data!r}: no such file; a JSONL file is expected, or one of {known}")
    return f"file {Path(options.data).name}", read_prompts(options.data, options.limit)


def bench_pair(options: BenchOptions) -> None:
    prepare_output(options)
    options.require_unused()
    source, prompts = bench_prompts(options)
    params = SamplingParams(options.max_new_tokens, options.temperature, seed=options.seed)
    drafter = drafter_name(options)
    engine = load_engine(options, options.batch_size, prefix_cache=False)
    with engine, shown_when_interrupted(markdown_table):
        bench = Bench(
            engine=engine,
            target=options.target,
            drafter=drafter,
            prompts=prompts,
            params=params,
            raw=options.raw,
            peer=options.peer,
            data=source,
        )
        report = bench.run()
    write_report(report, markdown_table(report), options.json_file, indent=None)


def evaluate_task(options: EvalOptions) -> None:
    prepare_output(options)
    require_outputs(options.json_file, options.markdown_file, options.png_file)
    usual = 8 if options.task == "gsm8k" else 1  # other tasks measure speed, usually one prompt at a time
    # an interruption prints a table only: the files keep the report of the last whole evaluation
    with shown_when_interrupted(markdown):
        report = evaluate(
            options.task,
            data=options.data,
            limit=options.limit,
            shots=options.shots,
            instruction=options.instruction,
            compare=options.compare,
            params=request_params(options),
            folder=options.transcripts,
            **pair_arguments(options, options.batch_size or usual),
        )
    if not PartialState().is_main_process:
        return
    files = (options.markdown_file, partial(markdown, report)), (options.png_file, partial(drawn, report))
    write_report(report, None if options.markdown_file else markdown(report), options.json_file, *files)
