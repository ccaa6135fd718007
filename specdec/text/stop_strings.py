"""The stop strings of a request, and the search for them in a text.

Functions that cut a text at stop strings take any sequence of strings; a plain tuple has the default settings.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class StopStrings(tuple[str, ...]):
    """Stop strings with their two settings.

    included: the text keeps the stop string that ended it. min_tokens: a stop string counts only if it ends after this
    many output tokens.
    """

    included: bool
    min_tokens: int

    def __new__(cls, stops: Iterable[str] = (), *, included: bool = False, min_tokens: int = 0) -> "StopStrings":
        made = super().__new__(cls, stops)
        made.included = included
        made.min_tokens = min_tokens
        return made


class Found(NamedTuple):
    """Beginning and end of a text's first stop string, in characters."""

    begin: int
    end: int


def find_first(text: str, stops: Sequence[str], since: int) -> Found | None:
    """The first of the stop strings that ends after character `since`; None: there is none."""
    places = ((text.find(stop, max(0, since - len(stop) + 1)), stop) for stop in stops)
    return min((Found(at, at + len(stop)) for at, stop in places if at >= 0), default=None)


def cut_at_stop(text: str, stops: Sequence[str], since: int = 0) -> str:
    """The text up to the first stop string, which is kept if `included`."""
    found = find_first(text, stops, since)
    if found is None:
        return text
    return text[: found.end if getattr(stops, "included", False) else found.begin]
