"""What the tests run on: memory that is poisoned on request, and nothing of torch that stays changed."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils import _device

NOT_IN_MEMORY = 1 << 40
"""Elements: real memory for them is refused at once."""


@pytest.fixture
def checked_afterwards() -> Iterator[None]:
    """Set up before the poison and torn down after it."""
    constructors = _device._device_constructors
    constructors.cache_clear()
    makers = [torch.empty, torch.empty_like, torch.Tensor.new_empty]
    yield
    assert [torch.empty, torch.empty_like, torch.Tensor.new_empty] == makers
    with torch.device("meta"):
        assert torch.empty(NOT_IN_MEMORY).is_meta, "torch took the poisoning function for its constructor"
        assert torch.nn.Linear(1 << 20, 1 << 20).weight.is_meta
    assert torch.empty in constructors()


def test_a_model_on_the_meta_device_takes_no_memory_after_poisoning(checked_afterwards: None, poison_empty: None):
    """torch remembers its constructors at the first use of a device context. That was within a poisoned test, and a
    later `with torch.device("meta")` really allocated a model of 31 billion parameters."""
    with torch.device("meta"):
        assert torch.empty(3).is_meta


def test_what_nobody_wrote_is_no_number(poison_empty: None):
    like = torch.zeros(2, 3)
    assert all(bool(made.isnan().all()) for made in (torch.empty(2, 3), torch.empty_like(like), like.new_empty(2, 3)))
    assert torch.empty(4, dtype=torch.int64).tolist() == [2**63 - 1] * 4 and not like.isnan().any()
