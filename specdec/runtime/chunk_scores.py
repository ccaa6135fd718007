"""Which tokens of prompt chunks are scored, and the scores taken over once they are there.

A token is scored by the chunk in front of it, by the first of its prompt's samples that gets there: what is known, or
is no part of the prompt but of an output that a preempted request reads again, is not computed.
"""

from collections.abc import Sequence

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.launcher import LaunchedStep
from specdec.runtime.request import Request
from specdec.runtime.rounds.prompt_scoring import Scoring, Span


def scoring_of(requests: Sequence[Request], done: IntArray, chunk_len: IntArray) -> Scoring | None:
    """Of chunks of `chunk_len` [B] tokens behind `done` [B] committed ones; None: nothing is scored."""
    spans: list[Span] = []
    alternatives = 0
    for number, (request, start, length) in enumerate(zip(requests, done.tolist(), chunk_len.tolist(), strict=True)):
        scores = request.scores
        if scores is None:
            continue
        first, end = max(start + 1, scores.known), min(start + length + 1, scores.prompt_len)
        if first < end:
            spans.append(Span(number, first - start - 1, first, end - first))
            alternatives = max(alternatives, scores.alternatives)
    return Scoring(spans, alternatives) if spans else None


def settle_scores(step: LaunchedStep, present: Sequence[int]) -> None:
    """The requests numbered `present`, which still have their rows, take over what the step has scored."""
    for span, scores in step.prompt_scores():
        request = step.requests[span.number]
        if span.number in present and request.scores is not None:
            request.scores.take(span.first, scores)
