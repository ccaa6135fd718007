"""What HTTP costs: a table, and JSON with `--out`.

    start     from `specdec serve` (the bundled pair) to its address, and to the first token of a chat sent at once
    overhead  the same prompts, so many at a time, through `Engine.generate` (which has them all from the start),
              through `AsyncEngine` (the next comes when one has ended) and through a server (likewise): time per token
              on the clock, and CPU time per token of the process that has the engine, with their ratios

    python tools/measure_http.py
    python tools/measure_http.py --parts overhead --clients 1 8 32 --repeats 5
    python tools/measure_http.py --target DIR --drafter DIR --device cuda

The ways take turns, so that what the machine does meanwhile hits all; the server is a process of its own, with its own
engine on the same device. Reported are medians of the repeats.
"""

import argparse
import asyncio
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from specdec import Engine, EngineConfig, SamplingParams
from specdec.cli.bodies.settings import drafter_name, quiet_libraries
from specdec.evaluation.conditions import conditions
from specdec.evaluation.load_test.load import run_load
from specdec.evaluation.load_test.load_client import Asking
from specdec.evaluation.load_test.pace import Pace
from specdec.evaluation.load_test.started_server import Server
from specdec.loading import pick_device
from specdec.models.bundled import HELD_OUT_PROBLEMS
from specdec.serving.async_engine import AsyncEngine
from specdec.text.prompt_files import Problem, read_prompts

GREETING = "specdec serve: "
GENERATE, ASYNC, HTTP = "generate", "AsyncEngine", "HTTP"


@contextmanager
def running_server(options: argparse.Namespace, batch: int) -> Iterator[tuple[str, psutil.Process]]:
    """A server with that many rows: its address and its process."""
    pair = ["--target", options.target, "--drafter", options.drafter]
    where = [] if options.device is None else ["--device", options.device]
    command = [sys.executable, "-m", "specdec.cli", "serve", "--port", "0", "--batch-size", str(batch), *pair, *where]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.startswith(GREETING):
                log.seek(0)
                sys.exit(f"the server did not start:\n{log.read()[-2000:]}")
            yield line.removeprefix(GREETING).strip(), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


def measure_start(options: argparse.Namespace, problems: Sequence[Problem]) -> dict[str, float]:
    chat = {"messages": [{"role": "user", "content": problems[0].text}], "max_tokens": 8, "stream": True}
    begin = time.perf_counter()
    with running_server(options, 8) as (url, server):
        ready = time.perf_counter() - begin
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=chat, timeout=60.0) as response:
            next(line for line in response.iter_lines() if '"content":"' in line and '"content":""' not in line)
            first, used = time.perf_counter() - begin, cpu_seconds(server)
    return {
        "start: its address after, s": ready,
        "start: the first token after, s": first,
        "start: CPU seconds until then": used,
    }


class Pass(NamedTuple):
    """All prompts once."""

    tokens: int
    seconds: float


class Taken(NamedTuple):
    """What a pass took, in milliseconds a token."""

    clock: float
    cpu: float


def measure_overhead(options: argparse.Namespace, problems: Sequence[Problem], clients: int) -> dict[str, float]:
    """The same prompts, so many requests at a time, in every way."""
    config = EngineConfig(max_batch_size=clients, device=options.device)
    drafter = drafter_name(options.target, options.drafter)
    params = SamplingParams(options.new)
    with (
        Engine.from_pretrained(options.target, drafter, config=config) as engine,
        running_server(options, clients) as (url, server),
    ):
        asking = Asking(url=url, model=options.target, max_new_tokens=options.new)
        prompts = [engine.chat_prompt(problem.text) for problem in problems]

        def at_once() -> Pass:
            begin = time.perf_counter()
            tokens = sum(len(output.token_ids) for output in engine.generate(prompts, params, progress=False))
            return Pass(tokens, time.perf_counter() - begin)

        async def one_by_one() -> Pass:
            waiting, tokens = iter(prompts), 0

            async def client() -> None:
                nonlocal tokens
                for prompt in waiting:
                    async for delta in served.stream(prompt, params):
                        tokens += len(delta.token_ids)

            async with AsyncEngine(engine) as served:
                begin = time.perf_counter()
                await asyncio.gather(*(client() for _ in range(clients)))
                return Pass(tokens, time.perf_counter() - begin)

        def through_http() -> Pass:
            report = run_load(Server(url), asking, Pace(concurrency=clients), problems, {"include_usage": True})
            assert report.completed == len(problems), report.errors
            return Pass(report.output_tokens, report.seconds)

        here = psutil.Process()
        ways = {
            GENERATE: (at_once, here),
            ASYNC: (lambda: asyncio.run(one_by_one()), here),
            HTTP: (through_http, server),
        }
        counts = {name: way().tokens for name, (way, _) in ways.items()}  # warms up, and fills the prefix caches
        assert len(set(counts.values())) == 1, f"not the same tokens: {counts}"
        taken: dict[str, list[Taken]] = {name: [] for name in ways}
        for repeat in range(options.repeats):
            for name in ways if repeat % 2 == 0 else reversed(ways):
                way, process = ways[name]
                before, one = cpu_seconds(process), way()
                used = cpu_seconds(process) - before
                taken[name].append(Taken(1e3 * one.seconds / one.tokens, 1e3 * used / one.tokens))
    figures = {}
    for kind in Taken._fields:
        median = {name: statistics.median(getattr(one, kind) for one in taken[name]) for name in ways}
        figures |= {f"{clients} at a time, {kind}: {name}, ms a token": value for name, value in median.items()}
        for name in (GENERATE, ASYNC):
            figures[f"{clients} at a time, {kind}: {HTTP} / {name}"] = median[HTTP] / median[name]
    return figures


def cpu_seconds(process: psutil.Process) -> float:
    """Of all its threads."""
    used = process.cpu_times()
    return float(used.user + used.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("start", "overhead"), default=["start", "overhead"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32], help="requests at a time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=96, help="of each pass at most; three a client, and at least 8")
    parser.add_argument("--new", type=int, default=48, help="most tokens of each request")
    parser.add_argument("--target", default="tiny-gemma4")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--device", help="default: the first GPU, else the CPU")
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    options = parser.parse_args()
    quiet_libraries()
    problems = read_prompts(HELD_OUT_PROBLEMS, options.requests)
    figures: dict[str, float] = {}
    if "start" in options.parts:
        starts = [measure_start(options, problems) for _ in range(options.repeats)]
        figures |= {name: statistics.median(start[name] for start in starts) for name in starts[0]}
    if "overhead" in options.parts:
        for clients in options.clients:
            figures |= measure_overhead(options, problems[: max(8, 3 * clients)], clients)
    known = conditions(pick_device(options.device), shlex.join(sys.argv))
    print("| figure | median |\n|---|---:|")
    for name, value in figures.items():
        print(f"| {name} | {value:.2f} |")
    print("\n" + ", ".join(f"{name} {value}" for name, value in known.items() if value))
    if options.out:
        record = {"conditions": known, "figures": figures}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
