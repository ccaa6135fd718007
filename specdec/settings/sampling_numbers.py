"""The numbers that shape the law of the next token, each declared once for Python, HTTP, the command line and kernels.

A field that is a `number` is a field of `SamplingParams`, which checks it on construction; a field of request bodies,
with the same bounds; an option of `specdec generate` and `specdec chat`; and a column of the device's table of
parameters. This module imports nothing heavy, because `specdec --help` reads it.
"""

import math
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from specdec.settings.shell_option import option

PENALTY_SPAN = (1e-6, 1e6)
"""Repetition penalties outside would take float32 logits to infinity, or infinity times 0 to NaN."""


@dataclass(frozen=True, slots=True)
class Number:
    """What a field may hold: finite numbers of its kind, from low to high; with open_low, not low itself.

    filters: it removes tokens from the law (its default removes none).
    """

    kind: type[int] | type[float]
    default: float
    low: float
    high: float
    open_low: bool = False
    filters: bool = False


def number(default: float, low: float, high: float, help: str, **kinds: bool) -> Any:
    """A field with its `Number`, int or float as its default is. help: of its option."""
    bounds = Number(type(default), default, low, high, **kinds)
    return field(default=default, metadata={"number": bounds, **option(default, help).metadata})


@dataclass(frozen=True, slots=True)
class SamplingNumbers:
    """The length of the output, how its tokens are drawn, and the seed; `SamplingParams` says what each means."""

    max_new_tokens: int = option(256, "Most tokens to generate.")
    temperature: float = number(0.0, 0, math.inf, "0 is greedy.")
    top_k: int = number(0, 0, 1 << 30, "Keep the k most likely tokens; 0: all.", filters=True)
    top_p: float = number(1.0, 0, 1, "Keep the smallest set of this mass; 1: all.", open_low=True, filters=True)
    min_p: float = number(0.0, 0, 1, "Drop tokens below this share of the most likely; 0: none.", filters=True)
    seed: int | None = option(None, "Makes a sampled output repeatable.")
    _: KW_ONLY
    top_n_sigma: float = number(
        0.0, -1e6, 1e6, "Keep logits within n standard deviations of the best; 0 or less: all.", filters=True
    )
    repetition_penalty: float = number(1.0, *PENALTY_SPAN, "Above 1 discourages repetition.")
    presence_penalty: float = number(0.0, -2, 2, "Taken from the logit of every token that the output has.")
    frequency_penalty: float = number(0.0, -2, 2, "Taken from a token's logit each time that the output has it.")


NUMBERS: dict[str, Number] = {
    each.name: each.metadata["number"] for each in fields(SamplingNumbers) if "number" in each.metadata
}
"""Numbers by the name of their field, in order."""
