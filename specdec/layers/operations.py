"""What the fused modules compute with, as one object; the choice is made once, where a model is fused.

    REFERENCE   plain torch                                    runs anywhere, and is the oracle
    KERNELS     the kernels of this folder                     a row's bits do not depend on the number of rows
    FAST        the same, the vendor's products at many rows   faster prefill and large batches, without that property

Signatures are the references' own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from specdec.layers.linear import (
    Product,
    finish,
    gated_linear,
    linear,
    reference_finish,
    reference_gated_linear,
    reference_linear,
    vendor_gated_linear,
    vendor_linear,
)
from specdec.layers.norm import norm, reference_norm
from specdec.layers.ple import gated_projection, layer_inputs, reference_gated_projection, reference_layer_inputs
from specdec.layers.rope_store import Attended, reference_rope_store, rope_store
from specdec.layers.rotary import Rotary, reference_rotary, rotary


class Operations(NamedTuple):
    linear: Callable[..., Product]
    gated_linear: Callable[..., torch.Tensor]
    finish: Callable[[Product], torch.Tensor]
    norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotary: Callable[[torch.Tensor, torch.Tensor, float, torch.dtype], Rotary]
    rope_store: Callable[..., Attended]
    layer_inputs: Callable[..., torch.Tensor]
    gated_projection: Callable[..., Product]


KERNELS = Operations(linear, gated_linear, finish, norm, rotary, rope_store, layer_inputs, gated_projection)

FAST = KERNELS._replace(linear=vendor_linear, gated_linear=vendor_gated_linear)

REFERENCE = Operations(
    reference_linear,
    reference_gated_linear,
    reference_finish,
    reference_norm,
    reference_rotary,
    reference_rope_store,
    reference_layer_inputs,
    reference_gated_projection,
)
