"""Expected greedy tokens, which are computed only when they are read or compared."""

from collections.abc import Callable, Sequence
from typing import Any


class Truth(Sequence[int]):
    """The tokens of `compute(guess)`, which are the same for any guess.

    A list that it is compared with is the guess. If that is right, one forward proves it; else each token takes one.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, compute: Callable[[Sequence[int]], list[int]]) -> None:
        self.compute = compute

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list):
            return self.compute(other) == other
        return isinstance(other, Truth) and list(self) == list(other)

    def __getitem__(self, at: Any) -> Any:
        return self.compute(())[at]

    def __len__(self) -> int:
        return len(self.compute(()))

    def __add__(self, other: list[int]) -> list[int]:
        return self.compute(()) + other

    def __radd__(self, other: list[int]) -> list[int]:
        return other + self.compute(())

    def __repr__(self) -> str:
        return repr(self.compute(()))
