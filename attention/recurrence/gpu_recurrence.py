"""The recurrent layers of one forward on a GPU: `RecurrentForward` as kernels, without lengths read on the host.

When the first recurrent layer runs, one launch folds the states of all layers to the last multiple of FOLD among
committed tokens; each layer's launches start from these states. A run of a prompt then folds its own tokens up to their
last multiple of FOLD: block by block with the bits of decoding, or span by span.
"""

from typing import Any

import numpy as np
import torch

from specdec.attention.kernels.page_table import PageTable, build_page_tables
from specdec.attention.plan import KVPlan, Pack, PackTables
from specdec.attention.recurrence.block_kernels import CHUNK
from specdec.attention.recurrence.convolution_kernels import (
    run_convolution_kernel,
    run_inputs_kernel,
    tree_convolution_kernel,
)
from specdec.attention.recurrence.fold_kernels import begin_kernel, fold_kernel, run_kernel
from specdec.attention.recurrence.span_kernels import (
    SPAN,
    SPAN_COLUMNS,
    SPAN_PARTS,
    SPAN_STAGES,
    SPAN_WARPS,
    WEIGHT_CHUNK,
    WEIGHT_WARPS,
    spans_kernel,
    weights_kernel,
)
from specdec.attention.recurrence.tree_kernel import fast_tree_kernel, tree_kernel
from specdec.gpu.mirrored_array import upload
from specdec.gpu.triton_shim import pdl_options, triton
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.layout import GroupId
from specdec.kvcache.recurrent_state import FOLD
from specdec.kvcache.store import KVStore, LayerKV, RecurrentLayers
from specdec.kvcache.table import RequestTable, Rows

CHANNELS = 512
"""Channels per program in a convolution of trees."""

RUN_ROWS, RUN_CHANNELS = 8, 256
"""Tokens and channels per program in a convolution of runs."""

COLUMNS = 32
"""Value channels per program of the kernels for trees, folds, and runs in decoding's order."""

FORM: dict[str, Any] = {"PRECISION": "ieee", "num_warps": 4, "num_stages": 3}
"""Launch parameters of these kernels, which make them batch-invariant. num_stages: chunks of a state that are loaded or
used at one time. "ieee" is exactly rounded float32; "tf32x3" is three tensor-core products instead."""

MAX_RECORDS = 64
"""Upper bound on committed records (at most 15) plus nodes of a request in `fast_tree_kernel`: it takes 49 nodes.
Larger trees run in FORM, 16 nodes at once, since the work per node of `fast_tree_kernel` grows with their number."""

NUMBERS_PER_WARP = 2048
"""Key numbers of records per warp of `fast_tree_kernel`. More of them and the state's tile do not fit the registers of
sm_90."""


def prefix_of(plan: KVPlan, group: GroupId) -> PageTable:
    """The table of the tokens before a forward in one group. For a pack its pages have one slot each."""
    if isinstance(plan.prefix, PackTables):
        lines = plan.prefix.lines[group]
        assert lines.begin is not None, "records are in a group with a window, whose lines are by run"
        return PageTable(lines.slots, lines.begin, plan.committed_len, 1)
    return plan.prefix.table(group)


def spans_of(pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """The X spans of the runs of a pack (see `span_kernels.py`): the run of each and the position of its first place,
    [X]. X is an upper bound; unused spans at the end have no token."""
    first = pack.start // FOLD * FOLD
    counts = ((pack.start + pack.length - first + SPAN - 1) // SPAN).masked_fill(pack.length == 0, 0)
    cu_spans = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    most = len(pack.rows) + len(pack.run_of) // (SPAN - FOLD + 1)  # a run's first span may have one token
    numbers = torch.arange(most, device=first.device)
    run_of = torch.searchsorted(cu_spans[1:], numbers, right=True).clamp(max=len(pack.rows) - 1)
    return run_of, first[run_of] + (numbers - cu_spans[run_of]) * SPAN


class RecurrentKernels:
    """The recurrent layers for the rows of a plan that writes: trees or runs.

    deterministic: a token has the same bits in a run as in a tree. Padding costs time but changes nothing: a tree of
    the padding row begins a text and has no slots; a run of it has no token.
    """

    def __init__(self, plan: KVPlan, view: KVView, *, deterministic: bool = False) -> None:
        self._plan = plan
        self._view = view
        self._deterministic = deterministic
        self._spans: tuple[torch.Tensor, torch.Tensor] | None = None
        self._prefix: PageTable | None = None

    def convolve(
        self, layer: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Convolve inputs [T, C] with weight [C, K] -> [T, C]."""
        plan, layer_kv = self._plan, self._view.writable_layer(layer)
        prefix, state = self._begun(layer_kv), layer_kv.recurrent_state
        inputs = _by_row(inputs)
        out = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
        taps, channels = weight.shape[1] - 1, inputs.shape[1]
        write = plan.write_slots(layer_kv.group)
        shape = {"TAPS": taps, "CHANNELS": channels, "FOLD": FOLD, "BLOCK": _block(channels, CHANNELS)}
        blocks = triton.cdiv(channels, shape["BLOCK"])
        bias_given = weight if bias is None else bias
        if plan.pack is None:
            tree, tree_strides, num_nodes = _tree_arguments(plan)
            tree_convolution_kernel[(len(inputs), blocks)](
                *(inputs, weight, bias_given, out, state.inputs, layer_kv.fields[0], plan.rows, plan.committed_len),
                *(prefix.pages, prefix.begin, write, *tree),
                *(inputs.stride(0), prefix.pages.stride(0), *tree_strides, *weight.stride(), num_nodes),
                **shape,
                BIAS=bias is not None,
                NODES=max(FOLD, triton.next_power_of_2(num_nodes)),
                PAGE=prefix.page_size,
                num_warps=4,
            )
            return out
        pack = plan.pack
        tile = {"ROWS": RUN_ROWS, "BLOCK": _block(channels, RUN_CHANNELS)}
        tiles = triton.cdiv(len(inputs), RUN_ROWS), triton.cdiv(channels, tile["BLOCK"])
        run_convolution_kernel[tiles](
            *(inputs, weight, bias_given, out, state.inputs, layer_kv.fields[0], pack.rows, pack.start, pack.length),
            *(pack.run_of, pack.cu_len, prefix.pages, prefix.begin, write, pack.positions),
            *(inputs.stride(0), prefix.pages.stride(0), *weight.stride(), len(inputs)),
            **{**shape, **tile},
            BIAS=bias is not None,
            num_warps=4,
        )
        run_inputs_kernel[(len(pack.rows), blocks)](
            *(inputs, state.inputs, layer_kv.fields[0], pack.rows, pack.start, pack.length, pack.cu_len),
            *(prefix.pages, prefix.begin, inputs.stride(0), prefix.pages.stride(0)),
            **shape,
            num_warps=4,
        )
        return out

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        """Run the recurrence -> [T, HV, DV] in float32."""
        plan, layer_kv = self._plan, self._view.writable_layer(layer)
        convolved = self._prefix is not None  # then the convolution's plain launch already waited for all folds
        prefix, state = self._begun(layer_kv), layer_kv.recurrent_state
        q, k, v, g = (_by_row(x) for x in rows[:4])
        beta = g if rows.beta is None else _by_row(rows.beta)
        _, pool_k, pool_u, pool_g = layer_kv.fields
        heads, v_dim = v.shape[1:]
        write = plan.write_slots(layer_kv.group)
        block = _block(v_dim, COLUMNS)
        tiles = triton.cdiv(v_dim, block)
        shape: dict[str, Any] = {
            "HEADS": heads,
            "KEY_HEADS": k.shape[1],
            "K_DIM": k.shape[2],
            "CORRECTED": rows.beta is not None,
            "FOLD": FOLD,
        }
        sizes = {"V_DIM": v_dim, "CHUNK": CHUNK, "BLOCK_V": block, **FORM}
        strides = [*(x.stride(0) for x in (q, k, v, g, beta)), prefix.pages.stride(0)]
        make = torch.zeros if plan.pack is not None and self._deterministic else torch.empty
        out = make(v.shape, dtype=torch.float32, device=v.device)
        given = q, k, v, g, beta, out, state.matrices, pool_k, pool_u, pool_g
        if plan.pack is None:
            tree, tree_strides, num_nodes = _tree_arguments(plan)
            requests = plan.rows, plan.committed_len, prefix.pages, prefix.begin, write
            grid = heads, tiles, len(plan.rows)
            records = triton.next_power_of_2(FOLD - 1 + num_nodes)
            if not self._deterministic and records <= MAX_RECORDS:
                block_k = _block(k.shape[2], 4096)
                fast_tree_kernel[grid](
                    *(*given, *requests, tree[1], *strides, *tree_strides[1:], num_nodes),
                    **shape,
                    V_DIM=v_dim,
                    PAGE=prefix.page_size,
                    RECORDS=records,
                    BLOCK_K=block_k,
                    BLOCK_V=block,
                    num_warps=max(2, block_k * max(records, 32) // NUMBERS_PER_WARP),
                    **pdl_options(v.device, after_library=not convolved),
                )
                return out
            many = num_nodes > FOLD
            totals = torch.empty((len(v) if many else 1, heads, tiles), dtype=torch.float32, device=v.device)
            tree_kernel[grid](
                *(*given, totals, *requests, *tree, *strides, *tree_strides, num_nodes),
                **shape,
                **sizes,
                NODES=max(FOLD, triton.next_power_of_2(num_nodes)),
                PAGE=prefix.page_size,
            )
            return out
        pack = plan.pack
        runs = pack.rows, pack.start, pack.length, pack.cu_len, prefix.pages, prefix.begin, write
        if self._deterministic:
            run_kernel[(heads, tiles, len(pack.rows))](*given, *runs, *strides, **shape, **sizes)
            return out
        self._launch_spans(pack, given, runs, strides, shape)
        return out

    def _launch_spans(
        self, pack: Pack, given: tuple[Any, ...], runs: tuple[Any, ...], strides: list[int], shape: dict[str, Any]
    ) -> None:
        """Compute the weights within all spans at once, then the states of each run span by span."""
        q, k, v, g, beta = given[:5]
        heads, v_dim = v.shape[1:]
        spans = self._spans = self._spans or spans_of(pack)
        parts, dtype = SPAN_PARTS
        keys = torch.empty((2, parts, *k.shape), dtype=dtype, device=v.device)
        weights = torch.empty((2, parts, len(v), heads, SPAN), dtype=dtype, device=v.device)
        total = torch.empty((len(v), heads), dtype=torch.float32, device=v.device)
        block = _block(v_dim, SPAN_COLUMNS)
        shape = shape | {"SPAN": SPAN, "PARTS": parts}
        made = keys, weights, total
        of_parts = keys.stride(1), weights.stride(1)
        weights_kernel[(heads, len(spans[0]))](
            *(q, k, g, beta, *made, *spans, pack.start, pack.length, pack.cu_len),
            *(x.stride(0) for x in (q, k, g, beta)),
            *of_parts,
            **shape,
            CHUNK=_block(k.shape[2], WEIGHT_CHUNK),
            num_warps=WEIGHT_WARPS,
        )
        spans_kernel[(heads, triton.cdiv(v_dim, block), len(pack.rows))](
            *(*given[1:], *made, *runs, *strides[1:], *of_parts, len(v)),
            **shape,
            V_DIM=v_dim,
            CHUNK=_block(k.shape[2], SPAN),
            BLOCK_K=_block(k.shape[2], 4096),
            BLOCK_V=block,
            num_warps=SPAN_WARPS,
            num_stages=SPAN_STAGES,
        )

    def _begun(self, layer_kv: LayerKV) -> PageTable:
        """The tokens before this forward. The first call also folds the states of all layers."""
        if self._prefix is None:
            plan = self._plan
            self._prefix = prefix_of(plan, layer_kv.group)
            length = None if plan.pack is None else plan.pack.length
            for layers in self._view.recurrent:
                fold_states(layers, plan.rows, self._prefix, length)
        return self._prefix


def fold_states(
    layers: RecurrentLayers, rows: torch.Tensor, prefix: PageTable, length: torch.Tensor | None = None
) -> None:
    """Fold the states of rows [B] to the last multiple of FOLD within their prefixes. length [B]: tokens of the runs
    after these, which this forward folds later. A run that begins a text resets its state."""
    start = prefix.committed_len
    since = torch.empty_like(start)
    begin_kernel[(len(rows),)](
        *(rows, start, start if length is None else length, layers.sample.folded_len, since),
        RUNS=length is not None,
        FOLD=FOLD,
        num_warps=1,
    )
    shape, sample = layers.shape, layers.sample
    block = _block(shape.channels, CHANNELS)
    fold_kernel[(len(layers.table), len(rows), shape.heads + triton.cdiv(shape.channels, block))](
        *(layers.table, rows, start, since, prefix.pages, prefix.begin, sample.matrices, sample.inputs),
        prefix.pages.stride(0),
        HEADS=shape.heads,
        KEY_HEADS=layers.key_heads,
        K_DIM=shape.k_dim,
        V_DIM=shape.v_dim,
        TAPS=shape.taps,
        CHANNELS=shape.channels,
        PAGE=prefix.page_size,
        FOLD=FOLD,
        BLOCK_V=_block(max(shape.v_dim, 1), COLUMNS),
        BLOCK_C=block,
        CHUNK=CHUNK,
        **FORM,
    )


def fold_row(table: RequestTable, store: KVStore, row: int, length: int) -> None:
    """See `KVOperations.fold`."""
    if not store.recurrent:
        return
    rows, start = upload(np.array([[row], [length]], dtype=np.int64), table.allocator.device)
    prefix = build_page_tables(table, Rows(rows, length), start, 0).table(store.recurrent[0].layers[0].group)
    store.ranks.begin()
    for rank, sent in enumerate(store.ranks.send((rows, prefix))):
        with store.ranks.on(rank):
            for layers in store.by_rank[rank].recurrent:
                fold_states(layers, *sent)
    store.ranks.join()


def _tree_arguments(plan: KVPlan) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int, int], int]:
    """Positions and ancestors of a plan's nodes as kernels read them, their strides, and the number of nodes."""
    assert plan.tree is not None, "recurrent layers run over trees or packed runs"
    positions, ancestors = plan.positions, plan.tree.ancestors
    positions = positions if positions.stride(1) == 1 else positions.contiguous()
    ancestors = ancestors if ancestors.stride(2) == 1 else ancestors.contiguous()
    strides = positions.stride(0), ancestors.stride(0), ancestors.stride(1)
    return (positions, ancestors), strides, positions.shape[1]


def _by_row(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, ...] with each row contiguous."""
    dense = x[0].is_contiguous() if len(x) else True
    return x if dense else x.contiguous()


def _block(count: int, most: int) -> int:
    whole: int = triton.next_power_of_2(count)
    return max(16, min(whole, most))
