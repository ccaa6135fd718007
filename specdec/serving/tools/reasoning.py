"""How models mark their thoughts. `AnswerParser` reads them.

    <think>thought</think>answer            deepseek_r1, qwen3
    <|channel>thought\nthought<channel|>    gemma4

Markers and the white space around them belong to neither. A thought that is never closed ends at the first complete
tool call in it. A call within a closed thought is a quotation.
"""

from dataclasses import dataclass

from specdec.errors import require_one_of


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its thoughts.

    opens, closes: the markers. always: the answer begins with a thought, even without the marker. again: more thoughts
    may follow text.
    """

    opens: str
    closes: str
    always: bool = False
    again: bool = False

    @property
    def special(self) -> tuple[str, ...]:
        """Tokens that the text must contain, whether special or not."""
        return self.opens.split(">", 1)[0] + ">", self.closes


REASONING: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", again=True),
}
"""Values of `--reasoning-parser`."""


def reasoning_format(name: str) -> ReasoningFormat | None:
    """Find a format by name; None for "none". Raises ConfigError for an unknown name."""
    require_one_of("reasoning_parser", name, ("none", *REASONING))
    return REASONING.get(name)
