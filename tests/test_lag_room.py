"""Tokens that a drafter reads late: when it must read them, which it reads, and their room in its windows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec import SamplingParams, SpecConfig
from specdec.errors import CapacityError
from specdec.runtime.rounds.drafter_lag import DrafterLag
from specdec.runtime.rounds.result import NO_DRAFT, RoundShape
from specdec.runtime.rounds.round_shapes import GREEDY

from tiny_families import random_eagle3


def test_a_request_whose_unread_tokens_do_not_fit_a_window_is_refused(make_target, make_engine) -> None:
    """It was let in, and preempted itself forever."""
    model, spec = make_target("llama"), SpecConfig(4, adaptive=True)
    engine = make_engine(model, random_eagle3(model), spec=spec, max_model_len=48, swa_slots=15)
    with pytest.raises(CapacityError, match="but the window 6 pool has 15"):
        engine.submit([1, 2], SamplingParams(max_new_tokens=46))


@pytest.fixture
def lag() -> DrafterLag:
    target: Any = SimpleNamespace(device=torch.device("cpu"), hidden_size=2, dtype=torch.float32)
    return DrafterLag(3, target, 0)


def test_a_row_that_reaches_the_last_position_is_read_once_and_lags_no_more(lag) -> None:
    shape, rows = RoundShape(2, 9, NO_DRAFT, GREEDY, None), np.array([0, 1])
    for ending, read, count in ((0, 0, [1, 1]), (1, 1, [0, 1]), (1, 0, [0, 2])):
        assert lag.before_round(shape, rows, rows[:ending]) == read and lag.count[:2].tolist() == count
    lag.clear_rows(rows[:1])  # of a new request
    assert lag.before_round(shape, rows, rows[:0]) == 0 and lag.count[:2].tolist() == [1, 3]


def test_a_row_without_a_lag_is_a_padding_row_of_no_tokens(lag) -> None:
    """A prefix longer than none would be read at pages that the padding row does not have."""
    table: Any = SimpleNamespace(committed_len=SimpleNamespace(tensor=torch.tensor([7, 5, 0])), padding_row=2)
    lag.read.copy_(torch.tensor([7, 3, 0]))
    seen = lag.observation(table, torch.arange(27).view(3, 9), torch.tensor([0, 1]), 9, 4)
    assert (seen.rows.index.tolist(), seen.start.tolist(), seen.length.tolist()) == ([2, 1], [0, 3], [0, 2])
    assert seen.tokens[1].tolist() == [12, 13, 14, 15] and seen.next_token[1] == 14


def test_a_drafter_sees_padding_at_the_seat_of_a_row_past_its_last_position(make_target, make_engine) -> None:
    model = make_target("llama")
    state = make_engine(model, random_eagle3(model), spec=SpecConfig(4, adaptive=True), max_batch_size=3).state
    state.lag.ended[1] = True
    state.seat(np.array([2, 1]))
    padding = state.cache.table.padding_row
    assert state.seats.host.tolist() == [2, 1, padding] and state.draft_seats.host.tolist() == [2, padding, padding]
