"""How a model stores its weights: their size and form, and whether weights in 16 bits were rounded by a quantiser.

Packed weights are buffers, which `parameters()` omits. A quantiser leaves few different numbers among the weights that
share a scale. Of 128 consecutive weights of a row 9 in 10 are different, of numbers in FP8 times a scale 3 to 6.
"""

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
ROUNDED = (("4 bits", 32, 0.6), ("8 bits", 128, 0.75))
"""Form, consecutive weights, and the share of different numbers among these below which they were rounded to it."""
NONE = "not rounded"


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
    """ "8 bits" or "4 bits" if at least half of the judged linear layers in decoder layers of `module` were rounded to
    that; None: they were not."""
    linears = (
        each for name, each in module.named_modules() if isinstance(each, nn.Linear) and ".layers." in f".{name}."
    )
    found = [form for each in linears if (form := grid_of(each.weight)) is not None]
    forms = [form for form in found if form != NONE]
    return max(set(forms), key=forms.count) if forms and 2 * len(forms) >= len(found) else None


def grid_of(weight: torch.Tensor) -> str | None:
    """The form to which one matrix [N, K] was rounded, or NONE; None: it is too small to tell, or nearly constant."""
    rows = weight.detach()[:EXAMINED_ROWS, :EXAMINED_COLUMNS].float().cpu()
    if len(rows.abs().unique()) < 6:
        return None
    for form, size, least in ROUNDED:
        if rows.shape[1] < size:
            return None
        ordered = rows[:, : rows.shape[1] // size * size].reshape(-1, size).sort(dim=1).values
        is_new = ordered.diff(dim=1, prepend=ordered.new_full((len(ordered), 1), torch.nan)) != 0
        counted = ordered != 0  # zeros of a sparse matrix do not count
        if float((is_new & counted).sum() / counted.sum()) < least:
            return form
    return NONE
