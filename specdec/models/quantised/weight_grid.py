"""Whether a quantiser has rounded the weights of a module that is stored in 16 bits.

A quantiser puts every weight on a grid: its scale, which is the largest weight of its group over the largest value of
the grid, times the values of e4m3 or whole numbers up to 8. Trained weights lie on it for one in six to ten.
"""

from collections.abc import Iterator

import torch
from torch import nn

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
