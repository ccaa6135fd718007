"""An exception at any instruction of a turn leaves a thread's inference and grad mode as they were, kept or not."""

import gc

import pytest
import torch

from specdec import SamplingParams
from specdec.runtime.calls.turns import with_modes_restored

from marks import deep_cases

PARAMS = SamplingParams(max_new_tokens=3, ignore_eos=True)


class Interrupt(BaseException):
    """An exception like KeyboardInterrupt."""


@pytest.fixture(scope="module", autouse=True)
def only_what_these_tests_leave_is_collected():
    """What other tests of the process hold, models and engines, is not looked through at each `gc.collect`."""
    gc.freeze()


def modes():
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()


@pytest.fixture(params=["__enter__ begun", "__enter__ done", "__exit__ begun", "__exit__ done"])
def interrupted(request, monkeypatch):
    """interrupted(n): the n-th inference mode from now on is struck within `__enter__` or `__exit__`, at either end."""
    name, when = request.param.split()
    real, remaining = getattr(torch.inference_mode, name), [0]

    def struck(self, *details):
        remaining[0] -= 1
        if remaining[0] == 0 and when == "begun":
            raise Interrupt
        real(self, *details)
        if remaining[0] == 0:
            raise Interrupt

    struck.__code__ = struck.__code__.replace(co_name=name)
    monkeypatch.setattr(torch.inference_mode, name, struck)
    return lambda number: remaining.__setitem__(0, number)


@deep_cases("__enter__ begun-False", "__enter__ done-True", "__exit__ begun-True", "__exit__ done-False")
@pytest.mark.parametrize("grad", [True, False])
def test_modes_are_restored_wherever_an_interrupt_strikes(make_target, make_engine, interrupted, grad):
    engine = make_engine(make_target("llama"), None)
    with torch.set_grad_enabled(grad):
        truth = engine.generate([5, 6, 7], PARAMS)[0].token_ids
        kept, number, ended = [], 0, False
        while not ended:
            number += 1
            interrupted(number)
            try:
                engine.generate([5, 6, 7], PARAMS)
                ended = True
            except Interrupt as error:
                kept.append(error)
            interrupted(0)
            assert modes() == (False, grad), f"struck at the {number}. inference mode"
            assert engine.generate([5, 6, 7], PARAMS)[0].token_ids == truth
            assert modes() == (False, grad)
        assert number > 5
        kept.clear()
        gc.collect()
        assert modes() == (False, grad)


def test_a_guard_that_dies_late_changes_nothing(interrupted):
    """The exception is dropped in another inference mode, which ends as it began."""

    def work():
        with torch.inference_mode(), torch.inference_mode(False):
            pass

    kept = []
    for number in range(1, 5):
        interrupted(number)
        try:
            with_modes_restored(work)
        except Interrupt as error:
            kept.append(error)
        interrupted(0)
    with torch.inference_mode():
        kept.clear()
        gc.collect()
        assert modes() == (True, False)
    assert modes() == (False, True)


def test_modes_of_the_caller_stay_within_a_turn():
    with torch.inference_mode():
        assert with_modes_restored(modes) == (True, False)
        assert modes() == (True, False)
    with torch.no_grad():
        assert with_modes_restored(modes) == (False, False)
    assert with_modes_restored(modes) == (False, True)
