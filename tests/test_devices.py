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


def test_a_model_on_the_meta_device_takes_no_memory_while_poisoned(poison_empty: None):
    _device._device_constructors.cache_clear()
    with torch.device("meta"):
        assert torch.empty(NOT_IN_MEMORY).is_meta
        assert torch.nn.Linear(1 << 20, 1 << 20).weight.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_what_nobody_wrote_is_no_number(dtype: torch.dtype, poison_empty: None):
    like = torch.zeros(2, 3, dtype=dtype)
    made = [
        torch.empty(2, 3, dtype=dtype),
        torch.empty((2, 3), dtype=dtype),
        torch.empty_like(like),
        torch.empty_strided((2, 3), (3, 1), dtype=dtype),
        like.new_empty(2, 3),
        like.new_empty_strided((2, 3), (3, 1)),
    ]
    assert all(bool(tensor.isnan().all()) for tensor in made)
    assert not like.isnan().any() and not torch.zeros(2).isnan().any()


def test_integers_that_nobody_wrote_are_out_of_range(poison_empty: None):
    assert torch.empty(4, dtype=torch.int32).tolist() == [2**31 - 1] * 4
    assert torch.empty(4, dtype=torch.int64).new_empty(2).tolist() == [2**63 - 1] * 2
    assert torch.empty(2, dtype=torch.bool).tolist() == [True, True]
