"""The launches of a fused recurrent layer against their references, and these against transformers' own module."""

from typing import Any

import pytest
import torch
from one_text import OneText

from specdec.evaluation.phases.random_weights import FORMS, random_packed
from specdec.gpu.operations import KERNELS, REFERENCE, Operations
from specdec.gpu.tensor_tree import map_tensors
from specdec.layers.description.families import described_mixer
from specdec.layers.description.merge import WeightGroups
from specdec.layers.gated_delta import (
    DeltaHeads,
    delta_inputs,
)
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import Product
from specdec.layers.packed.packed_modules import PackedLinear
from specdec.layers.packed.weight_slices import StackedWeights, place_weight, rank_rows

from marks import slow, usual_cases
from tiny_models import build_target

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def close(found: Any, wanted: Any, dtype: torch.dtype = torch.float32) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_a_small_step_is_exact() -> None:
    """log(1 + e^x) of an x far below 0 is e^x, and no 0 of 1 + e^x rounded."""
    heads = DeltaHeads(1, 2, 1, 1)
    product = Product.from_value(torch.tensor([[0.0, 0, 0, 0, 0, 0, 0, 0, -30.0, -17.0]], device=DEVICE))
    _, _, g, _ = delta_inputs(product, product, torch.zeros(2, device=DEVICE), torch.zeros(2, device=DEVICE), heads)
    torch.testing.assert_close(g, -torch.tensor([[-30.0, -17.0]], device=DEVICE).exp(), rtol=1e-4, atol=0)


def packed(linear: torch.nn.Linear) -> PackedLinear:
    draw = torch.Generator(DEVICE).manual_seed(len(linear.weight))
    return PackedLinear(random_packed(FORMS["int4-g32"], draw, linear.weight.shape))


@usual_cases(
    *("qwen3_5-plain-kernels", "qwen3_5-gates left in 16 bits-reference", "qwen3_next-plain-reference"),
    *("qwen3_next-packed-kernels", "qwen3_5_moe-packed-reference"),
)
@torch.no_grad()
@pytest.mark.parametrize("ops", [REFERENCE, slow(KERNELS)], ids=["reference", "kernels"])
@pytest.mark.parametrize("form", ["plain", "packed", "gates left in 16 bits"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3_5_moe"])
def test_a_mixer_is_the_module_it_replaces(family: str, form: str, ops: Operations) -> None:
    module = build_target(family).eval().model.layers[0].linear_attn.to(DEVICE)
    for name, param in module.named_parameters():
        param.add_(torch.randn_like(param), alpha=0.1 if "proj" in name else 0.3)
    for name, child in list(module.named_children()):
        gates = name in ("in_proj_ba", "in_proj_b", "in_proj_a")
        if form != "plain" and name.startswith("in_proj") and not (gates and form != "packed"):
            setattr(module, name, packed(child))
    parts = described_mixer(module, WeightGroups(unmerged=False))
    x = randn(9, module.hidden_size)
    want = module(x[None])[0]
    rows = parts["mixer"].run(ops(linear)(x, parts["qkv"]), x, 0, OneText(), ops)
    close(parts["mixer"].finish(rows, ops) @ parts["out"].T, want)
    some = tuple(row[[1, 5]] for row in rows)
    close(parts["mixer"].finish(some, ops) @ parts["out"].T, want[[1, 5]])
    by_rank = []
    for rank in range(2):  # which has the heads of one of two devices
        own = map_tensors(parts["mixer"].share(rank, 2), lambda rows: place_weight(rows, torch.cat), StackedWeights)
        qkv = place_weight(rank_rows(parts["qkv"], parts["mixer"].sections, rank, 2), torch.cat)
        by_rank.append(own.finish(own.run(ops(linear)(x, qkv), x, 0, OneText(), ops), ops))
    whole = parts["mixer"].finish(rows, ops)
    close(torch.cat(by_rank, dim=1), whole)
    assert ops is REFERENCE or torch.cat(by_rank, dim=1).equal(whole)
