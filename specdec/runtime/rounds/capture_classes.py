"""Classes of sampling parameters that share a captured round. Few are needed, since kernels read parameters as data.

    class       what its rounds can do                                              cost beyond the previous class
    plain       temperature, filters and seed of each row                           -
    penalised   the repetition penalty                                              three small launches
    edited      presence and frequency penalty, logit bias (up to 512 entries)      logits as float32, about ten times
                                                                                    over the vocabulary of every node
    scored      log-probabilities, up to 20 alternatives                            about ten times more
    grammar     the mask of a grammar, with edited or scored                        three programs, the host between

Without kernels, "plain" is two classes, greedy and sampled, since torch sorts the vocabulary for top-k and top-p. A row
draws the same token in any class that covers it: penalties of 1 and 0, empty biases and empty masks change no bit of a
logit. Larger biases have classes of 8 times as many entries each; more alternatives have classes by powers of two.
"""

from specdec.gpu.captures import next_power_of_two, step_up
from specdec.runtime.rounds.result import RoundShape
from specdec.sampling.sampling_table import SAMPLED, SamplerFeatures

GREEDY = SamplerFeatures(sampled=False)

BIAS_ENTRIES = 512
"""Logit-bias entries in the smallest class of edited rounds."""

FEW_ALTERNATIVES = 20
"""Alternatives per token in the smallest class of scored rounds."""


def widen_to_class(
    features: SamplerFeatures, logprobs: int | None, *, on_kernels: bool
) -> tuple[SamplerFeatures, int | None]:
    """Find the smallest class that covers these uses and alternatives. Returns its uses and alternatives.

    on_kernels: kernels draw the tokens, without a sort.
    """
    if not (features.edits or logprobs is not None):
        if features.penalty:
            return SAMPLED._replace(penalty=True), None
        return (SAMPLED if on_kernels or features.sampled else GREEDY), None
    edited = SAMPLED._replace(
        penalty=True, counts=True, bias=step_up(features.bias, BIAS_ENTRIES, 8), masked=features.masked
    )
    return edited, None if logprobs is None else _alternatives(logprobs)


def is_rare(shape: RoundShape) -> bool:
    """Does a round change or report logits, or verify tokens that a grammar forces? Such rounds have fewer sizes."""
    return shape.features.edits or shape.features.penalty or shape.logprobs is not None or shape.forced > 0


def _alternatives(count: int) -> int:
    """The smallest of 20, 32, 64, ..., 1024 that is at least `count`."""
    return FEW_ALTERNATIVES if count <= FEW_ALTERNATIVES else next_power_of_two(count)
