"""Settles a step on the host: repeats the device's commit, appends tokens, checks stop conditions.

The device has already committed the round. The host's table repeats the commit with the same numbers, then each request
takes its tokens in one assignment. The commit of prompt chunks is known at their launch, so the host makes it then.
After a fault every request is either settled or unchanged. The table may be half updated; the engine rebuilds it from
the requests (`Scheduler.restart`).
"""

from collections.abc import Sequence

import numpy as np

from specdec.errors import name_row
from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.table import RequestTable
from specdec.runtime.launched_step import LaunchedStep
from specdec.runtime.prefixes import Prefixes
from specdec.runtime.request import Request, RequestState, table_rows
from specdec.runtime.rounds.result import RoundResult
from specdec.runtime.rounds.round import Round


def commit_chunks_on_host(
    table: RequestTable, prefixes: Prefixes, requests: Sequence[Request], chunk_len: IntArray
) -> None:
    """Commit the next `chunk_len` [B] prompt tokens on the host after their chunks are launched.

    A request whose prompt is complete may then join a round that is launched after the chunks.
    """
    rows = table_rows(requests)
    table.commit_chunk_on_host(rows, chunk_len)
    prefixes.keep_committed(requests)  # before SWA eviction: another prompt may diverge anywhere
    table.evict_unseen(rows)
    for request in requests:
        if table.committed_len.host[request.row] == request.prefill_target:
            request.state = RequestState.DECODE


def settle_chunks(round: Round, step: LaunchedStep, present: Sequence[int]) -> None:
    """For the requests at indices `present`, which still have their rows: add the scores of their prompt chunks, and
    the first output token if the chunk ended the prompt."""
    result = step.result()
    for number in present:
        step.requests[number].stats.prefill_seconds += result.seconds["prefill"] / len(step.requests)
    for span, scores in step.prompt_scores():
        if span.number in present and (known := step.requests[span.number].scores) is not None:
            known.fill(span.first, scores)
    assert step.drawing is not None, "a round is no prompt chunk"
    for place, number in enumerate(step.drawing):
        if number in present:
            request, first = step.requests[number], int(result.tokens[place, 0])
            round.tokens.adopt((request.row, len(request.prompt)), first)
            try:
                request.settle([first], result.logprobs[place], request.stats.copy())
            except Exception as error:
                raise name_row(error, request.row)  # noqa: B904 - the same error


def settle_round(round: Round, requests: Sequence[Request], result: RoundResult) -> None:
    """Give every request its accepted tokens and the bonus token, up to the end of its output."""
    rows, table = table_rows(requests), round.cache.table
    start = table.committed_len.host[rows]
    table.commit_on_host(rows, result.length, result.path)
    of_row, step = np.nonzero(np.arange(result.tokens.shape[1]) < result.length[:, None])  # [M] tokens, row by row
    round.tokens.adopt((rows[of_row], start[of_row] + 1 + step), result.tokens[of_row, step])
    draft, verify, other = (result.seconds[stage] / len(requests) for stage in ("draft", "verify", "other"))
    integers = (array.tolist() for array in (result.tokens, result.length, result.drafts, result.forced))
    for request, logprobs, emitted, length, num_drafts, num_forced in zip(
        requests, result.logprobs, *integers, strict=True
    ):
        stats = request.stats.copy()
        stats.draft_seconds += draft
        stats.verify_seconds += verify
        stats.other_seconds += other
        stats.draft_nodes += result.path.shape[1] - 1 if num_drafts and not num_forced else 0
        try:
            request.settle(emitted[:length], logprobs, stats, num_drafts=num_drafts, num_forced=num_forced)
        except Exception as error:
            raise name_row(error, request.row)  # noqa: B904 - the same error
    table.evict_unseen(rows)
