"""How a model stores its weights: their size and form, and whether a quantiser has rounded weights that are in 16 bits.

Packed weights are buffers, which `parameters()` omits. A quantiser makes every weight a multiple of its group's scale
(largest weight / largest grid value): times an e4m3 number, or times a whole number up to 8. Of trained weights, one in
six to ten is such a multiple.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.layers.packed.packed_modules import packed_of
from specdec.layers.packed.packed_weight import PackedWeight
from specdec.models.quantised.formats import dtype_name

EXAMINED_ROWS = 64
"""Rows of a matrix that are examined, from the first on."""
EXAMINED_COLUMNS = 1024
"""Columns of those rows that are examined."""
ON_GRID = 0.97
"""Minimum share of the weights on a grid for a matrix to count as rounded."""
MIN_WEIGHTS = 256
"""A matrix with fewer examined weights than this is not judged."""
NONE = "no grid"


class StoredWeights(NamedTuple):
    """Storage of a model's weights.

    numbers: number of weights. form: format of packed weights, with the columns per scale; empty: none are packed.
    """

    numbers: int
    bytes: int
    form: str

    def summary(self, dtype: torch.dtype) -> str:
        """Describe the storage in words. dtype: of weights that are not packed."""
        return f"{self.form}, the rest {dtype_name(dtype)}" if self.form else dtype_name(dtype)


def stored_weights(*models: nn.Module) -> StoredWeights:
    """Count the weights of several models together; shared weights count once."""
    parameters = {weight for model in models for weight in model.parameters()}
    modules = (module for model in models for module in model.modules())
    packed = {id(weight.words): weight for module in modules for weight in packed_of(module)}.values()
    return StoredWeights(
        sum(weight.numel() for weight in parameters) + sum(weight.shape.numel() for weight in packed),
        sum(weight.nbytes for weight in parameters) + sum(weight.nbytes for weight in packed),
        " and ".join(sorted({_form(weight) for weight in packed})),
    )


def is_quantised(model: PreTrainedModel) -> bool:
    """Whether specdec or transformers runs weights of the model from a quantised form."""
    return getattr(model, "hf_quantizer", None) is not None or bool(stored_weights(model).form)


def weights_in_words(model: PreTrainedModel) -> str:
    """Storage and size of a model's weights, as the log says it."""
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:  # its tensors may not tell their bytes
        method = quantizer.quantization_config.quant_method
        return f"{getattr(method, 'value', method)} as transformers runs it, the rest {dtype_name(model.dtype)}"
    stored = stored_weights(model)
    size = f"{stored.bytes / 1e9:.1f} GB" if stored.bytes >= 1e9 else f"{stored.bytes / 1e6:.0f} MB"
    return f"{stored.summary(model.dtype).replace('-g', ' in groups of ')} ({size})"


def _form(weight: PackedWeight) -> str:
    if weight.code == "e2m1":
        return "mxfp4"
    if weight.code == "e4m3":
        return "fp8" if weight.has_row_scales else f"fp8-g{weight.group}"
    return f"int4-g{weight.group}"


def rounded_to(module: nn.Module) -> str | None:
    """ "FP8" or "int4" if at least half of the judged matrices of `module` are on such a grid; None: they are not."""
    found = [form for form in map(grid_of, _matrices(module)) if form is not None]
    forms = [form for form in found if form != NONE]
    return max(set(forms), key=forms.count) if forms and 2 * len(forms) >= len(found) else None


def grid_of(weight: torch.Tensor) -> str | None:
    """The grid of one matrix [N, K]: "FP8", "int4" or NONE; None: it is too small to tell."""
    rows = weight.detach()[:EXAMINED_ROWS, :EXAMINED_COLUMNS].float().cpu()
    if rows.numel() < MIN_WEIGHTS or len(rows.abs().unique()) < 6:
        return None
    largest = float(weight.detach().abs().max())
    for groups in _groups(rows):
        if any(_whole(groups, top) >= ON_GRID for top in (7.0, 8.0, 7.5)):
            return "int4"
    row_scale = weight.detach()[:EXAMINED_ROWS].abs().amax(1, keepdim=True).float().cpu() / 448
    if any(_e4m3(rows / scale) >= ON_GRID for scale in (row_scale, torch.tensor(largest / 448), torch.tensor(1.0))):
        return "FP8"
    return NONE


def _matrices(module: nn.Module) -> Iterator[torch.Tensor]:
    """The weights that quantisers round: linear layers within decoder layers."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear) and ".layers." in f".{name}.":
            yield each.weight


def _groups(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Divide rows into possible groups with one scale, [n, G]."""
    yield rows
    for size in (32, 64, 128):
        whole = rows.shape[1] // size * size
        if whole:
            yield rows[:, :whole].reshape(-1, size)


def _whole(groups: torch.Tensor, top: float) -> float:
    """Share of the weights that are multiples of (largest weight / top)."""
    steps = groups / (groups.abs().amax(1, keepdim=True) / top).clamp(min=1e-30)
    return float(((steps - steps.round()).abs() < 0.04).float().mean())


def _e4m3(values: torch.Tensor) -> float:
    """Share of the non-zero values that are e4m3 numbers, within the rounding of bfloat16."""
    values = values[values.abs() > 2.0**-6]  # smaller ones are subnormal in e4m3
    if not values.numel():
        return 0.0
    near = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return float(((values - near).abs() <= values.abs() * 2.0**-7).float().mean())
