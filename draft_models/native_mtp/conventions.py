"""Compares how well an MTP module drafts texts under different conventions. No tensor states conventions.

    state    read after the target's final norm, or before it         affects the first draft
    carry    after the module's norm, before it, or form T            affects the second draft, and later ones more
    block    like the target's layers of one kind, or of another      affects all drafts, if its tensors fit both

An observation is a token of the target's answers, with its mean probability in the drafts made 1 to STEPS tokens
earlier: the rate at which they would be accepted. So each token counts once, and for at most one accepted draft.
Log-probabilities are unsuitable: the large negative values of tokens that no draft would hit dominate the mean.
Conventions are compared token by token; `clear_winner` decides whether a difference is chance.
"""

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import NormalDist

import torch
from torch import nn

from specdec.draft_models.native_mtp.mtp_drafter import MtpFamily, NativeMtpDrafter
from specdec.errors import CheckpointError

MEASURED_STEPS = 5
"""Number of drafts per token that are measured."""
ALPHA = 0.01
"""Probability of naming another convention if all are equally good."""
MARGIN_OVER_NEARER = 2.0
"""A convention further from the drafter's own must be better than a nearer one by this many standard errors."""
MIN_OBSERVATIONS = 32
"""Minimum number of observations at which means are treated as normally distributed."""
ROUNDING = 1e-4
"""Upper bound on the standard deviation of probabilities that differ only by rounding."""
STATES = {True: "the target's state after its final norm", False: "the target's state before its final norm"}
CARRIES = {
    ("C", True): "the carry after the module's norm",
    ("C", False): "the carry before the module's norm",
    ("T", True): "the target's own state at each draft (form T)",
}


def all_conventions(drafter: NativeMtpDrafter) -> list[NativeMtpDrafter]:
    """The modules under all possible conventions: the drafter's own first, then the nearest. Without a norm of the
    module's own both carries are equal; blocks are like the last target layer of each kind that their tensors fit."""
    own, kinds = drafter.family, [spec.layer_type for spec in drafter.layout.layers]
    has_norm = not isinstance(drafter.modules[0].norm, nn.Identity)
    layers = {kind: layer for layer, kind in enumerate(kinds) if kind != kinds[own.like]}
    carries = [carry for carry in CARRIES if carry != carry_of(own) and (carry[1] or has_norm)]
    choices = itertools.product(
        (own.like, *layers.values()), (carry_of(own), *carries), (own.normed_state, not own.normed_state)
    )
    found = [drafter]
    for like, (form, normed), state in itertools.islice(choices, 1, None):  # the first is its own
        with suppress(CheckpointError):  # its tensors do not fit such a layer
            family = replace(own, like=like, form=form, normed_carry=normed, normed_state=state)
            found.append(drafter.with_family(family))
    return sorted(found, key=lambda other: difference(drafter, other).count("->"))


def carry_of(family: MtpFamily) -> tuple[str, bool]:
    """The key of the family's carry in `CARRIES`."""
    return ("T", True) if family.form == "T" else (family.form, family.normed_carry)


def conventions_in_words(drafter: NativeMtpDrafter) -> tuple[str, str, str]:
    """Describe state, carry and block in words."""
    family = drafter.family
    kind = drafter.layout.layers[family.like].layer_type.replace("_", " ")
    return STATES[family.normed_state], CARRIES[carry_of(family)], f"a block of {kind}"


def difference(now: NativeMtpDrafter, other: NativeMtpDrafter) -> str:
    """Describe the difference, such as "the carry after the module's norm -> the carry before the module's norm"."""
    pairs = zip(conventions_in_words(now), conventions_in_words(other), strict=True)
    return "; ".join(f"{before} -> {after}" for before, after in pairs if before != after)


def by_token(p: torch.Tensor) -> torch.Tensor:
    """Probabilities [P, K] of the 1st to K-th token after consecutive places -> [P - K + 1]: for each token the mean
    over its drafts, made 1 to K tokens earlier."""
    count, steps = p.shape
    shifted = [p[steps - 1 - step : max(0, count - step), step] for step in range(steps)]
    return torch.stack(shifted).mean(0)


def standard_errors(now: torch.Tensor, than: torch.Tensor) -> float:
    """The mean of now - than, in standard errors; both [N], for the same tokens. 0 if there are too few."""
    gains = now - than
    if len(gains) < MIN_OBSERVATIONS:
        return 0.0
    return float(gains.mean()) * math.sqrt(len(gains)) / max(float(gains.std()), ROUNDING)


def clear_winner(own: torch.Tensor, others: Sequence[torch.Tensor]) -> int | None:
    """Index of the best of `others` (the nearest conventions first) if it is clearly better than the drafter's own;
    else None. All are probabilities [N] of the same tokens. ALPHA is the error for all of them together."""
    best, most = None, own
    for number, theirs in enumerate(others):
        if standard_errors(theirs, most) >= MARGIN_OVER_NEARER:
            best, most = number, theirs
    is_clear = best is not None and standard_errors(most, own) >= NormalDist().inv_cdf(1 - ALPHA / len(others))
    return best if is_clear else None
