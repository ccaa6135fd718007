"""How models mark their thoughts: the formats that `--reasoning-parser` names."""

from typing import NamedTuple

from specdec.errors import require_one_of


class ReasoningFormat(NamedTuple):
    """How a model marks its thoughts.

    opens, closes: the markers. always: the answer begins with a thought, even without the marker. again: more thoughts
    may follow text.
    """

    opens: str
    closes: str
    always: bool = False
    again: bool = False


REASONING: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", again=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
"""Values of `--reasoning-parser`."""


def reasoning_format(name: str) -> ReasoningFormat | None:
    """Find a format by name; None for "none". Raises ConfigError for an unknown name."""
    require_one_of("reasoning_parser", name, ("none", *REASONING))
    return REASONING.get(name)
