"""Does the test suite still notice known defects? Applies each of a list to a copy of the code and runs its tests.

    python tools/mutants.py                           every mutant; exit status 1 if one survives or does not apply
    python tools/mutants.py --list                    what there is, and the file that each one changes
    python tools/mutants.py --only swa-evicted-early --jobs 2
    python tools/mutants.py --at REV --json old.json  the same mutants on an earlier commit
    python tools/mutants.py --baseline old.json       and none that was caught there may be missed here

The list is in tools/mutants/*.toml. A mutant replaces one fragment of product code, found by its content in any file,
so moving and renaming files does not touch the list. A fragment must be found exactly once; one that is found nowhere
is a failure of the list, not a pass. Its named tests run first, and the whole suite without its slow tests only where
all of those pass or no longer exist.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mutant_list import (
    KINDS,
    DoesNotApplyError,
    Mutant,
    apply,
    places_of,
    product_sources,
    read_mutants,
    tracked_files,
)

ROOT = Path(__file__).resolve().parent.parent
FORKS = Path(__file__).resolve().parent / "pytest_forks.py"
CAUGHT, SURVIVED, UNFIT, LEFT_OUT = "caught", "SURVIVED", "DOES NOT APPLY", "left out"
UNIMPORTABLE, UNDECIDED = "CANNOT BE IMPORTED", "NO VERDICT"
FAILURES = (SURVIVED, UNFIT, UNIMPORTABLE, UNDECIDED)


@dataclass
class Result:
    """Outcome of one mutant. by: the test that failed. named: it is one of the mutant's own. note: a remark."""

    name: str
    verdict: str
    by: str = ""
    named: bool = False
    seconds: float = 0.0
    file: str = ""
    note: str = ""


# its tests


@dataclass(frozen=True)
class Suite:
    """The tests of one tree: names of files by name of a test function, and the paths of files by their own name."""

    functions: Mapping[str, Sequence[str]]
    files: Mapping[str, str]

    @classmethod
    def of(cls, root: Path) -> "Suite":
        functions: dict[str, list[str]] = {}
        files: dict[str, str] = {}
        for path in sorted((root / "tests").rglob("test_*.py")):
            name = str(path.relative_to(root))
            files[path.name] = name
            for function in re.findall(r"^\s*(?:async )?def (test_\w+)\(", path.read_text("utf-8"), re.MULTILINE):
                functions.setdefault(function, []).append(name)
        return cls(functions, files)

    def resolve(self, test: str) -> list[str] | None:
        """The arguments for pytest; None where there is no such test any more. A test that has moved is followed."""
        where, _, expression = test.partition(" -k ")
        if expression:
            return [self.files[where], "-k", shlex.split(expression)[0]] if where in self.files else None
        where, _, named = test.partition("::")
        function, bracket, case = named.partition("[")
        there = self.functions.get(function, [])
        if not there:
            return None
        path = next((path for path in there if path.endswith(f"/{where}")), there[0])
        return [f"{path}::{function}{bracket}{case}"]

    def commands(self, tests: Iterable[str]) -> list[list[str]]:
        """The arguments of the runs that take all these tests: one run, and another for each expression."""
        resolved = [arguments for test in tests if (arguments := self.resolve(test))]
        plain = [arguments[0] for arguments in resolved if len(arguments) == 1]
        return ([plain] if plain else []) + [arguments for arguments in resolved if len(arguments) > 1]


@dataclass
class Run:
    """What one run of pytest came to. failed: the first test that failed, and why in a line."""

    status: int
    failed: str = ""
    reason: str = ""
    output: str = ""


PASSED, FAILED, USAGE, NOTHING = 0, 1, 4, 5
TIMED_OUT = 1000
OPTIONS = ("-x", "-q", "--no-header", "--tb=line", "-rfE", "-p", "no:cacheprovider")
FAST_SUITE = ("-m", "not slow")


class Copy:
    """A tree of its own to change and run: a process that has imported all but the tree, forked for each run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stamp = int(time.time())
        self._forks: subprocess.Popen[str] | None = None

    def write(self, path: str, text: str) -> None:
        """A newer time each time: Python keeps bytecode by the second of the last change, and by size."""
        self._stamp += 2
        (self.root / path).write_text(text, "utf-8")
        os.utime(self.root / path, (self._stamp, self._stamp))
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # examples that failed under another mutant

    def pytest(self, arguments: Sequence[str], seconds: float) -> Run:
        if self._forks is None or self._forks.poll() is not None:
            command = [sys.executable, str(FORKS)]
            self._forks = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment(self.root),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._forks.stdin is not None and self._forks.stdout is not None
        self._forks.stdin.write(json.dumps({"arguments": [*OPTIONS, *arguments], "seconds": seconds}) + "\n")
        self._forks.stdin.flush()
        answer = json.loads(self._forks.stdout.readline())
        if answer["status"] is None:
            return Run(TIMED_OUT, reason=f"no end after {seconds:.0f} s", output=answer["output"])
        return Run(answer["status"], *(failures(answer["output"]) or [("", "")])[0], answer["output"])

    def close(self) -> None:
        if self._forks is not None:
            with self._forks:  # closes what it reads, at which it ends
                pass


def environment(root: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPECDEC_", "PYTEST_"))}
    return {**kept, "PYTHONPATH": str(root), "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", "1")}


def failures(output: str) -> list[tuple[str, str]]:
    """The tests that failed, and why, out of pytest's summary."""
    found = (re.match(r"(?:FAILED|ERROR) (\S+?::.*?)(?: - (.*))?$", line) for line in output.splitlines())
    return [(match[1], (match[2] or "").strip()) for match in found if match]


class Runner:
    """Runs mutants of one tree, `jobs` at a time, each in a copy of its own. seconds: for the named tests of one."""

    def __init__(self, tree: Path, names: Sequence[str], jobs: int, seconds: float, suite_seconds: float) -> None:
        self.tree = tree
        self.sources = product_sources(tree)
        self.suite = Suite.of(tree)
        self.jobs = jobs
        self.seconds, self.suite_seconds = seconds, suite_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-")
        self._all: list[Copy] = []
        self._copies: SimpleQueue[Copy] = SimpleQueue()
        self._with_tokens = threading.Lock()
        for number in range(jobs):
            copy = Copy(Path(self._folder.name, str(number)))
            for name in names:
                (copy.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, copy.root / name)
            self._all.append(copy)
            self._copies.put(copy)
        self._require_own_code(copy)

    def close(self) -> None:
        for copy in self._all:
            copy.close()
        self._folder.cleanup()

    def _require_own_code(self, copy: Copy) -> None:
        """An installed package in the place of the copy would make every mutant survive."""
        say = "import specdec, specdec.attention; print(specdec.__file__, *specdec.attention.__path__, sep='\\n')"
        run = subprocess.run(
            [sys.executable, "-c", say], cwd=copy.root, env=environment(copy.root), capture_output=True, text=True
        )
        where = run.stdout.splitlines()
        if run.returncode or not where or not all(Path(each).is_relative_to(copy.root) for each in where):
            raise SystemExit(f"the tests would not run the copy: it imports {where or run.stderr.strip()}")

    def confirm(self, results: Sequence[Result]) -> None:
        """A test that fails without a defect, too, has caught nothing: see that those that caught pass on the code."""
        caught = [result for result in results if result.verdict == CAUGHT and "::" in result.by]
        tests = sorted({result.by for result in caught})
        shares = [share for i in range(self.jobs) if (share := tests[i :: self.jobs])]
        with ThreadPoolExecutor(self.jobs) as pool:
            failing = {name for names in pool.map(self._failing, shares) for name in names}
        for result in caught:
            if result.by in failing:
                result.verdict, result.note = UNDECIDED, f"{result.by} fails without the defect, too"

    def _failing(self, tests: Sequence[str]) -> list[str]:
        copy = self._copies.get()
        try:
            run = copy.pytest(["--maxfail=1000", *tests], self.suite_seconds)
        finally:
            self._copies.put(copy)
        if run.status not in (PASSED, FAILED):
            raise SystemExit(f"tests that caught a mutant cannot be run without it:\n{run.output or run.reason}")
        return [name for name, _ in failures(run.output)]

    def run(self, mutants: Sequence[Mutant], *, fall_back: bool) -> Iterator[Result]:
        with ThreadPoolExecutor(self.jobs) as pool:
            yield from pool.map(lambda mutant: self._run(mutant, fall_back), mutants)

    def _run(self, mutant: Mutant, fall_back: bool) -> Result:
        began = time.monotonic()
        try:
            applied = apply(mutant, self.sources)
        except DoesNotApplyError as error:
            return Result(mutant.name, UNFIT, note=str(error))
        copy = self._copies.get()
        try:
            copy.write(applied.path, applied.after)
            result = self._decide(mutant, copy, fall_back)
        finally:
            copy.write(applied.path, applied.before)
            self._copies.put(copy)
        result.seconds, result.file = round(time.monotonic() - began, 1), applied.path
        with self._with_tokens:
            print(f"  {result.verdict:<14} {mutant.name}  {result.seconds:.0f} s", file=sys.stderr, flush=True)
        return result

    def _decide(self, mutant: Mutant, copy: Copy, fall_back: bool) -> Result:
        gone = [test for test in mutant.tests if self.suite.resolve(test) is None]
        note = f"no longer there: {', '.join(gone)}" if gone else ""
        for arguments in self.suite.commands(mutant.tests):
            run = copy.pytest(arguments, self.seconds)
            if run.status in (USAGE, NOTHING) and any("[" in each for each in arguments):  # cases have other names
                run = copy.pytest(list(dict.fromkeys(each.partition("[")[0] for each in arguments)), self.seconds)
            if (result := _verdict(mutant, run, named=True)) is not None:
                result.note = "; ".join(filter(None, [result.note, note]))
                return result
        if fall_back:
            run = copy.pytest(FAST_SUITE, self.suite_seconds)
            if (result := _verdict(mutant, run, named=False)) is not None:
                result.note = "; ".join(filter(None, [result.note, note]))
                return result
        return Result(mutant.name, SURVIVED, note=note)


def _verdict(mutant: Mutant, run: Run, *, named: bool) -> Result | None:
    """None: these tests pass, or there are none."""
    if run.status in (PASSED, USAGE, NOTHING):
        return None
    if run.status == FAILED and run.failed:  # no test is named where its file could not be imported
        return Result(mutant.name, CAUGHT, by=run.failed, named=named, note=run.reason[:200])
    if run.status == TIMED_OUT:
        return Result(mutant.name, UNDECIDED, note=run.reason)
    if run.status < 0:
        return Result(mutant.name, CAUGHT, by=f"killed by signal {-run.status}", named=named)
    return Result(mutant.name, UNIMPORTABLE, note=run.output.strip().splitlines()[-1] if run.output else "")


# what is said


def print_table(results: Sequence[Result]) -> None:
    width = max(len(result.name) for result in results)
    print(f"{'mutant':<{width}}  {'verdict':<9}  seconds  by")
    for result in results:
        by = result.by + ("" if result.named or not result.by else "  (the suite; none of its own)") or result.note
        print(f"{result.name:<{width}}  {result.verdict:<9}  {result.seconds:7.1f}  {by}")
    counts = Counter(result.verdict for result in results)
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()), f"of {len(results)}")


def print_list(mutants: Sequence[Mutant], sources: Mapping[str, str], left_out: Mapping[str, str]) -> bool:
    """-> do all apply?"""
    fits = True
    for mutant in mutants:
        try:
            where = left_out.get(mutant.name) or apply(mutant, sources).path
        except DoesNotApplyError as error:
            where, fits = f"{UNFIT}: {error}", False
        print(f"{mutant.name} [{mutant.kind}] {where}\n    {mutant.breaks}")
    counts = Counter(mutant.kind for mutant in mutants)
    print(f"{len(mutants)} mutants: " + ", ".join(f"{number} {kind}" for kind, number in counts.items()))
    return fits


def missed_since(results: Sequence[Result], baseline: Mapping[str, Any]) -> list[str]:
    """Mutants that were caught in the earlier run, were run now, and were not caught."""
    caught = {each["name"] for each in baseline["results"] if each["verdict"] == CAUGHT}
    return [result.name for result in results if result.name in caught and result.verdict in FAILURES]


def why_left_out(mutant: Mutant, rev: str | None, sources: Mapping[str, str]) -> str:
    """Why a mutant is not for this tree: its code came after `rev`, or is gone; empty: it is."""
    if rev is not None and mutant.since:
        ancestry = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", mutant.since, rev]
        if subprocess.run(ancestry, check=False).returncode == 1:
            return f"newer: since {mutant.since}"
    if mutant.gone and not any(found for _, found in places_of(mutant, sources)):
        return f"gone: {mutant.gone}"
    return ""


def tree_of(rev: str | None, folder: Path) -> Path:
    """The checkout that this file is in, or an earlier commit of it in `folder`."""
    if rev is None:
        return ROOT
    with subprocess.Popen(["git", "-C", str(ROOT), "archive", rev], stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=True)
    if archive.returncode:
        raise SystemExit(f"git archive {rev} failed")
    return folder


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--list", action="store_true", help="say what there is and where it applies; run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants, or all of these kinds")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each in a copy of its own (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--at", metavar="REV", help="on this commit, in the place of the files of the checkout")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="the JSON of an earlier run: none may be missed")
    parser.add_argument("--named-only", action="store_true", help="do not run the suite where the named tests pass")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the named tests of a mutant")
    parser.add_argument("--suite-timeout", type=float, default=7200, help="seconds for the suite")
    asked = parser.parse_args()
    if asked.json:
        asked.json.open("a").close()  # now, not after the work
    return asked


def main() -> int:
    asked = parsed_arguments()
    mutants = read_mutants()
    if asked.only:
        unknown = set(asked.only) - {mutant.name for mutant in mutants} - KINDS.keys()
        if unknown:
            raise SystemExit(f"no mutants or kinds {', '.join(sorted(unknown))}; --list says which there are")
        mutants = [mutant for mutant in mutants if mutant.name in asked.only or mutant.kind in asked.only]
    with tempfile.TemporaryDirectory(prefix="mutants-at-") as folder:
        tree = tree_of(asked.at, Path(folder))
        sources = product_sources(tree)
        left_out = {each.name: why for each in mutants if (why := why_left_out(each, asked.at, sources))}
        if asked.list:
            return 0 if print_list(mutants, sources, left_out) else 1
        runner = Runner(tree, tracked_files(tree), asked.jobs, asked.timeout, asked.suite_timeout)
        try:
            chosen = [mutant for mutant in mutants if mutant.name not in left_out]
            results = list(runner.run(chosen, fall_back=not asked.named_only))
            runner.confirm(results)
        finally:
            runner.close()
    results += [Result(name, LEFT_OUT, note=why) for name, why in left_out.items()]
    print_table(results)
    if asked.json:
        asked.json.write_text(json.dumps({"at": asked.at, "results": [asdict(r) for r in results]}, indent=1) + "\n")
    failed = [result.name for result in results if result.verdict in FAILURES]
    if failed:
        print(f"not caught: {', '.join(failed)}")
    missed = missed_since(results, json.loads(asked.baseline.read_text())) if asked.baseline else []
    if missed:
        print(f"caught in {asked.baseline} and not any more: {', '.join(missed)}")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
