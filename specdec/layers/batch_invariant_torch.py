"""Batch-invariant forms of torch operations: a row has the same bits whatever the other rows of its tile are.

    functions   torch computes most elements of a tensor in vectors, but the last ones, and those at the end of a
                thread's share, one by one; exponentials may differ in the last bit. `VectorwiseMode` pads and cuts, so
                that every element is computed in a vector
    products    with few columns are divided among threads along K. `VectorwiseMode` widens them until they are not, so
                a column has the same bits as in any wider product, and ranks may share its rows
    experts     get the rows that chose them, so their shapes depend on other rows: `RowwiseModule` runs each row alone

All other operations between attentions (products of a fixed shape, sums over a row, elementwise operations) were found
to give a row the same bits in any place. `models/batch_invariance.py` checks every model.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from specdec.gpu.operations import FAST, KERNELS, REFERENCE, Operations
from specdec.layers.linear import Mlp, linear, reference_gated_linear, reference_linear, reference_linear_parts
from specdec.layers.moe.dense_and_moe import mlp_and_experts
from specdec.layers.moe.experts import Experts, apply_experts, reference_apply_experts
from specdec.layers.moe.fork_join import Fork
from specdec.layers.moe.routing import Router, Routing, reference_route
from specdec.layers.packed.packed_weight import PackedWeight, Weight
from specdec.layers.product import Product, SplitK, split_k_of

VECTOR = 64
"""A multiple of torch's vector length for every dtype."""

SHARE = 1 << 14
"""The most elements that torch assigns to one thread."""

FEW_COLUMNS = 16

FUNCTIONS: frozenset[Any] = frozenset(
    {
        *(torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, torch.tanh, torch.Tensor.tanh, F.tanh),
        *(F.silu, torch._C._nn.silu, F.gelu, torch._C._nn.gelu, F.softplus, F.mish, F.elu, torch.erf, torch.Tensor.erf),
        *(torch.exp, torch.Tensor.exp, torch.expm1, torch.Tensor.expm1, torch.log, torch.Tensor.log),
        *(torch.log1p, torch.Tensor.log1p, torch.rsqrt, torch.Tensor.rsqrt, torch.sin, torch.cos),
        *(torch.Tensor.sin, torch.Tensor.cos, torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, F.logsigmoid),
    }
)


class VectorwiseMode(TorchFunctionMode):
    """Within the block, elementwise functions and products with few columns do not depend on an element's place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FUNCTIONS and _is_alone(args, kwargs):
            return _by_vectors(func, *args, **kwargs)
        if func is F.linear and len(args) > 1 and type(args[1].data) is torch.Tensor and len(args[1]) < FEW_COLUMNS:
            return _few_columns(*args, **kwargs)
        return func(*args, **kwargs)


def _is_alone(args: Any, kwargs: Any) -> bool:
    others = [*args[1:], *kwargs.values()]
    return isinstance(args[0], torch.Tensor) and not any(isinstance(x, torch.Tensor) for x in others)


def _by_vectors(func: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if x.numel() % VECTOR == 0 and x.numel() <= SHARE and x.is_contiguous():
        return func(x, *args, **kwargs)
    padded = F.pad(x.flatten(), (0, -x.numel() % VECTOR), value=1.0)
    done = [func(share, *args, **kwargs) for share in padded.split(SHARE)]
    return torch.cat(done)[: x.numel()].view(x.shape)


def _few_columns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    num_columns = len(weight)
    missing = FEW_COLUMNS - num_columns
    wide_bias = None if bias is None else F.pad(bias, (0, missing))
    return F.linear(x, F.pad(weight, (0, 0, 0, missing)), wide_bias)[..., :num_columns].contiguous()


def rows_alone(compute: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    """Apply `compute` to each row of `args` [T, ...] alone and stack the results. A row equal to the previous one, as
    in padding, is computed once."""
    done: list[torch.Tensor] = []
    before: list[torch.Tensor] | None = None
    for i in range(len(args[0])):
        row = [x[i : i + 1].clone() for x in args]
        if before is None or not all(map(torch.equal, row, before)):
            newest = compute(*row)
            before = row
        done.append(newest)
    return torch.cat(done)


class RowwiseModule(nn.Module):
    """Replaces a module whose arguments all have the same number of rows, and runs it for each row alone."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source = source

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return rows_alone(self.source, *args)


def run_experts_by_row(model: nn.Module) -> None:
    """Replace the experts in a private copy by `RowwiseModule`: mixtures call `experts` with rows and their routing."""
    for module in model.modules():
        experts = module._modules.get("experts")
        if experts is not None and not isinstance(experts, RowwiseModule):
            module._modules["experts"] = RowwiseModule(experts)


def rowwise_apply_experts(x: torch.Tensor, routing: Routing, experts: Experts) -> Product:

    def parts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return reference_apply_experts(x, Routing(chosen, weights), experts).parts.transpose(0, 1)  # [1, k, H]

    return Product(rows_alone(parts, x, *routing).transpose(0, 1), None, x.dtype)


def rowwise_linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, split_k: SplitK | None = None
) -> Product:
    """`reference_linear`, but sums over ranges of K like the kernels, so that ranks can share them."""
    split_k = split_k or split_k_of(weight)
    if split_k.splits == 1 or isinstance(weight, PackedWeight):
        return reference_linear(x, weight, bias)
    return reference_linear_parts(x, weight, split_k)._replace(bias=bias)


def rowwise_mlp_and_experts(fork: Fork, mlp: Mlp, router: Router, experts: Experts) -> tuple[Product, Product]:
    dense = rowwise_linear(reference_gated_linear(fork.mlp, mlp.gate_up, mlp.activation, mlp.limit), mlp.down)
    return dense, rowwise_apply_experts(fork.experts, reference_route(fork.router, router), experts)


ROWWISE = REFERENCE.replacing(
    {apply_experts: rowwise_apply_experts, linear: rowwise_linear, mlp_and_experts: rowwise_mlp_and_experts}
)
"""Batch-invariant form of `REFERENCE`, for rows in tiles of a fixed size under `VectorwiseMode`."""


def rowwise(ops: Operations | None) -> Operations | None:
    """Returns the batch-invariant form of these operations."""
    return KERNELS if ops is FAST else ROWWISE if ops is REFERENCE else ops
