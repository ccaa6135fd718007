"""Fields that are expensive, and are computed at the first read.

    @dataclass(frozen=True)
    class Batch:
        history: OnDemand = OnDemand()         in a class that is no dataclass: history = OnDemand()

    Batch(history=tensor).history              the tensor
    Batch(history=lambda: ...).history         the function's result, computed once

Invariant: it is first read while its inputs are unchanged.
"""

from collections.abc import Callable
from typing import Any

import torch


class OnDemand:
    """A field that is given as a tensor, or as a function that computes it at the first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __set__(self, instance: Any, given: torch.Tensor | Callable[[], torch.Tensor]) -> None:
        instance.__dict__[self.name] = given

    def __get__(self, instance: Any, owner: type) -> torch.Tensor:
        if instance is None:
            raise AttributeError(f"{self.name} has no default")  # as dataclasses expect
        given: torch.Tensor | Callable[[], torch.Tensor] = instance.__dict__[self.name]
        if not isinstance(given, torch.Tensor):
            given = instance.__dict__[self.name] = given()
        return given
