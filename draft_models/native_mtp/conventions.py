"""What no tensor of an MTP module says, measured on a text: which conventions its drafts agree best under.

    state    after the target's final norm, or before it              shows in the first draft
    carry    after the module's norm, before it, or form T            in the second and third
    block    like the target's layers of one kind, or of another      in all, where its tensors fit both

A convention is clearly better than another if the drafts' expected accepted length, over blocks of BLOCK places, is
larger by MIN_GAIN of it, and by T_LIMIT standard errors.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from specdec.draft_models.native_mtp.mtp_chains import chained_rows
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.draft_models.native_mtp.mtp_families import MtpFamily
from specdec.errors import CheckpointError

STEPS = 3
"""Drafts a place: the first ones that a carry shows in."""
BLOCK = 16
"""Places whose mean is one sample: neighbours are not independent."""
MIN_GAIN = 0.02
T_LIMIT = 4.0
ROWS = 64
"""Places whose logits are computed at a time."""
STATES = {True: "the target's state after its final norm", False: "the target's state before its final norm"}
CARRIES = {
    ("C", True): "the carry after the module's norm",
    ("C", False): "the carry before the module's norm",
    ("T", True): "the target's own state at each draft (form T)",
}


def other_states(drafter: NativeMtpDrafter) -> Iterator[NativeMtpDrafter]:
    """The same modules that read the target's other state."""
    yield drafter.under(replace(drafter.family, normed_state=not drafter.family.normed_state))


def other_carries(drafter: NativeMtpDrafter) -> Iterator[NativeMtpDrafter]:
    """The same modules that hand on other states; those of a module without a norm are the same before and after."""
    family = drafter.family
    for form, normed in CARRIES:
        if (form, normed) != carry_of(family) and (normed or drafter.has_norm):
            yield drafter.under(replace(family, form=form, normed_carry=normed))


def other_blocks(drafter: NativeMtpDrafter) -> Iterator[NativeMtpDrafter]:
    """The same modules with blocks like the target's layers of another kind, where their tensors fit."""
    kinds = [spec.layer_type for spec in drafter.target_layers]
    for kind in dict.fromkeys(kinds):
        if kind != kinds[drafter.family.like]:
            like = len(kinds) - 1 - kinds[::-1].index(kind)
            try:
                yield drafter.under(replace(drafter.family, like=like))
            except CheckpointError:
                continue  # its tensors say that it is no such layer


def all_conventions(drafter: NativeMtpDrafter) -> list[NativeMtpDrafter]:
    """The modules under all conventions that they may have, the drafter's own first."""
    found = [drafter]
    for others in (other_states, other_carries, other_blocks):
        found += [other for each in found for other in others(each)]
    return found


def carry_of(family: MtpFamily) -> tuple[str, bool]:
    """The key in `CARRIES`."""
    return ("T", True) if family.form == "T" else (family.form, family.normed_carry)


def described(drafter: NativeMtpDrafter) -> tuple[str, str, str]:
    """State, carry and block in words."""
    family = drafter.family
    kind = drafter.target_layers[family.like].layer_type.replace("_", " ")
    return STATES[family.normed_state], CARRIES[carry_of(family)], f"a block of {kind}"


def difference(now: NativeMtpDrafter, other: NativeMtpDrafter) -> str:
    """In words, "the carry after the module's norm -> the carry before the module's norm"."""
    pairs = zip(described(now), described(other), strict=True)
    return "; ".join(f"{before} -> {after}" for before, after in pairs if before != after)


def expected_lengths(
    drafter: NativeMtpDrafter, tokens: torch.Tensor, pos: torch.Tensor, states: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Drafts that are accepted at each place [P], were they drawn: of packed texts at tokens and pos [1, T].

    states [1, T, H]: as the drafter reads them. chosen [T]: what the target says after each token.
    """
    steps = min(STEPS, drafter.max_steps or STEPS)
    places = (pos.roll(-steps, 1) == pos + steps)[0].nonzero()[:, 0]  # with that many tokens after them
    total = run = torch.zeros(len(places), device=pos.device)
    for step, rows in enumerate(chained_rows(drafter, tokens, states, pos, steps, places)):
        parts = []
        for first in range(0, len(places), ROWS):
            logits: Any = drafter.logits(
                min(step, len(drafter.modules) - 1), type(rows)(*(part[:, first : first + ROWS] for part in rows))
            )[0]
            wanted = chosen[places[first : first + ROWS] + 1 + step]
            parts.append(logits.float().log_softmax(-1).gather(1, wanted[:, None])[:, 0])
        run = run + torch.cat(parts)
        total = total + run.exp()
    return total


def is_clearly_better(lengths: torch.Tensor, than: torch.Tensor) -> bool:
    """lengths, than [P] at the same places."""
    gains = torch.stack([part.mean() for part in (lengths - than).split(BLOCK)])
    if len(gains) < 2 or not float(gains.mean()) >= MIN_GAIN * (1 + float(than.mean())):
        return False
    return float(gains.mean()) >= T_LIMIT * float(gains.std()) / math.sqrt(len(gains))
