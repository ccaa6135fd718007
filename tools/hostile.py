"""One server, 16 good streams all the time, and beside them every kind of harm: is anybody but the hostile touched?

    python tools/hostile.py                          all kinds of `hostile_kinds.py`, one by one, then some at once
    python tools/hostile.py --only idle digit --seconds 10
    python tools/hostile.py --out figures.json

    good       16 streams of four API keys, over and over; the right text of each was taken while the server was quiet
    hostile    a process that does one kind after the other, by its own API keys, with a quiet phase behind every few
    probe      a process that asks /health every 100 ms on a new connection, and reads the server's memory

The server has an operator's settings: a file of keys and bounds for each of them (OPTIONS). Prints a table of the kinds
and a line for each thing that must hold, and returns 1 when one does not. Times are ratios to the quiet phases around.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from specdec.evaluation.conditions import conditions
from specdec.loading import pick_device
from specdec.models.bundled import HELD_OUT_PROBLEMS
from specdec.text.prompt_files import read_prompts

sys.path.insert(0, str(Path(__file__).resolve().parent))
from hostile_kinds import CHAT, KINDS, Attacker

from bench.report import table_head, table_row

ROOT = Path(__file__).resolve().parent.parent
GREETING = "specdec serve: "
GOOD_KEYS = [f"sk-good-{number}" for number in range(4)]
HOSTILE_KEYS = ["sk-hostile-0", "sk-hostile-1"]
OPTIONS = ["--batch-size", "32", "--max-model-len", "1024", "--max-waiting", "64", "--page-size", "16"]
OPTIONS += ["--client-concurrency", "8", "--max-connections", "600", "--timeout-headers", "5", "--timeout-body", "10"]
BESIDE = 8  # kinds that go on together, where some do
PATIENCE = 10.0  # seconds beyond its time after which a kind is cut off
SLOWER = 3.0
HEALTH = 0.1
MEMORY = 1.1

WRONG, UNWELL = "good streams that were wrong", "/health that did not say 200"
SLOWEST = "slowest good stream / median of the quiet phases around it"
SLOW_KIND = "median of the good streams beside one kind, likewise"
HEALTHY = "/health under attack, p50 / p99 / most"
GROWN = "memory at the start / before / most / after"
STATUSES, LIVES, TRACEBACKS = "statuses that must not be", "the process lives", "tracebacks in the log"

fork = multiprocessing.get_context("fork")


class Served(NamedTuple):
    process: psutil.Process
    address: tuple[str, int]
    log: Path


class Answer(NamedTuple):
    """Figures of one good stream: what it took a token, all waiting included, and whether its text was right."""

    middle: float  # by time.monotonic
    per_token: float
    wrong: str  # empty: it was right


class Probed(NamedTuple):
    """late: how much longer a sleep of 1 ms took just before, which says how busy the machine is."""

    at: float
    seconds: float
    late: float
    memory: int
    trouble: str


class Phase(NamedTuple):
    """kinds: none in a quiet one."""

    kinds: tuple[str, ...]
    began: float
    ended: float
    got: dict[str, dict[str, int]]
    load: float

    def holds(self, moment: float) -> bool:
        return self.began <= moment < self.ended


class Record(NamedTuple):
    phases: list[Phase]
    answers: list[Answer]
    probed: list[Probed]
    log: str
    alive: bool
    first: int  # memory of the server before the first good stream


@contextlib.contextmanager
def running_server(options: Sequence[str]) -> Iterator[Served]:
    """The bundled pair in a process of its own, one thread for arithmetic."""
    with tempfile.TemporaryDirectory() as folder:
        keys, log = Path(folder, "keys"), Path(folder, "log")
        keys.write_text("".join(f"{key[3:]} {key}\n" for key in [*GOOD_KEYS, *HOSTILE_KEYS]))
        command = [sys.executable, "-m", "specdec.cli", "serve", "--port", "0", "--api-key-file", str(keys), *options]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=variables)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.startswith(GREETING):
                sys.exit(f"the server did not start:\n{log.read_text()[-2000:]}")
            parts = urlsplit(line.removeprefix(GREETING).strip())
            assert parts.hostname and parts.port
            yield Served(psutil.Process(process.pid), (parts.hostname, parts.port), log)
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


class Good:
    """A client who asks for the same stream over and over."""

    def __init__(self, number: int, prompt: str, new: int, address: tuple[str, int]) -> None:
        how = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": new, "ignore_eos": True} | how
        self.body = json.dumps(body | {"stream": True}).encode()
        self.new = new
        self.client = Attacker(address, GOOD_KEYS[number % 4], (), Counter(), 0.0, "")  # for how it sends
        self.text = ""  # the right one
        self.answers: list[Answer] = []

    async def ask(self) -> str:
        said = await self.client.post(CHAT, self.body)
        head, _, body = said.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in body:
            raise ConnectionError(f"{head[9:12].decode() or 'closed'} {body[-300:].decode(errors='replace')}")
        events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
        return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])

    async def go_on(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            began, wrong = time.monotonic(), ""
            try:
                text = await self.ask()
                wrong = "" if text == self.text else f"another text: {text!r}"
            except (OSError, ValueError, KeyError) as error:
                wrong = f"{type(error).__name__}: {error}"
            now = time.monotonic()
            self.answers.append(Answer((began + now) / 2, (now - began) / self.new, wrong))
            if wrong:
                await asyncio.sleep(0.2)


def probe(served: Served, ended: "multiprocessing.synchronize.Event", pipe: Connection) -> None:
    """A process of its own, in front of others where that is allowed, so that it measures the server alone."""
    with contextlib.suppress(OSError):
        os.nice(-10)
    found: list[Probed] = []
    while not ended.is_set():
        slept = time.monotonic()
        time.sleep(0.001)
        late = time.monotonic() - slept - 0.001
        began, trouble = time.monotonic(), ""
        try:
            trouble = _health(served.address)
        except OSError as error:
            trouble = repr(error)
        seconds = time.monotonic() - began
        found.append(Probed(began, seconds, late, memory(served.process), trouble))
        ended.wait(max(0.0, 0.1 - seconds))
    pipe.send(found)


def _health(address: tuple[str, int]) -> str:
    """-> what is wrong with the answer"""
    import socket

    with socket.create_connection(address, timeout=30) as made:
        made.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        said = b""
        while block := made.recv(4096):
            said += block
    return "" if said.startswith(b"HTTP/1.1 200") else repr(said[:200])


def memory(process: psutil.Process) -> int:
    """Bytes of the server and of the processes in which it compiles grammars."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for each in [process, *process.children()]:
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def attack(served: Served, prompts: Sequence[str], pipe: Connection) -> None:
    """A process of its own, which takes what time others leave: hostile clients have machines of their own."""
    os.nice(5)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    while order := pipe.recv():
        pipe.send(asyncio.run(_attack(served, prompts, *order)))


async def _attack(
    served: Served, prompts: Sequence[str], kinds: Sequence[str], clients: int, seconds: float
) -> dict[str, dict[str, int]]:
    got: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    until = time.monotonic() + seconds

    async def go_on(kind: str, number: int) -> None:
        key = HOSTILE_KEYS[number % len(HOSTILE_KEYS)]
        client = Attacker(served.address, key, prompts, got[kind], until, f"{kind} {number}")
        while client.left:
            try:
                await KINDS[kind](client)
            except OSError as error:
                got[kind][type(error).__name__] += 1
                await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(go_on(kind, number)) for kind in kinds for number in range(clients)]
    _, late = await asyncio.wait(tasks, timeout=seconds + PATIENCE)
    for kind, task in zip([kind for kind in kinds for _ in range(clients)], tasks, strict=True):
        got[kind]["cut off"] += task in late
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return {kind: {name: count for name, count in each.items() if count} for kind, each in got.items()}


async def hold_under_attack(given: argparse.Namespace, kinds: Sequence[str], served: Served) -> Record:
    """The whole run."""
    prompts = [problem.text for problem in read_prompts(HELD_OUT_PROBLEMS, given.streams)]
    good = [Good(number, prompt, given.new, served.address) for number, prompt in enumerate(prompts)]
    (ours, theirs), (read, write) = fork.Pipe(), fork.Pipe(duplex=False)
    probing = fork.Event()
    attacker = fork.Process(target=attack, args=(served, prompts, theirs), daemon=True)
    prober = fork.Process(target=probe, args=(served, probing, write), daemon=True)
    attacker.start(), prober.start()
    first = memory(served.process)
    for each in good:
        each.text = await each.ask()
    ended = asyncio.Event()
    going = [asyncio.create_task(each.go_on(ended)) for each in good]
    phases: list[Phase] = []

    def answers() -> list[Answer]:
        return [answer for each in good for answer in each.answers]

    async def phase(kinds: Sequence[str], seconds: float, clients: int = 0) -> None:
        began, got = time.monotonic(), {}
        if kinds:
            ours.send((kinds, clients, seconds))
            got = await asyncio.to_thread(ours.recv)
        else:
            before = len(answers())
            while time.monotonic() < began + seconds or len(answers()) < before + len(good):
                await asyncio.sleep(0.1)
        phases.append(Phase(tuple(kinds), began, time.monotonic(), got, os.getloadavg()[0]))
        done = ", ".join(f"{name} {count}" for each in got.values() for name, count in each.items())
        print(
            f"# {phases[-1].ended - began:.1f} s: {' + '.join(kinds) or 'quiet'}: {done}", file=sys.stderr, flush=True
        )

    await phase((), given.quiet)
    groups = [[(kind,) for kind in kinds[at : at + given.group]] for at in range(0, len(kinds), given.group)]
    draw = random.Random(given.seed)
    groups += [[tuple(draw.sample(kinds, min(BESIDE, len(kinds))))] for _ in range(given.mixed)]
    if given.together:
        groups = [[tuple(kinds)]]
    for group in groups:
        for together in group:
            await phase(together, given.seconds, 2 if len(together) > 1 else given.attackers)
        await phase((), given.quiet)
    if given.settle:
        await phase((), given.settle)  # the server asks memory back for 32 s after it grew
    ended.set()
    await asyncio.gather(*going)
    probing.set()
    probed = await asyncio.to_thread(read.recv)
    ours.send(None)
    attacker.join(), prober.join()
    return Record(phases, answers(), probed, served.log.read_text(errors="replace"), served.process.is_running(), first)


class Figures(NamedTuple):
    """Figures of a phase. median, worst: of its good streams, a token, against the quiet phases around it."""

    streams: int
    median: float
    worst: float
    health: tuple[float, float, float]  # median, p99 and most, in seconds
    memory: float  # most, MB


def figures_of(record: Record, phase: Phase) -> Figures:
    at = record.phases.index(phase)
    quiet = [each for each in record.phases[:at] if not each.kinds][-1:]
    quiet += [each for each in record.phases[at:] if not each.kinds][:1]
    usual = statistics.median(
        [a.per_token for a in record.answers if any(each.holds(a.middle) for each in quiet)] or [1]
    )
    slow = [answer.per_token / usual for answer in record.answers if phase.holds(answer.middle)] or [0.0]
    probed = [each for each in record.probed if phase.holds(each.at)]
    took = [each.seconds for each in probed]
    most = max((each.memory for each in probed), default=0) / 1e6
    return Figures(len(slow), statistics.median(slow), max(slow), (*quantiles(took), max(took, default=0.0)), most)


def quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and p99."""
    ordered = sorted(seconds) or [0.0]
    return ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]


def verdicts(record: Record, before: float) -> list[tuple[str, str, bool]]:
    """What must hold: what was found, and whether it does. before: memory in MB when the attack began."""
    attacked = [phase for phase in record.phases if phase.kinds]
    known = [figures_of(record, phase) for phase in attacked]
    quiet = [figures_of(record, phase) for phase in record.phases if not phase.kinds]
    wrong = [answer.wrong for answer in record.answers if answer.wrong]
    took = [p.seconds for p in record.probed if any(phase.holds(p.at) for phase in attacked)]
    calm = [p.seconds for p in record.probed if not any(phase.holds(p.at) for phase in attacked)]
    late = quantiles([p.late for p in record.probed])[1]
    trouble = [p.trouble for p in record.probed if p.trouble]
    last = record.phases[-1]
    after = statistics.median(p.memory for p in record.probed if last.holds(p.at) and p.at >= last.ended - 5) / 1e6
    peak = max(p.memory for p in record.probed) / 1e6
    got = [name for phase in attacked for each in phase.got.values() for name in each]
    bad = sorted({name for name in got if (name[0] == "5" and name != "503") or name == "leak"})
    worst = max(each.worst for each in known)
    health, calmly = (*quantiles(took), max(took)), (*quantiles(calm), max(calm))
    slowest = max(each.median for each in known)
    return [
        (WRONG, f"{len(wrong)} of {len(record.answers)} {wrong[:3] or ''}", not wrong),
        (
            SLOWEST,
            f"{worst:.2f} (of the quiet phases themselves: {max(each.worst for each in quiet):.2f})",
            worst <= SLOWER,
        ),
        (SLOW_KIND, f"{slowest:.2f}", slowest <= SLOWER),
        (
            HEALTHY,
            f"{in_ms(health)} of {len(took)} (quiet: {in_ms(calmly)}; a sleep was late by {in_ms([late])} at p99)",
            health[1] < HEALTH,
        ),
        (UNWELL, f"{len(trouble)} {trouble[:3] or ''}", not trouble),
        (
            GROWN,
            f"{record.first / 1e6:.0f} / {before:.0f} / {peak:.0f} / {after:.0f} MB",
            after <= MEMORY * before,
        ),
        (STATUSES, ", ".join(bad) or "none", not bad),
        (LIVES, str(record.alive), record.alive),
        (
            TRACEBACKS,
            f"{record.log.count('Traceback')} in {len(record.log) / 1e6:.1f} MB",
            "Traceback" not in record.log,
        ),
    ]


def in_ms(seconds: Sequence[float]) -> str:
    return " / ".join(f"{1e3 * each:.1f}" for each in seconds) + " ms"


def report(record: Record, given: argparse.Namespace) -> bool:
    """Print it. -> does all hold?"""
    numbers = "good streams", "slower: median", "worst", "/health p50", "p99", "most, ms", "MB"
    print(table_head(("kind", "answers", *numbers)))
    for phase in record.phases:
        figures = figures_of(record, phase)
        total: Counter[str] = sum((Counter(each) for each in phase.got.values()), Counter())
        said = ", ".join(f"{count} x {name}" for name, count in total.most_common())
        cells = [" + ".join(phase.kinds) or f"(quiet, load {phase.load:.1f})", said, figures.streams]
        cells += [f"{figures.median:.2f}", f"{figures.worst:.2f}", *(f"{1e3 * each:.0f}" for each in figures.health)]
        print(table_row([*cells, f"{figures.memory:.0f}"]))
    first = record.phases[0]
    before = statistics.median(probed.memory for probed in record.probed if first.holds(probed.at)) / 1e6
    lines = verdicts(record, before)
    print("\n" + table_head(("line", "found", "holds")))
    for line, found, holds in lines:
        print(table_row([line, found, "yes" if holds else "**no**"]))
    known = conditions(pick_device("cpu"), shlex.join(sys.argv))
    print("\n" + ", ".join(f"{name} {value}" for name, value in known.items() if value))
    if given.out:
        record = record._replace(log=record.log[-100_000:])
        given.out.write_text(json.dumps({"conditions": known, "lines": lines, "record": record}), encoding="utf-8")
    return all(holds for _, _, holds in lines)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="kinds whose name has one of these words in it")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each kind")
    parser.add_argument("--quiet", type=float, default=4.0, help="seconds of each quiet phase")
    parser.add_argument("--settle", type=float, default=40.0, help="seconds of quiet at the end, before memory is read")
    parser.add_argument("--group", type=int, default=5, help="kinds between two quiet phases")
    parser.add_argument("--mixed", type=int, default=6, help=f"times that {BESIDE} kinds go on at once")
    parser.add_argument("--attackers", type=int, default=4, help="hostile clients at a time")
    parser.add_argument("--streams", type=int, default=16, help="good clients")
    parser.add_argument("--new", type=int, default=24, help="tokens of each good stream")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON of everything")
    parser.add_argument("--together", action="store_true", help="all of them at once, and nothing else")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(arguments)
    kinds = [kind for kind in KINDS if not given.only or any(word in kind for word in given.only)]
    with running_server(OPTIONS) as served:
        record = asyncio.run(hold_under_attack(given, kinds, served))
    return 0 if report(record, given) else 1


if __name__ == "__main__":
    sys.exit(main())
