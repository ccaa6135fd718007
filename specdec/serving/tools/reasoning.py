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
        reasoning: list[str] = []
        content: list[str] = []
        while self._step(reasoning, content, finished):
            pass
        return "".join(reasoning), "".join(content)

    def _step(self, reasoning: list[str], content: list[str], finished: bool) -> bool:
        """Take what is certain out of what is held. -> a marker was read, so look again"""
        if self._thinks:
            if self._fresh and self._opening():  # it says so although it is clear
                return True
            before, marker, after = self._held.partition(self._format.closes)
            if marker:
                self._give(reasoning, before.rstrip())
                self._thinks, self._fresh, self._may_open, self._held = False, True, self._format.again, after
                return True
            ready = self._ready([self._format.closes, *([self._format.opens] if self._fresh else [])], finished)
            self._give(reasoning, self._taken(ready, keep_space=not finished))
            return False
        if self._may_open and self._opening():
            self._thinks = True
            return True
        if self._may_open and self._format.again and self._format.opens in self._held:
            before, _, self._held = self._held.partition(self._format.opens)
            self._give(content, before)
            self._thinks = self._fresh = True
            return True
        ready = self._ready([self._format.opens] if self._may_open else [], finished)
        if ready:
            waits = self._fresh and not self._held[:ready].strip() and not finished
            self._give(content, "" if waits else self._taken(ready))
        if not self._fresh and not self._format.again:
            self._may_open = False
        return False

    def _opening(self) -> bool:
        """Does what is held begin with the opening marker? Then it is taken."""
        stripped = self._held.lstrip()
        if not stripped.startswith(self._format.opens):
            return False
        self._held, self._fresh = stripped[len(self._format.opens) :], True
        return True

    def _ready(self, markers: Sequence[str], finished: bool) -> int:
        """Characters that are no beginning of a marker."""
        if finished:
            return len(self._held)
        longest, count = max(map(len, markers), default=1), len(self._held)
        sizes = range(min(longest - 1, count), 0, -1)
        begun = (size for size in sizes if any(marker.startswith(self._held[-size:]) for marker in markers))
        return count - next(begun, 0)

    def _taken(self, ready: int, *, keep_space: bool = False) -> str:
        """The first `ready` characters; of thoughts, not the white space at their end, which a marker may follow."""
        text = self._held[:ready]
        if keep_space:
            text = text.rstrip()
        self._held = self._held[len(text) :]
        return text

    def _give(self, pieces: list[str], text: str) -> None:
        """White space after a marker is dropped, unless no marker was there."""
        if self._fresh and (self._thinks or not self._may_open or self._format.again):
            text = text.lstrip()
        if text:
            self._fresh = False
            pieces.append(text)
