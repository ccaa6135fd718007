"""Splits an answer into what the model thought and what it says, however its text is cut into pieces.

    <think>thought</think>answer            deepseek_r1, qwen3
    <|channel>thought\nthought<channel|>    gemma4

The markers, and the white space around them, belong to neither. Text that never closes its thought is thought.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.errors import require_one_of


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """opens, closes: the markers. always: the answer begins within a thought, whether it says so or not. again: there
    may be thoughts after text, too."""

    opens: str
    closes: str
    always: bool = False
    again: bool = False

    @property
    def special(self) -> tuple[str, ...]:
        """Tokens that the text must have, be they special or not."""
        return self.opens.split(">", 1)[0] + ">", self.closes


REASONING: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", again=True),
}
"""What `--reasoning-parser` takes."""


def reasoning_format(name: str) -> ReasoningFormat | None:
    """By its name; None for "none". Raises ConfigError for one that is unknown."""
    require_one_of("reasoning_parser", name, ("none", *REASONING))
    return REASONING.get(name)


def opened_by(prompt_end: str, format: ReasoningFormat) -> bool:
    """Has the prompt's end opened a thought that the answer goes on with?"""
    return prompt_end.rfind(format.opens) > prompt_end.rfind(format.closes)


class ReasoningReader:
    """Of one answer. opened: the prompt ends within a thought."""

    def __init__(self, format: ReasoningFormat, *, opened: bool = False) -> None:
        self._format = format
        self._thinks = opened or format.always
        self._may_open = True  # nothing but white space so far
        self._fresh = True  # nothing was said since the last marker
        self._held = ""

    def feed(self, text: str, *, finished: bool = False) -> tuple[str, str]:
        """(reasoning, content) that more of the text adds; what may be the beginning of a marker waits."""
        self._held += text
        said = {True: "", False: ""}  # within thoughts, and outside
        while self._read_marker(said):
            pass
        opens, closes = self._format.opens, self._format.closes
        markers = [*([closes] * self._thinks), *([opens] * (self._fresh if self._thinks else self._may_open))]
        ready = self._held if finished else self._held[: self._ready(markers)]
        if not finished and (self._thinks or (self._fresh and not ready.strip())):
            ready = ready.rstrip()  # a marker may follow, which white space belongs to
        self._held = self._held[len(ready) :]
        self._give(said, ready)
        if not (self._thinks or self._fresh or self._format.again):
            self._may_open = False
        return said[True], said[False]

    def _read_marker(self, said: dict[bool, str]) -> bool:
        """-> one was read, with what stands before it"""
        stripped, form = self._held.lstrip(), self._format
        if self._fresh and (self._thinks or self._may_open) and stripped.startswith(form.opens):
            self._thinks, self._held = True, stripped[len(form.opens) :]  # some say it although it is clear
            return True
        marker = form.closes if self._thinks else form.opens
        before, found, after = self._held.partition(marker)
        if not found or not (self._thinks or (self._may_open and form.again)):
            return False
        self._give(said, before.rstrip() if self._thinks else before)
        if self._thinks:
            self._may_open = form.again
        self._thinks, self._fresh, self._held = not self._thinks, True, after
        return True

    def _ready(self, markers: Sequence[str]) -> int:
        """Characters that are no beginning of a marker."""
        longest, count = max(map(len, markers), default=1), len(self._held)
        sizes = range(min(longest - 1, count), 0, -1)
        begun = (size for size in sizes if any(marker.startswith(self._held[-size:]) for marker in markers))
        return count - next(begun, 0)

    def _give(self, said: dict[bool, str], text: str) -> None:
        """White space after a marker is dropped, unless no marker was there."""
        if self._fresh and (self._thinks or not self._may_open or self._format.again):
            text = text.lstrip()
        if text:
            self._fresh = False
            said[self._thinks] += text
