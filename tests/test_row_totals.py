"""What is kept by rows for all requests of a step is what each request had by itself."""

import random

import numpy as np
import pytest
from kv_rig import ints

from specdec import SamplingParams
from specdec.runtime.request_output import RowTotals
from specdec.runtime.scheduler import Batches

from inside import Detokenizer, Request, RoundResult, record_round
from marks import examples


def make_requests(count: int) -> list[Request]:
    asked = SamplingParams(max_new_tokens=40, ignore_eos=True)
    requests = [Request([1, 2], asked, 0, Detokenizer(None), frozenset()) for _ in range(count)]
    for number, request in enumerate(requests):
        request.id = request.row = number
    return requests


def random_result(draw: random.Random, count: int) -> RoundResult:
    """A round of chains, some with drafts and some with tokens that a grammar forced."""
    depth = draw.randint(0, 4)
    drafts = [draw.randint(0, depth) for _ in range(count)]
    forced = [draw.choice([0, 0, each]) for each in drafts]
    length = [draw.randint(1, 1 + each) for each in drafts]
    nodes = np.arange(1 + depth) * np.ones((count, 1), dtype=np.int64)
    seconds = {stage: draw.random() for stage in ("draft", "verify", "other")}
    return RoundResult(ints(*length), nodes, nodes, [[]] * count, ints(*drafts), seconds, ints(*forced))


def test_figures_of_all_rows_are_those_counted_for_each_request():
    """Requests lose their rows now and then, and outputs end within their drafts."""
    cut = 0
    for seed in range(examples(20, 200)):
        draw, requests = random.Random(seed), make_requests(3)
        row_totals, counted = RowTotals(3), [request.stats.copy() for request in requests]
        while going_on := [request for request in requests if not request.finished]:
            chosen = draw.sample(going_on, draw.randint(1, len(going_on)))
            for request in chosen:
                if request.row < 0:
                    request.row = request.id
                    row_totals = row_totals.without(ints(request.row))
            result, rows = random_result(draw, len(chosen)), ints(*(request.row for request in chosen))
            row_totals = row_totals.after_round(rows, result)
            columns = (array.tolist() for array in (result.length, result.draft_depth, result.forced))
            for request, length, drafts, forced in zip(chosen, *columns, strict=True):
                own, taken, before = counted[request.id], min(length, request.remaining), request.stats
                request.settle([1] * length, [], row_totals, drafts, forced)
                assert before.rounds == own.rounds, "figures that were read change no more"
                whole = (taken, 0, 0) if forced else (taken, length - 1, drafts)
                record_round(own, *(whole if forced or taken == length else (taken,) * 3))
                own.forced_rounds, own.forced_tokens = (
                    own.forced_rounds + (forced > 0),
                    own.forced_tokens + min(taken, forced),
                )
                own.draft_nodes += result.path.shape[1] - 1 if drafts and not forced else 0
                own.output_tokens += taken
                own.first_token_seconds, own.decode_seconds = (
                    request.stats.first_token_seconds,
                    request.stats.decode_seconds,
                )
                for stage, seconds in result.seconds.items():
                    setattr(own, f"{stage}_seconds", getattr(own, f"{stage}_seconds") + seconds / len(chosen))
                assert own.draft_seconds == pytest.approx(request.stats.draft_seconds)
                assert own.verify_seconds == pytest.approx(request.stats.verify_seconds)
                own.draft_seconds, own.verify_seconds = request.stats.draft_seconds, request.stats.verify_seconds
                own.other_seconds = request.stats.other_seconds
                assert request.stats == own
                cut += taken < length
                if draw.random() < 0.1:
                    request.lose_row()
    assert cut, "no output ended within its drafts"


def test_a_batch_is_made_when_its_requests_or_their_rows_change():
    batches, requests = Batches(), make_requests(3)
    whole, few = batches.batch_of(requests), batches.batch_of(requests[:2])
    assert batches.batch_of(list(requests)) is whole and batches.batch_of(requests[:2]) is few
    assert whole.rows.tolist() == [0, 1, 2] and whole.max_total_len.tolist() == [42] * 3
    requests[1].lose_row()
    assert whole.present() == [0, 2]
    requests[1].row = 5
    again = batches.batch_of(requests)
    assert again.rows.tolist() == [0, 5, 2] and batches.batch_of(list(requests)) is again
