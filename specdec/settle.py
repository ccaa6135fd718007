"""The host's part behind a step: take over what the device did, append tokens, look for stops.

The device has committed already; here the host's table and tokens follow, with the same numbers, and then each request
takes its tokens in one assignment. A fault before or within leaves every request either as it was or settled: what is
half done is the table, and the engine begins that again from the requests (`Scheduler.restart`).
"""

from collections.abc import Sequence

import numpy as np

from specdec.kvcache.mirror import IntArray, MirroredArray
from specdec.kvcache.table import RequestTable
from specdec.request import Request, RequestState
from specdec.result import RoundResult


def settle_chunks(
    table: RequestTable,
    tokens: MirroredArray,
    requests: Sequence[Request],
    chunk_len: IntArray,
    through: Sequence[int],
    result: RoundResult,
) -> None:
    """`through`: the requests, by number in the batch, that drew the first token of their output."""
    rows = np.array([request.row for request in requests], dtype=np.int64)
    table.commit_chunk(rows, chunk_len)
    table.evict(rows)
    for place, number in enumerate(through):
        request = requests[number]
        first = int(result.tokens[place, 0])
        tokens[request.row, len(request.prompt)] = first
        request.settle([first], result.logprobs[place], request.stats.copy())
    for request in requests:
        request.stats.prefill_seconds += result.seconds["prefill"] / len(requests)
        if table.committed_len.host[request.row] == request.prefill_target:
            request.state = RequestState.DECODE


def settle_round(table: RequestTable, tokens: MirroredArray, requests: Sequence[Request], result: RoundResult) -> None:
    """Every request gains what was accepted, up to the end of its output."""
    rows = np.array([request.row for request in requests], dtype=np.int64)
    start = table.committed_len.host[rows]
    table.adopt_commit(rows, result.length, result.path)
    for i, request in enumerate(requests):
        emitted = result.tokens[i, : result.length[i]]
        tokens.adopt((request.row, slice(int(start[i]) + 1, int(start[i]) + 1 + len(emitted))), emitted)
        stats = request.stats.copy()
        stats.draft_seconds += result.seconds["draft"] / len(requests)
        stats.verify_seconds += result.seconds["verify"] / len(requests)
        stats.other_seconds += result.seconds["other"] / len(requests)
        request.settle(emitted.tolist(), result.logprobs[i], stats, num_drafts=result.num_steps)
    table.evict(rows)
