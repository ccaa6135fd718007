"""Load on a server: prompts are sent at a pace, and what came back is reported, of an interrupted run too.

One request goes before all others and is not measured: it warms the server up, and finds out how well it counts tokens.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from specdec.errors import ConfigError, SpecDecError
from specdec.evaluation.load_test.load_client import Answer, Asking, Client
from specdec.evaluation.load_test.load_report import LoadReport, make_report
from specdec.evaluation.load_test.pace import Pace
from specdec.evaluation.load_test.started_server import Acceptance, Server
from specdec.progress import Interrupted, progress_bar
from specdec.text.prompt_files import Problem

if TYPE_CHECKING:
    import httpx

STREAM_OPTIONS: tuple[Mapping[str, bool], ...] = (
    {"include_usage": True, "continuous_usage_stats": True},  # vLLM's and SGLang's word for usage in every chunk
    {"include_usage": True},
    {},
)
"""What a server is asked to count, from the most on; it is found out which of them it takes."""
REFUSED = ("HTTP 400", "HTTP 422")
HOPELESS = ("HTTP 401", "HTTP 403", "HTTP 404", "HTTP 405", "cannot connect")


def run_load(
    server: Server,
    asking: Asking,
    pace: Pace,
    prompts: Sequence[Problem],
    stream_options: Mapping[str, bool] | None = None,
) -> LoadReport:
    """Ask every prompt, and report. Raises SpecDecError where nothing could be asked, or nothing was answered.

    stream_options: what the server is asked to count; None finds out, with a request that is not measured.
    Ctrl-C raises Interrupted with the report of the requests that had ended.
    """
    if not prompts:
        raise ConfigError("prompts is empty; give at least one")
    answers: list[Answer] = []
    texts = [problem.text for problem in prompts]
    before: Acceptance | None = None

    def report() -> LoadReport:
        after = server.acceptance() if before else None
        return make_report(asking, pace, answers, before and after and after.since(before))

    try:
        options = stream_options
        if options is None:
            options = asyncio.run(_stream_options(server, asking, pace, texts[0]))
        before = server.acceptance()
        with progress_bar("asking", len(texts)) as update:
            asyncio.run(_ask_all(server, asking, pace, options, texts, answers, update))
    except KeyboardInterrupt as stop:
        raise Interrupted(f"{len(answers)} of {len(texts)} requests had ended", report() if answers else None) from stop
    made = report()
    if not made.completed:
        [(kind, failure), *_] = made.errors.items()
        raise SpecDecError(
            f"{asking.endpoint}: none of {made.requests} requests was answered; "
            f"{failure.count} times {kind}: {failure.example}"
        )
    return made


async def _ask_all(
    server: Server,
    asking: Asking,
    pace: Pace,
    options: Mapping[str, bool],
    texts: Sequence[str],
    answers: list[Answer],
    update: Callable[[int], None],
) -> None:
    """Every request in its time; its answer goes to `answers` when it has ended."""
    async with _connections(server, pace) as http:
        client = Client(http, asking, options)
        free = asyncio.Semaphore(pace.at_a_time or len(texts))

        async def ask(number: int, due: float) -> None:
            try:
                answers.append(await client.ask(number, texts[number], due))
                update(len(answers))
            finally:
                free.release()

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, after in enumerate(pace.arrivals(len(texts))):
                await asyncio.sleep(start + after - time.perf_counter())
                await free.acquire()
                group.create_task(ask(number, start + after))


async def _stream_options(server: Server, asking: Asking, pace: Pace, text: str) -> Mapping[str, bool]:
    """The request that is not measured: the first of STREAM_OPTIONS that the server takes."""
    async with _connections(server, pace) as http:
        for options in STREAM_OPTIONS:
            fault = (await Client(http, asking, options).ask(0, text)).fault
            if fault is None:
                return options
            if fault.kind in HOPELESS:
                raise SpecDecError(f"{asking.endpoint}: {fault.kind}: {fault.message}")
            if fault.kind not in REFUSED:
                break  # it says nothing of the options
    return STREAM_OPTIONS[1]


def _connections(server: Server, pace: Pace) -> "httpx.AsyncClient":
    """As many as are wanted."""
    import httpx

    timeout = httpx.Timeout(pace.timeout, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(headers=dict(server.headers), timeout=timeout, limits=limits)
