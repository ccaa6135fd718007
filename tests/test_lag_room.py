"""Room for tokens that a drafter reads late, in its windows."""

import pytest

from specdec import SamplingParams, SpecConfig
from specdec.errors import CapacityError

from tiny_families import random_eagle3


def test_a_request_whose_unread_tokens_do_not_fit_a_window_is_refused(make_target, make_engine) -> None:
    """It was let in, and preempted itself forever."""
    model, spec = make_target("llama"), SpecConfig(4, adaptive=True)
    engine = make_engine(model, random_eagle3(model), spec=spec, max_model_len=48, swa_slots=15)
    with pytest.raises(CapacityError, match="but the window 6 pool has 15"):
        engine.submit([1, 2], SamplingParams(max_new_tokens=46))
