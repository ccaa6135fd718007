"""How models mark their thoughts. What reads them is `AnswerParser`.

    <think>thought</think>answer            deepseek_r1, qwen3
    <|channel>thought\nthought<channel|>    gemma4

The markers, and the white space around them, belong to neither. Text that never closes its thought is thought, but for
a whole tool call in it, which ends it; a call within a thought that is closed is a quotation.
"""

from dataclasses import dataclass

from specdec.errors import require_one_of


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its thoughts.

    opens, closes: the markers. always: the answer begins within a thought, even without the marker. again: there may be
    further thoughts after text.
    """

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
"""Values of `--reasoning-parser`."""


def reasoning_format(name: str) -> ReasoningFormat | None:
    """Finds a format by its name; None for "none". Raises ConfigError for one that is unknown."""
    require_one_of("reasoning_parser", name, ("none", *REASONING))
    return REASONING.get(name)
