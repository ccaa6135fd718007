"""A part of a list of tokens without a copy, so that reading a long output piece by piece takes linear time."""

from collections.abc import Sequence
from typing import overload


class TokenView(Sequence[int]):
    """tokens[start:stop], as it is now: a slice of it copies only that slice."""

    __slots__ = ("_start", "_stop", "_tokens")

    def __init__(self, tokens: list[int], start: int, stop: int) -> None:
        assert 0 <= start <= stop <= len(tokens), f"{start=} {stop=} {len(tokens)=}"
        self._tokens, self._start, self._stop = tokens, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            first, last, step = at.indices(len(self))
            assert step == 1, "a view is read forwards"
            return self._tokens[self._start + first : self._start + max(first, last)]
        return self._tokens[self._start + range(len(self))[at]]
