"""Packed random weights in the layers of a model that is on `meta`: the model is never in memory unpacked.

What published checkpoints leave in 16 bits stays so: embeddings, the head, routers, norms, and what lies outside of the
layers. In MXFP4 only experts are packed, as in GPT-OSS. A weight [N, K] has a standard deviation of K^-0.5 (see
random_weights.py), and its numbers have a mean of 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import floor, gcd, log2
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.errors import ConfigError, require_one_of
from specdec.layers.moe.moe_families import experts_of
from specdec.layers.packed.packed_experts import PackedExperts
from specdec.layers.packed.packed_linear import PackedLinear
from specdec.layers.packed.packed_weight import BITS, PackedWeight, numbers_of, pack

COLUMNS = 32
"""K of every packed weight is a multiple: what a word's order and the smallest group need."""

KEPT_BITS = {"int4": (0x11111111, -1), "e2m1": (0, -1), "e4m3": (0, ~0x44004400)}
"""Of random words, by code: bits that are set, then bits that are kept. int4: odd numbers, since 0 to 15 less 8 have a
mean of -0.5. e4m3: no highest bit of the exponent, so that no number is infinite or NaN."""

SPREAD = 0.5
"""Scales are 1 - this to 1 + this times their middle."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How `specdec bench --weights` packs the layers. group: columns with one scale at most, None: one scale a row."""

    name: str
    code: str
    group: int | None
    experts_only: bool = False

    def group_of(self, columns: int) -> int:
        """The largest group up to `group` that divides K; raises ConfigError where K cannot be packed."""
        if columns % COLUMNS:
            raise ConfigError(f"weights={self.name!r}: {columns} columns are no multiple of {COLUMNS}")
        return columns if self.group is None else gcd(self.group, columns)


UNPACKED = "bf16"
FORMS = {
    form.name: form
    for form in (
        WeightForm("int4-g32", "int4", 32),
        WeightForm("int4-g128", "int4", 128),
        WeightForm("fp8", "e4m3", None),
        WeightForm("mxfp4", "e2m1", 32, experts_only=True),
    )
}

MakePacked = Callable[[torch.Size], PackedWeight]
"""[.., N, K] -> a packed weight of that shape."""


def find_form(name: str) -> WeightForm | None:
    """None: not packed, in bfloat16. Raises ConfigError with the list where there is none of that name."""
    require_one_of("weights", name, (UNPACKED, *FORMS))
    return FORMS.get(name)


def empty_packed(form: WeightForm, device: torch.device, shape: torch.Size) -> PackedWeight:
    *leading, rows, columns = shape
    group = form.group_of(columns)
    words = torch.empty((*leading, rows, columns * BITS[form.code] // 32), dtype=torch.int32, device=device)
    scales = torch.empty((*leading, columns // group, rows), dtype=torch.bfloat16, device=device)
    return PackedWeight(form.code, words, scales, None, group)


def random_packed(form: WeightForm, generator: torch.Generator, shape: torch.Size) -> PackedWeight:
    """Made on the generator's device, in place: nothing else is allocated there."""
    weight = empty_packed(form, generator.device, shape)
    set_bits, kept_bits = KEPT_BITS[form.code]
    weight.words.random_(-(2**31), 2**31, generator=generator).bitwise_or_(set_bits).bitwise_and_(kept_bits)
    middle = shape[-1] ** -0.5 / root_mean_square(form.code)
    if form.code != "e2m1":
        middle /= (1 + SPREAD**2 / 3) ** 0.5
        weight.scales.uniform_((1 - SPREAD) * middle, (1 + SPREAD) * middle, generator=generator)
        return weight
    below = 2.0 ** floor(log2(middle))  # powers of two: the one below the middle and, as often as it takes, the next
    weight.scales.bernoulli_((4 - (middle / below) ** 2) / 3, generator=generator).sub_(2).mul_(-below)
    return weight


def root_mean_square(code: str) -> float:
    """Root mean square of the numbers that random words hold, before their scales."""
    bits, (set_bits, kept_bits) = BITS[code], KEPT_BITS[code]
    every = (torch.arange(256) % (1 << bits)).to(torch.uint8)[None]
    words = pack(every, code).bitwise_or_(set_bits).bitwise_and_(kept_bits)
    numbers = numbers_of(PackedWeight(code, words, torch.ones((1, 1)), None, every.shape[1]))
    return float(numbers.square().mean().sqrt())


def pack_layers(model: PreTrainedModel, form: WeightForm, make: MakePacked) -> None:
    """Put packed modules in the place of linears and experts of the decoder layers. Raises ConfigError where the form
    packs none of them."""
    layers: Any = model.get_decoder().layers
    packed = 0
    for parent in [module for layer in layers for module in layer.modules()]:
        for name, child in list(parent.named_children()):
            new = _packed_module(parent, child, form, make)
            if new is not None:
                setattr(parent, name, new)
                packed += 1
    if not packed:
        raise ConfigError(f"weights={form.name!r} packs experts, and this shape has none; choose int4-g32 or fp8")


def _packed_module(parent: nn.Module, child: nn.Module, form: WeightForm, make: MakePacked) -> nn.Module | None:
    """What stands for `child`; None: it stays."""
    experts = experts_of(child)
    if experts is not None:
        weights: Any = {name: make(getattr(experts, name).shape) for name in ("gate_up", "down")}
        return PackedExperts(experts._replace(**weights), getattr(child, "act_fn", None))
    if form.experts_only or not isinstance(child, nn.Linear) or type(parent).__name__.endswith("Router"):
        return None
    return PackedLinear(make(child.weight.shape), child.bias)


@torch.no_grad()
def leave_meta(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate what is still on `meta`: parameters with any values, buffers such as rotary frequencies with theirs."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # a tied weight stays one
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    empty = torch.empty_like(tensor, device=device)
                    made[tensor] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
                tensors[name] = made[tensor]  # type: ignore[assignment]
    model.initialize_weights()
