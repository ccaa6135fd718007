"""The stop strings of a request, and the search for them in a text.

Functions that cut a text at stop strings take any sequence of strings; a plain tuple has the default settings.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

ThoughtMarks = tuple[str, str]
"""Strings that open and close a thought at the beginning of an output. The first is "" if the prompt opened it."""


class StopStrings(tuple[str, ...]):
    """Stop strings with their settings.

    included: the text keeps the stop string that ended it. min_tokens: a stop string counts only if it ends after this
    many output tokens. thought_marks: a stop string counts only if it ends after a thought with these marks.
    """

    included: bool
    min_tokens: int
    thought_marks: ThoughtMarks | None

    def __new__(
        cls,
        stops: Iterable[str] = (),
        *,
        included: bool = False,
        min_tokens: int = 0,
        thought_marks: ThoughtMarks | None = None,
    ) -> "StopStrings":
        made = super().__new__(cls, stops)
        made.included = included
        made.min_tokens = min_tokens
        made.thought_marks = thought_marks
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


def thought_end(text: str, marks: ThoughtMarks) -> int:
    """Number of leading characters within which no stop string counts: a thought with its marks and the white space
    around it, or as much as may still begin one. No later text changes what counts in this one."""
    opens, closes = marks
    begin = len(text) - len(text.lstrip())
    if text.startswith(opens, begin):
        close = text.find(closes, begin + len(opens) if opens else 0)
    elif text.startswith(closes, begin):  # models leave the first mark of an empty thought out
        close = begin
    else:
        return begin + max(n for mark in marks for n in range(len(mark)) if text.startswith(mark[:n], begin))
    end = close + len(closes)
    return len(text) if close < 0 else len(text) - len(text[end:].lstrip())
