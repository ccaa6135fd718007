"""The numeric sampling parameters, each declared once for Python, HTTP, the command line and kernels.

A field that has a `Number` is a field of `SamplingParams`, which checks it on construction; a field of request bodies,
with the same bounds; an option of `specdec generate` and `specdec chat`; and a column of the device's table of
parameters. This module imports nothing heavy, because `specdec --help` reads it.
"""

from dataclasses import KW_ONLY, dataclass, fields

from specdec.settings.declared_fields import Number, option

PENALTY_SPAN = (1e-6, 1e6)
"""Bounds of the repetition penalty: outside, float32 logits would overflow, or infinity times 0 would give NaN."""


@dataclass(frozen=True, slots=True)
class SamplingNumbers:
    """The output's length, the sampling parameters and the seed; `SamplingParams` explains each."""

    max_new_tokens: int = option(256, "Maximum number of tokens to generate.")
    temperature: float = option(0.0, "0 is greedy.", number=Number(float, 0))
    top_k: int = option(0, "Keep the k most likely tokens; 0: all.", number=Number(int, 0, 1 << 30, filters=True))
    top_p: float = option(
        1.0, "Keep the smallest set of this mass; 1: all.", number=Number(float, 0, 1, open_low=True, filters=True)
    )
    min_p: float = option(
        0.0, "Drop tokens below this share of the most likely; 0: none.", number=Number(float, 0, 1, filters=True)
    )
    seed: int | None = option(None, "Makes a sampled output repeatable.")
    _: KW_ONLY
    top_n_sigma: float = option(
        0.0,
        "Keep logits within n standard deviations of the best; 0 or less: all.",
        number=Number(float, -1e6, 1e6, filters=True),
    )
    repetition_penalty: float = option(1.0, "Above 1 discourages repetition.", number=Number(float, *PENALTY_SPAN))
    presence_penalty: float = option(
        0.0, "Subtracted from the logit of every token in the output.", number=Number(float, -2, 2)
    )
    frequency_penalty: float = option(
        0.0, "Subtracted from a token's logit once per occurrence in the output.", number=Number(float, -2, 2)
    )


NUMBERS: dict[str, Number] = {
    each.name: number for each in fields(SamplingNumbers) if (number := each.metadata.get("number"))
}
"""The numbers by field name, in order."""
