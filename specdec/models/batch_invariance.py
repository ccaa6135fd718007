"""Batch invariance in plain torch: a row has the same bits whatever the other rows of a forward are.

Kernels are written for it: `layers/gemm/linear.py` cuts sums by the weight only, `attention/kernels/tree_attention.py`
cuts keys by position. Torch's own operations are not. Within `VectorwiseMode` these are computed in another way:

    products    by a weight: they run in tiles of ROWS rows, since the order of a sum depends on the number of rows.
                With few columns they would be divided among threads along K, so they are widened until they are not;
                then a column has the same bits as in any wider product, and ranks may share its rows
    functions   torch computes most elements of a tensor in vectors, but the last ones, and those at the end of a
                thread's share, one by one; exponentials may differ in the last bit. They are padded and cut, so that
                every element is computed in a vector

All other operations between attentions (sums over a row, elementwise arithmetic) were found to give a row the same bits
in any place and number. `probe.py` checks every deterministic model. Attention treats each row alone
(`attend_alone` in `attention/dense.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from specdec.gpu.operations import FAST, KERNELS, REFERENCE, Operations
from specdec.layers.gemm.linear import linear, reference_linear, reference_linear_parts
from specdec.layers.gemm.product import Product, SplitK, split_k_of
from specdec.layers.moe.dense_and_moe import mlp_and_experts, reference_mlp_and_experts
from specdec.layers.packed.packed_weight import PackedWeight, Weight

ROWS = 16
"""Rows of every product."""

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

PRODUCTS = frozenset({torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__})


class VectorwiseMode(TorchFunctionMode):
    """Within the block, elementwise functions and products by a weight do not depend on the place and number of
    rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        others = (*args[1:], *kwargs.values())
        if func in FUNCTIONS and isinstance(args[0], torch.Tensor) and not any(map(torch.is_tensor, others)):
            return _by_vectors(func, *args, **kwargs)
        if func is F.linear:
            return _by_tiles(*args, **kwargs)
        if func in PRODUCTS and not kwargs and args[0].dim() > 1 and args[1].dim() == 2:
            return _by_tiles(args[0], args[1].t())
        if func is torch.addmm and not kwargs:  # the projection of GPT-2 and its kin
            return _by_tiles(args[1], args[2].t(), args[0])
        if func is torch._grouped_mm:
            return _grouped(*args, **kwargs)
        return func(*args, **kwargs)


def _by_vectors(func: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if x.numel() % VECTOR == 0 and x.numel() <= SHARE and x.is_contiguous():
        return func(x, *args, **kwargs)
    padded = F.pad(x.flatten(), (0, -x.numel() % VECTOR), value=1.0)
    done = [func(share, *args, **kwargs) for share in padded.split(SHARE)]
    return torch.cat(done)[: x.numel()].view(x.shape)


def _by_tiles(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` in tiles of ROWS rows, with at least FEW_COLUMNS columns."""
    columns = len(weight)
    if type(weight.data) is torch.Tensor and columns < FEW_COLUMNS:  # not a quantised one
        weight = F.pad(weight, (0, 0, 0, FEW_COLUMNS - columns))
        bias = None if bias is None else F.pad(bias, (0, FEW_COLUMNS - columns))
    rows = input.reshape(-1, input.shape[-1])
    tiles = F.pad(rows, (0, 0, 0, -len(rows) % ROWS)).split(ROWS)
    out = torch.cat([F.linear(tile, weight, bias) for tile in tiles])
    return out[: len(rows), :columns].reshape(*input.shape[:-1], columns)


def _grouped(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor, **unset: None) -> torch.Tensor:
    """`torch._grouped_mm`: rows [T, K] sorted by expert, weights [E, K, N], the ends of experts' rows [E] -> [T, N]."""
    parts = rows.tensor_split(offs[:-1].tolist())
    return torch.cat([_by_tiles(part, weight.t()) for part, weight in zip(parts, weights, strict=True) if len(part)])


def rowwise_linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, split_k: SplitK | None = None
) -> Product:
    """`reference_linear`, but sums over ranges of K like the kernels, so that ranks can share them."""
    split_k = split_k or split_k_of(weight)
    if split_k.splits == 1 or isinstance(weight, PackedWeight):
        return reference_linear(x, weight, bias)
    return reference_linear_parts(x, weight, split_k)._replace(bias=bias)


ROWWISE = REFERENCE.replacing(
    {linear: rowwise_linear, mlp_and_experts: partial(reference_mlp_and_experts, down=rowwise_linear)}
)
"""Batch-invariant form of `REFERENCE`, to run in `VectorwiseMode`."""


def rowwise(ops: Operations | None) -> Operations | None:
    """Returns the batch-invariant form of these operations."""
    return KERNELS if ops is FAST else ROWWISE if ops is REFERENCE else ops
