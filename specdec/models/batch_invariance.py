"""Batch invariance: a row has the same bits whatever the other rows of a forward are. How torch gets it, and the check.

Among kernels, `layers/gemm/linear.py` cuts sums by the weight only, and `attention/kernels/tree_attention.py` cuts keys
by position. Layers without such kernels run in tiles of a fixed number of rows (`attention/path_attention.py`),
in which torch's own operations need care:

    functions   torch computes most elements of a tensor in vectors, but the last ones, and those at the end of a
                thread's share, one by one; exponentials may differ in the last bit. `VectorwiseMode` pads and cuts, so
                that every element is computed in a vector
    products    with few columns are divided among threads along K. `VectorwiseMode` widens them until they are not, so
                a column has the same bits as in any wider product, and ranks may share its rows
    experts     get the rows that chose them, so their shapes depend on other rows: `RowwiseModule` runs each row alone

All other operations between attentions (products of a fixed shape, sums over a row, elementwise operations) were found
to give a row the same bits in any place. `depends_on_others` checks every deterministic model: the 12 rows of two texts
run at once; then again in several forwards: some rows, one row alone, and the rest in reverse order among rows of other
texts. Queries, keys, values, states and logits must be bitwise equal. Attention treats each row alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from specdec.attention.bridge import ForwardContext
from specdec.attention.path_attention import ROWS, pad_rows, row_tiles, tile_context
from specdec.gpu.operations import FAST, KERNELS, REFERENCE, Operations
from specdec.kvcache.layout import KVLayout
from specdec.layers.gemm.linear import Mlp, linear, reference_gated_linear, reference_linear, reference_linear_parts
from specdec.layers.gemm.product import Product, SplitK, split_k_of
from specdec.layers.moe.dense_and_moe import mlp_and_experts
from specdec.layers.moe.experts import Experts, apply_experts, reference_apply_experts
from specdec.layers.moe.fork_join import BranchInputs
from specdec.layers.moe.routing import Router, Routing, reference_route
from specdec.layers.packed.packed_weight import PackedWeight, Weight
from specdec.models.probe import ProbeContext, Run

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

MANY_ROWS = 80
"""Rows per forward on kernels: more than the smallest tiles of their products hold."""

Row = tuple[int, int]
"""(text, position)"""


class VectorwiseMode(TorchFunctionMode):
    """Within the block, elementwise functions and products with few columns do not depend on an element's place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        others = (*args[1:], *kwargs.values())
        if func in FUNCTIONS and isinstance(args[0], torch.Tensor) and not any(map(torch.is_tensor, others)):
            return _by_vectors(func, *args, **kwargs)
        if func is F.linear and len(args) > 1 and type(args[1].data) is torch.Tensor and len(args[1]) < FEW_COLUMNS:
            return _few_columns(*args, **kwargs)
        return func(*args, **kwargs)


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


def rowwise_mlp_and_experts(
    inputs: BranchInputs, mlp: Mlp, router: Router, experts: Experts
) -> tuple[Product, Product]:
    dense = rowwise_linear(reference_gated_linear(inputs.mlp, mlp.gate_up, mlp.activation, mlp.limit), mlp.down)
    return dense, rowwise_apply_experts(inputs.experts, reference_route(inputs.router, router), experts)


ROWWISE = REFERENCE.replacing(
    {apply_experts: rowwise_apply_experts, linear: rowwise_linear, mlp_and_experts: rowwise_mlp_and_experts}
)
"""Batch-invariant form of `REFERENCE`, for rows in tiles of a fixed size under `VectorwiseMode`."""


def rowwise(ops: Operations | None) -> Operations | None:
    """Returns the batch-invariant form of these operations."""
    return KERNELS if ops is FAST else ROWWISE if ops is REFERENCE else ops


def depends_on_others(
    layout: KVLayout,
    texts: torch.Tensor,
    run: Run,
    logits: Callable[[torch.Tensor], torch.Tensor],
    in_tiles: bool,
) -> str | None:
    """The first part of a row that depends on other rows, as the end of a sentence; None: no part does. texts: [2, T]
    tokens."""

    def record(*forwards: list[Row]) -> dict[str, dict[Row, torch.Tensor]]:
        """Queries, keys, values, states and logits of the rows of these forwards, by name and row."""
        found: dict[str, dict[Row, torch.Tensor]] = {}
        past: ProbeContext | None = None
        for rows in forwards:
            rows = _with_junk(rows, ROWS if in_tiles else 0)
            tokens = texts.new_tensor([int(texts[text % 2, (pos + text // 2) % texts.shape[1]]) for text, pos in rows])
            text, positions = texts.new_tensor(rows).unbind(1)
            past = ProbeContext(layout, text, positions, past, by_row=True)
            with _vectorwise(texts.device) if in_tiles else nullcontext():
                states = run(tokens[None], positions[None], past)
            assert not past.faults, past.faults
            each = {
                f"the {name} of layer {layer}": part
                for layer, parts in sorted(past.rows.items())
                for name, part in zip(("queries", "keys", "values"), parts, strict=True)
            }
            for name, of_rows in {**each, "the final states": states[0], "the logits": logits(states)[0]}.items():
                found.setdefault(name, {}).update(zip(rows, of_rows, strict=True))
        return found

    rows = [(text, pos) for text in (0, 1) for pos in range(texts.shape[1])]
    first = [(text, pos) for pos in (0, 2, 1) for text in (1, 0)]
    alone = (0, 3)
    others = [row for row in reversed(rows) if row not in first and row != alone]
    whole, pieces = record(rows), record(first, [alone], _with_junk(others, ROWS if in_tiles else MANY_ROWS))
    return next((what for what in whole if any(not torch.equal(whole[what][r], pieces[what][r]) for r in rows)), None)


def _with_junk(rows: list[Row], least: int) -> list[Row]:
    """Extend to at least this many rows by texts of one token."""
    return [*rows, *((2 + i, 0) for i in range(least - len(rows)))]


def forward_in_tiles(
    run: Run, tokens: torch.Tensor, context: ForwardContext, aux_layers: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """tokens [B, N] -> states [B, N, H], and the concatenated states that enter `aux_layers` [B, N, A * H], or None."""
    (batch, width), positions = tokens.shape, context.plan.positions.flatten()
    done: list[torch.Tensor] = []
    rows = torch.arange(batch * width, device=tokens.device)
    order = []
    with _vectorwise(tokens.device):
        for tile in row_tiles(batch, width):
            part = tile_context(context, tile)
            out = run(tile.rows(tokens.flatten(), width)[None], tile.rows(positions, width)[None], part)
            states = [out, *(state for layer in aux_layers if (state := part.states[layer]) is not None)]
            assert len(states) == 1 + len(aux_layers), f"{len(states) - 1} states of layers {aux_layers}"
            order.append(rows.view(batch, width)[tile].flatten())
            done.append(torch.cat([state.view(ROWS, -1) for state in states], dim=-1)[: len(order[-1])])
    packed = torch.cat(done)
    together = torch.empty_like(packed).index_copy_(0, torch.cat(order), packed).view(batch, width, -1)
    hidden, aux = together.split([out.shape[-1], together.shape[-1] - out.shape[-1]], dim=-1)
    return hidden.contiguous(), aux.contiguous() if aux_layers else None


def rows_in_tiles(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply `compute` to the rows of x [..., H] in tiles -> [..., V]."""
    rows = x.reshape(-1, x.shape[-1])
    with _vectorwise(x.device):
        tiles = [compute(pad_rows(tile)) for tile in rows.split(ROWS)]
    return torch.cat(tiles)[: len(rows)].view(*x.shape[:-1], -1)


def _vectorwise(device: torch.device) -> AbstractContextManager[object]:
    return VectorwiseMode() if device.type == "cpu" else nullcontext()
