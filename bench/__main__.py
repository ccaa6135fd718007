"""Runs cases: `python -m bench NAME...`; `--list` prints them, and `plot` the picture of the README.

    python -m bench --list
    python -m bench products --formats bf16 int4-g32 --rows 1 16 --json out.json
    python -m bench paged-attention tables --quick
    python -m bench bits --device cpu
    python -m bench readme
    python -m bench plot > docs/decode_speed.svg

An option of a case is given as `--batches 1 8`; it holds for every case that has it. Exits with 1 when a check fails,
with 2 where there is no GPU to run on, with 130 after Ctrl-C, which keeps the rows so far.
"""

import argparse
import inspect
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.device import DEVICE, ON_CPU, free_memory, machine  # isort: skip - before triton
import torch

from bench.figures import decode_speed_svg
from bench.registry import CASES, Case
from bench.report import Report, Row, table_head, table_row
from bench.verify import attempt_all
from specdec.cli.output_files import require_writable
from specdec.errors import ConfigError, error_summary
from specdec.measurement.conditions import conditions


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if list(words) == ["plot"]:
        print(decode_speed_svg(), end="")
        return 0
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench", description=__doc__, allow_abbrev=False, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases of --list")
    parser.add_argument("--list", action="store_true", help="print the cases and their options")
    parser.add_argument("--quick", action="store_true", help="short: to see that a case runs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: kernels are interpreted")
    parser.add_argument("--seconds", type=float, help="begin no row after this many seconds")
    parser.add_argument("--out", type=Path, help="write the tables there too")
    parser.add_argument("--json", type=Path, help="write rows and conditions there")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    given, rest = parser.parse_known_args(words)
    if given.list or not given.names:
        print_cases()
        return 0
    unknown = [name for name in given.names if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]!r} is no case; choose of {', '.join(CASES)}")
    cases = [CASES[name] for name in given.names]
    options = read_options(parser, cases, rest)
    try:
        for path in filter(None, (given.out, given.json)):
            require_writable(path)
    except ConfigError as error:
        parser.error(str(error))
    if reason := next(filter(None, map(refusal, cases)), None):
        print(f"{reason}: nothing was checked", file=sys.stderr)
        return 2
    known = {part: None for case in cases for part in parts_of(case)}
    if unknown := [part for part in options.get("parts", []) if part not in known]:
        parser.error(f"{unknown[0]!r} is no part of {', '.join(given.names)}; choose of {', '.join(known)}")
    torch.manual_seed(0)
    if given.warm is not None:
        return warm(cases, options, given.quick, given.warm)
    command = shlex.join(["python", "-m", "bench", *words])
    facts = conditions(DEVICE if torch.cuda.is_available() else torch.device("cpu"), command)
    report = Report(f"`{command}`, {facts['date']}, commit {facts['commit']}; {machine()}", given.seconds)
    try:
        for case in cases:
            run_case(case, {**case.values(ON_CPU, given.quick), **options}, report, words)
    except KeyboardInterrupt:  # the rows so far are kept
        report.finish(given.out, given.json, facts)
        return 130
    return report.finish(given.out, given.json, facts)


def print_cases() -> None:
    print(table_head(("case", "what", "against", "options")))
    for case in CASES.values():
        said = "; ".join(f"{name} {_words(value)}" for name, value in case.values().items() if value)
        print(table_row([case.name, case.what, case.against, said]))


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def read_options(parser: argparse.ArgumentParser, cases: Sequence[Case], rest: Sequence[str]) -> dict[str, Any]:
    """What the command line says of the options of these cases."""
    own = argparse.ArgumentParser(parser.prog, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    for name, value in {name: value for case in cases for name, value in case.values().items()}.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            own.add_argument(flag, dest=name, action="store_true")
        else:
            own.add_argument(flag, dest=name, type=number_or_word, nargs="*" if isinstance(value, list) else None)
    return vars(own.parse_args(rest))


def number_or_word(word: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def refusal(case: Case) -> str | None:
    """Why the case cannot run here; None: it can."""
    if ON_CPU:
        return f"{case.name} needs a GPU" if case.cpu is None else None
    if case.gpus == 0:
        return None
    visible = torch.cuda.device_count()
    return None if visible >= case.gpus else f"{case.name} needs {case.gpus} CUDA devices, and {visible} are there"


def parts_of(case: Case) -> list[str]:
    """Its parts, those of `cases.toml` and those that run only if they are named."""
    return [name.removesuffix("_rows") for name in vars(import_module(case.path)) if name.endswith("_rows")]


def chosen_options(function: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are arguments of a part."""
    return {name: options[name] for name in inspect.signature(function).parameters if name in options}


def run_case(case: Case, options: Mapping[str, Any], report: Report, words: Sequence[str]) -> None:
    module = import_module(case.path)
    warm_up(module, words)
    failed = len(report.failed)
    for part in (each for each in options["parts"] if each in parts_of(case)):
        if part in case.timed and len(report.failed) > failed:
            report.add(case.name, [Row(part, "left out, since a check failed")])
        elif report.is_over:
            report.add(case.name, [Row(part, "left out", "the seconds are over")])
        else:
            rows, known = getattr(module, f"{part}_rows"), len(report.rows)
            with torch.no_grad():
                report.add(case.name, attempt_all(f"{case.name}: {part}", rows(**chosen_options(rows, options))))
            if len(report.rows) == known:
                report.add(case.name, [Row(part, "no row: these options leave nothing to do", ok=False)])
        free_memory()


def warm_up(module: ModuleType, words: Sequence[str]) -> None:
    """Compile what the case launches, in as many processes as there are cores."""
    if ON_CPU or "--quick" in words or not hasattr(module, "warm_jobs"):
        return
    processes, begin = max(1, min(15, (os.cpu_count() or 2) - 1)), time.perf_counter()
    command = [sys.executable, "-m", "bench", *words]
    children = [subprocess.Popen([*command, "--warm", f"{i}/{processes}"]) for i in range(processes)]
    for child in children:
        child.wait()
    print(f"compiled by {processes} processes in {time.perf_counter() - begin:.0f} s", flush=True)


def warm(cases: Sequence[Case], options: Mapping[str, Any], quick: bool, share: str) -> int:
    """One share of the launches of these cases; what goes wrong, the run itself will tell."""
    index, count = map(int, share.split("/"))
    for case in cases:
        module = import_module(case.path)
        jobs = getattr(module, "warm_jobs", list)
        made = jobs(**chosen_options(jobs, {**case.values(ON_CPU, quick), **options}))
        for job in made[index::count]:
            try:
                with torch.no_grad():
                    job()
            except Exception as error:
                print(f"warm: {error_summary(error)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
