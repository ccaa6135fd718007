"""The report of a load: plain values, and two tables of them. Only whole answers count for speed."""

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from specdec import __version__
from specdec.evaluation.load_test.figures import Counted, Spread, counted, output_tokens, spreads, time_to_first_token
from specdec.evaluation.load_test.load_client import Answer, Asking
from specdec.evaluation.load_test.pace import Pace
from specdec.evaluation.load_test.started_server import Acceptance


@dataclass(slots=True)
class Failures:
    """Answers that are not whole, of one kind, with what was said of the first."""

    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """milliseconds: by figure. counted: how the tokens of chunks are known, the worst of any answer. seconds: from the
    first request sent to the last answer's end. acceptance_length: by the server's own counters, None where it has
    none. each: every request in the order in which they ended, in seconds, `sent` behind the first.
    """

    url: str
    endpoint: str
    model: str
    rate: float | None
    concurrency: int | None
    max_new_tokens: int
    temperature: float
    body: dict[str, Any]
    requests: int
    completed: int
    errors: dict[str, Failures]
    seconds: float
    requests_per_second: float
    prompt_tokens: int | None
    output_tokens: int
    output_tokens_per_second: float
    tokens_per_chunk: float
    counted: str
    milliseconds: dict[str, Spread]
    acceptance_length: float | None
    accepted_per_position: list[float]
    conditions: dict[str, str]
    each: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_report(asking: Asking, pace: Pace, answers: Sequence[Answer], acceptance: Acceptance | None) -> LoadReport:
    """Of at least one answer."""
    whole = [answer for answer in answers if answer.fault is None]
    errors: dict[str, Failures] = {}
    for fault in (answer.fault for answer in answers):
        if fault is not None:
            errors.setdefault(fault.kind, Failures(0, fault.message)).count += 1
    begin = min(answer.sent for answer in answers)
    seconds = max(answer.ended for answer in answers) - begin
    tokens, chunks = sum(map(output_tokens, whole)), sum(len(answer.chunks) for answer in whole)
    prompt_tokens = [answer.prompt_tokens for answer in whole if answer.prompt_tokens is not None]
    drafted = acceptance is not None and acceptance.rounds > 0
    return LoadReport(
        url=asking.url,
        endpoint="chat" if asking.chat else "completions",
        model=asking.model,
        rate=pace.rate,
        concurrency=pace.at_a_time,
        max_new_tokens=asking.max_new_tokens,
        temperature=asking.temperature,
        body=dict(asking.body),
        requests=len(answers),
        completed=len(whole),
        errors=dict(sorted(errors.items(), key=lambda each: -each[1].count)),
        seconds=seconds,
        requests_per_second=len(whole) / seconds if seconds else 0.0,
        prompt_tokens=sum(prompt_tokens) if prompt_tokens else None,
        output_tokens=tokens,
        output_tokens_per_second=tokens / seconds if seconds else 0.0,
        tokens_per_chunk=tokens / chunks if chunks else 0.0,
        counted=max(map(counted, whole), key=list(Counted).index).value if whole else "",
        milliseconds=spreads(whole, scheduled=pace.rate is not None),
        acceptance_length=acceptance.length if acceptance is not None and drafted else None,
        accepted_per_position=acceptance.per_position if acceptance is not None and drafted else [],
        conditions={
            "specdec": __version__,
            "python": platform.python_version(),
            "httpx": version("httpx"),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        },
        each=[_record(answer, begin) for answer in answers],
    )


def markdown_tables(report: LoadReport) -> str:
    """Times as a Markdown table, failures as another where there are any, and what was asked in a line."""
    lines = ["| milliseconds | mean | median | p90 | p99 | most |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, times in report.milliseconds.items():
        cells = (times.mean, times.median, times.p90, times.p99, times.max)
        lines.append(f"| {name} | {' | '.join(f'{value:.2f}' for value in cells)} |")
    if report.errors:
        lines += ["", "| not answered | requests | the first |", "| --- | ---: | --- |"]
        for kind, failures in report.errors.items():
            lines.append(f"| {kind} | {failures.count} | {failures.example.replace('|', '/')} |")
    return "\n".join([*lines, "", _context(report)])


def _context(report: LoadReport) -> str:
    pace = f"{report.rate:g} requests/s" if report.rate is not None else ""
    limit = f"at most {report.concurrency} at a time" if report.concurrency is not None else "any number at a time"
    prompt = "" if report.prompt_tokens is None else f"{report.prompt_tokens} prompt tokens, "
    length = report.acceptance_length
    shares = ", ".join(f"{share:.2f}" for share in report.accepted_per_position)
    by_position = f" (by position {shares})" if shares else ""
    accepted = "" if length is None else f"; acceptance length {length:.2f}{by_position} by the server's counters"
    added = f", with {', '.join(report.body)}" if report.body else ""
    known = ", ".join(f"{name} {value}" for name, value in report.conditions.items())
    return (
        f"{report.model} at {report.url} ({report.endpoint}{added}), {pace + ', ' if pace else ''}{limit}, "
        f"at most {report.max_new_tokens} tokens each, temperature {report.temperature:g}: "
        f"{report.completed} of {report.requests} requests answered in {report.seconds:.2f} s, "
        f"{report.requests_per_second:.2f} requests/s, {report.output_tokens_per_second:.1f} output tokens/s "
        f"({prompt}{report.output_tokens} output tokens, {report.tokens_per_chunk:.2f} a chunk; {report.counted})"
        f"{accepted}. {known}."
    )


def _record(answer: Answer, begin: float) -> dict[str, Any]:
    return {
        "sent": answer.sent - begin,
        "first_token": time_to_first_token(answer),
        "end_to_end": answer.ended - answer.sent,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": output_tokens(answer),
        "chunks": len(answer.chunks),
        "finish_reason": answer.finish_reason,
        "error": None if answer.fault is None else answer.fault.kind,
    }
