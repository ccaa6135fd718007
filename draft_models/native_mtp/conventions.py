"""What no tensor of an MTP module says, measured on a text: which conventions its drafts agree best under.

    state    after the target's final norm, or before it              shows in the first draft
    carry    after the module's norm, before it, or form T            in the second and third
    block    like the target's layers of one kind, or of another      in all, where its tensors fit both

Drafts are compared by the log-probabilities of what the target says, at each depth by itself: a carry shows there long
before it does in accepted lengths. One convention is clearly better than another if their mean is higher by MIN_GAIN,
and by T_LIMIT standard errors over the places.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from specdec.draft_models.native_mtp.mtp_chains import chained_rows
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.draft_models.native_mtp.mtp_families import MtpFamily
from specdec.errors import CheckpointError

STEPS = 3
"""Drafts a place: the first ones that a carry shows in."""
MIN_GAIN = 0.02
"""Nats a draft."""
T_LIMIT = 2.5
LIMIT = 2.0
"""Nats by which a single draft counts at most."""
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
    yield drafter.under(replace(drafter.family, normed_state=not drafter.family.normed_state))


def other_carries(drafter: NativeMtpDrafter) -> Iterator[NativeMtpDrafter]:
    """Modules with these weights that hand on other states; without a norm both are equal."""
    family = drafter.family
    for form, normed in CARRIES:
        if (form, normed) != carry_of(family) and (normed or drafter.has_norm):
            yield drafter.under(replace(family, form=form, normed_carry=normed))


def other_blocks(drafter: NativeMtpDrafter) -> Iterator[NativeMtpDrafter]:
    """Modules with these weights and blocks like the target's layers of another kind, where their tensors fit."""
    kinds = [spec.layer_type for spec in drafter.layout.layers]
    for kind in dict.fromkeys(kinds):
        if kind != kinds[drafter.family.like]:
            like = len(kinds) - 1 - kinds[::-1].index(kind)
            try:
                yield drafter.under(replace(drafter.family, like=like))
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


def described(drafter: NativeMtpDrafter) -> tuple[str, str, str]:
    """State, carry and block in words."""
    family = drafter.family
    kind = drafter.layout.layers[family.like].layer_type.replace("_", " ")
    return STATES[family.normed_state], CARRIES[carry_of(family)], f"a block of {kind}"


def difference(now: NativeMtpDrafter, other: NativeMtpDrafter) -> str:
    """In words, "the carry after the module's norm -> the carry before the module's norm"."""
    pairs = zip(described(now), described(other), strict=True)
    return "; ".join(f"{before} -> {after}" for before, after in pairs if before != after)


def likelihoods(
    drafter: NativeMtpDrafter, tokens: torch.Tensor, pos: torch.Tensor, states: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities [P, K] of the target's tokens in drafts 1 to K after each place of packed texts at tokens and
    pos [1, T].

    states [1, T, H]: as the drafter reads them. chosen [T]: what the target says after each token.
    """
    steps = min(STEPS, drafter.max_steps or STEPS)
    places = (pos.roll(-steps, 1) == pos + steps)[0].nonzero()[:, 0]  # with that many tokens after them
    found = []
    for step, rows in enumerate(chained_rows(drafter, tokens, states, pos, steps, places)):
        for first in range(0, len(places), ROWS):
            part = type(rows)(*(of_all[:, first : first + ROWS] for of_all in rows))
            logits = drafter.logits(min(step, len(drafter.modules) - 1), part)[0]
            wanted = chosen[places[first : first + ROWS] + 1 + step]
            found.append(logits.float().log_softmax(-1).gather(1, wanted[:, None])[:, 0])
    return torch.cat(found).view(steps, -1).T


def expected_length(log_p: torch.Tensor) -> float:
    """Tokens a round, were drafts drawn: 1, and the probabilities of the first 1, 2, ... tokens [P, K]."""
    return 1 + float(log_p.cumsum(1).exp().sum(1).mean())


def is_worth_more(log_p: torch.Tensor, than: torch.Tensor) -> bool:
    """Whether conventions further from the drafter's own explain a text better: nearer ones win within MIN_GAIN."""
    return float(log_p.mean()) >= float(than.mean()) + MIN_GAIN


def is_clearly_better(log_p: torch.Tensor, than: torch.Tensor) -> bool:
    """log_p, than [P, K] at the same places."""
    gains = (log_p - than).clamp(-LIMIT, LIMIT).mean(1)
    if len(gains) < 2 or not float(gains.mean()) >= MIN_GAIN:
        return False
    return float(gains.mean()) >= T_LIMIT * float(gains.std()) / math.sqrt(len(gains))
