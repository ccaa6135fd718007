"""Conventions of an MTP module, which no tensor states, measured on a text: under which are most drafts accepted?

    state    after the target's final norm, or before it              shows in the first draft
    carry    after the module's norm, before it, or form T            in the second, and more in each that follows
    block    like the target's layers of one kind, or of another      in all, where its tensors fit both

Each token of a target's answers is one observation: the mean probability that the drafts made 1 to STEPS tokens earlier
give it, which is how often they would be accepted. So each token counts once, and for at most one accepted draft.
Log-probabilities would not do: the large ones of tokens that no draft would hit outvote the others. Conventions are
compared token by token; `is_clearly_better` says when a difference is not chance.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist

import torch

from specdec.draft_models.native_mtp.mtp_chains import chained_rows
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.draft_models.native_mtp.mtp_families import MtpFamily
from specdec.errors import CheckpointError

STEPS = 5
"""Drafts of a token that are looked at."""
ALPHA = 0.01
"""Chance that any other convention is named where all are equally good."""
NEARER = 2.0
"""Standard errors by which conventions further from the drafter's own must be better than nearer ones."""
MIN_TOKENS = 32
"""Fewest observations for which means are treated as normally distributed."""
ROUNDING = 1e-4
"""Standard deviation of probabilities that differ by rounding alone, at most."""
ROWS = 64
"""Places whose logits are computed at a time."""
STATES = {True: "the target's state after its final norm", False: "the target's state before its final norm"}
CARRIES = {
    ("C", True): "the carry after the module's norm",
    ("C", False): "the carry before the module's norm",
    ("T", True): "the target's own state at each draft (form T)",
}


def other_states(drafter: NativeMtpDrafter) -> Iterator[NativeMtpDrafter]:
    """Modules with these weights that read the target's other state."""
    yield drafter.with_family(replace(drafter.family, normed_state=not drafter.family.normed_state))


def other_carries(drafter: NativeMtpDrafter) -> Iterator[NativeMtpDrafter]:
    """Modules with these weights that hand on other states; without a norm both are equal."""
    family = drafter.family
    for form, normed in CARRIES:
        if (form, normed) != carry_of(family) and (normed or drafter.has_norm):
            yield drafter.with_family(replace(family, form=form, normed_carry=normed))


def other_blocks(drafter: NativeMtpDrafter) -> Iterator[NativeMtpDrafter]:
    """Modules with these weights and blocks like the target's layers of another kind, where their tensors fit."""
    kinds = [spec.layer_type for spec in drafter.layout.layers]
    for kind in dict.fromkeys(kinds):
        if kind != kinds[drafter.family.like]:
            like = len(kinds) - 1 - kinds[::-1].index(kind)
            try:
                yield drafter.with_family(replace(drafter.family, like=like))
            except CheckpointError:
                continue  # its tensors say that it is no such layer


def all_conventions(drafter: NativeMtpDrafter) -> list[NativeMtpDrafter]:
    """The modules under all conventions that they may have, the drafter's own first, then those nearest to them."""
    found = [drafter]
    for others in (other_states, other_carries, other_blocks):
        found += [other for each in found for other in others(each)]
    return sorted(found, key=lambda other: difference(drafter, other).count("->"))


def carry_of(family: MtpFamily) -> tuple[str, bool]:
    """The key in `CARRIES`."""
    return ("T", True) if family.form == "T" else (family.form, family.normed_carry)


def conventions_in_words(drafter: NativeMtpDrafter) -> tuple[str, str, str]:
    """State, carry and block in words."""
    family = drafter.family
    kind = drafter.layout.layers[family.like].layer_type.replace("_", " ")
    return STATES[family.normed_state], CARRIES[carry_of(family)], f"a block of {kind}"


def difference(now: NativeMtpDrafter, other: NativeMtpDrafter) -> str:
    """In words, "the carry after the module's norm -> the carry before the module's norm"."""
    pairs = zip(conventions_in_words(now), conventions_in_words(other), strict=True)
    return "; ".join(f"{before} -> {after}" for before, after in pairs if before != after)


def accepted(drafter: NativeMtpDrafter, tokens: torch.Tensor, states: torch.Tensor, first: int) -> torch.Tensor:
    """Observations of tokens [T] of a text from number `first` on, as `by_token` has them.

    states [T, H]: of the target, as the drafter reads them.
    """
    steps = min(STEPS, drafter.max_steps or STEPS)
    pos = torch.arange(len(tokens), device=tokens.device)
    places = pos[max(0, first - 1 - steps) : -2]
    rows_of = chained_rows(drafter, tokens[None], states[None], pos[None], steps, places)
    found = []
    for step, rows in enumerate(rows_of):
        drafted = tokens.roll(-2 - step)[places]
        for begin in range(0, len(places), ROWS):
            part = type(rows)(*(of_all[:, begin : begin + ROWS] for of_all in rows))
            logits = drafter.logits(min(step, len(drafter.modules) - 1), part)[0]
            found.append(logits.float().softmax(-1).gather(1, drafted[begin : begin + ROWS, None])[:, 0])
    return by_token(torch.cat(found).view(steps, -1).T)


def by_token(p: torch.Tensor) -> torch.Tensor:
    """Probabilities [P, K] of the tokens 1 to K after consecutive places -> [P - K + 1] of each token, mean over its
    drafts from 1 to K tokens earlier."""
    count, steps = p.shape
    shifted = [p[steps - 1 - step : max(0, count - step), step] for step in range(steps)]
    return torch.stack(shifted).mean(0)


def standard_errors(now: torch.Tensor, than: torch.Tensor) -> float:
    """The mean of now - than in its standard errors; both [N], of the same tokens. 0 for too few."""
    gains = now - than
    if len(gains) < MIN_TOKENS:
        return 0.0
    return float(gains.mean()) * math.sqrt(len(gains)) / max(float(gains.std()), ROUNDING)


def is_worth_more(now: torch.Tensor, than: torch.Tensor) -> bool:
    """Whether conventions further from the drafter's own explain a text better than nearer ones."""
    return standard_errors(now, than) >= NEARER


def is_clearly_better(now: torch.Tensor, own: torch.Tensor, tried: int) -> bool:
    """Whether one of `tried` other conventions is better than the drafter's own, with an error of ALPHA for all of
    them."""
    return standard_errors(now, own) >= NormalDist().inv_cdf(1 - ALPHA / tried)
