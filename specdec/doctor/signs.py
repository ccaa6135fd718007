"""What config, weights and names already say about a pair: `seen` of the table of causes.

Invariant: a sign is true of the pair or is not there; nothing is guessed, since signs are logged when a pair is loaded.
A quantiser puts every weight on a grid: its scale, which is the largest weight of its group over the largest value of
the grid, times the values of e4m3 or whole numbers up to 8. Trained weights lie on it for one in six to ten.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from specdec.doctor.changes import assistant_with_rope, changed_assistant
from specdec.draft_models.base import Drafter
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.kvcache.layout import SLIDING_ATTENTION
from specdec.models.published import last_part as _last
from specdec.models.target import TargetModel


class Subject(NamedTuple):
    """The pair in which signs are looked for."""

    target: TargetModel
    drafter: Drafter
    tokenizer: Any | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """what: is the matter; do: about it, a sentence each. mended: the drafter without it, where it can be made here."""

    what: str
    do: str
    mended: Callable[[], Drafter] | None = None


def rope_of_assistant(drafter: Gemma4MTPDrafter, subject: Subject) -> Sign | None:
    """An assistant reads keys that the target has rotated, so its queries must be rotated by the same angles."""
    target = subject.target
    config = drafter.assistant.config.get_text_config()
    own, theirs = (getattr(each, "rope_parameters", None) or {} for each in (config, target.config))
    wrong: dict[str, Any] = {}
    for kind in sorted(set(config.layer_types)):
        one, other = own.get(kind), theirs.get(kind)
        if isinstance(one, dict) and isinstance(other, dict):
            keys = one.keys() & other.keys() & {"rope_theta", "rope_type", "partial_rotary_factor", "factor"}
            wrong |= {kind: other} if any(one[key] != other[key] for key in keys) else {}
    if not wrong:
        return None
    kind = next(iter(wrong))
    return Sign(
        what=f"its rope_parameters of {kind} are {own[kind]}, the target's {theirs[kind]}; it reads the target's keys",
        do="copy rope_parameters from the target's config.json into the assistant's text_config",
        mended=lambda: assistant_with_rope(drafter, target, wrong),
    )


def window_of_assistant(drafter: Gemma4MTPDrafter, subject: Subject) -> Sign | None:
    """An assistant's sliding layers read the target's sliding layers."""
    target = subject.target
    owner = target.layout.last_owner(SLIDING_ATTENTION)
    windows = {window for window in drafter.windows if window is not None}
    if owner is None or owner.window is None or not windows or windows == {owner.window}:
        return None
    window = min(windows)
    shift = drafter.window_shift + owner.window - window
    return Sign(
        what=f"its sliding_window is {window}, the target's {owner.window}",
        do=f"write sliding_window: {owner.window} into the text_config of the assistant's config.json",
        mended=lambda: changed_assistant(drafter, target, window_shift=shift),
    )


def rounded_weights(drafter: Drafter, subject: Subject) -> Sign | None:
    """Weights that a quantiser has rounded, in a checkpoint of 16 bits."""
    form = rounded_to(_module(drafter))
    if form is None:
        return None
    return Sign(
        what=f"the drafter's weights lie on the grid of {form}: they were rounded to that before they were stored",
        do="load the drafter's original checkpoint in 16 bits; a drafter is small, and a rounded one is accepted less",
    )


def norm_of_ones(drafter: Drafter, subject: Subject) -> Sign | None:
    """A norm that was never loaded has the gains that it was made with."""
    gains = {
        name: bool(torch.all(parameter == 1))
        for name, parameter in _module(drafter).named_parameters()
        if parameter.dim() == 1 and "norm" in name and name.endswith("weight")
    }
    untrained = [name for name, ones in gains.items() if ones]
    if not untrained or len(untrained) > len(gains) / 2:
        return None  # a drafter whose norms have no gains at all
    return Sign(
        what=f"all gains of its {', '.join(untrained)} are 1, those of its other norms are not: it was not exported",
        do=f"export the drafter again with {untrained[0]}",
    )


def qat_with_plain(drafter: Gemma4MTPDrafter, subject: Subject) -> Sign | None:
    """Targets trained for int4 have assistants of their own. Only names as they are published are compared."""
    target, assistant = subject.target.name, str(getattr(drafter.assistant.config, "_name_or_path", "") or "")
    is_qat, drafts_for_qat = (bool(re.search(r"(^|[-_])qat([-_]|$)", _last(name))) for name in (target, assistant))
    published = "gemma" in _last(target) and "assistant" in _last(assistant)
    if not published or is_qat == drafts_for_qat:
        return None
    wanted, given = ("QAT", "plain") if is_qat else ("plain", "QAT")
    return Sign(
        what=f"the target {_last(target)} is {'a QAT' if is_qat else 'no QAT'} model, and {_last(assistant)} the "
        f"{given} assistant",
        do=f"use the {wanted} target's own assistant; `specdec models` lists the pairs",
    )


def no_template(drafter: Drafter, subject: Subject) -> Sign | None:
    """A target of chats whose tokenizer came without its template."""
    target, _, tokenizer = subject
    chats = isinstance(drafter, Gemma4MTPDrafter) or re.search(r"(?i)[-_](it|instruct|chat)\b", _last(target.name))
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is not None or not chats:
        return None
    return Sign(
        what=f"the tokenizer of {_last(target.name)} has no chat template; drafters of chat models learn from chats",
        do="put chat_template.jinja (or chat_template in tokenizer_config.json) of the published target next to it",
    )


def _module(drafter: Drafter) -> nn.Module:
    if isinstance(drafter, Eagle3Drafter):
        return drafter.head
    assert isinstance(drafter, Gemma4MTPDrafter)
    module: nn.Module = drafter.assistant
    return module


ROWS = 64
"""Rows of a matrix that are examined, from the first on."""
COLUMNS = 1024
"""Columns of those rows that are examined."""
ON_GRID = 0.97
"""Least share of the weights on the grid."""
MIN_WEIGHTS = 256
"""A matrix with fewer examined weights than this is not judged."""


def rounded_to(module: nn.Module) -> str | None:
    """ "FP8" or "int4", if most of the matrices of `module` that are large enough lie on such a grid."""
    found = [form for form in map(grid_of, _matrices(module)) if form is not None]
    forms = [form for form in found if form != NONE]
    if not forms or len(forms) < 0.5 * len(found):
        return None
    return max(set(forms), key=forms.count)


NONE = "no grid"


def grid_of(weight: torch.Tensor) -> str | None:
    """The grid of one matrix [N, K], `NONE`, or None where it is too small to tell."""
    rows = weight.detach()[:ROWS, :COLUMNS].float().cpu()
    if rows.numel() < MIN_WEIGHTS or len(rows.abs().unique()) < 6:
        return None
    largest = float(weight.detach().abs().max())
    for groups in _groups(rows):
        if any(_whole(groups, top) >= ON_GRID for top in (7.0, 8.0, 7.5)):
            return "int4"
    row_scale = weight.detach()[:ROWS].abs().amax(1, keepdim=True).float().cpu() / 448
    if any(_e4m3(rows / scale) >= ON_GRID for scale in (row_scale, torch.tensor(largest / 448), torch.tensor(1.0))):
        return "FP8"
    return NONE


def _matrices(module: nn.Module) -> Iterator[torch.Tensor]:
    """Those of linear layers within decoder layers: what quantisers round."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear) and ".layers." in f".{name}.":
            yield each.weight


def _groups(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Rows cut into the groups that share a scale: [n, G]."""
    yield rows
    for size in (32, 64, 128):
        whole = rows.shape[1] // size * size
        if whole:
            yield rows[:, :whole].reshape(-1, size)


def _whole(groups: torch.Tensor, top: float) -> float:
    """Share of the weights that are whole multiples of the largest over `top`."""
    steps = groups / (groups.abs().amax(1, keepdim=True) / top).clamp(min=1e-30)
    return float(((steps - steps.round()).abs() < 0.04).float().mean())


def _e4m3(values: torch.Tensor) -> float:
    """Share of the non-zero values that e4m3 holds, to the rounding of bfloat16."""
    values = values[values.abs() > 2.0**-6]  # below lie e4m3's subnormal numbers
    if not values.numel():
        return 0.0
    near = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return float(((values - near).abs() <= values.abs() * 2.0**-7).float().mean())
