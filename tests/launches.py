"""Every launcher of the project, called as engines call it: shapes of published models, each dtype, each kind of call.

tests/test_kernels_compile.py runs it for an absent GPU. Each group of launchers has a function, and `usual` lists the
arguments that make another program of a kernel: a dtype, a constant, a None, an integer that Triton specialises on.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from kv_rig import make_allocator

from specdec.attention.kernels.own_keys import own_keys
from specdec.attention.kernels.page_table import PageTables, build_page_tables
from specdec.attention.kernels.paged_attention import paged_attention
from specdec.attention.kernels.ragged_attention import RaggedTiles, ragged_attention
from specdec.attention.kernels.tree_attention import tree_attention
from specdec.attention.pack import Pack, PackTables, RunSlots
from specdec.attention.plan import KVPlan
from specdec.attention.recurrence.kernel_forward import RecurrentKernels
from specdec.attention.trees.beam import Candidates, expand
from specdec.attention.trees.tree import DraftTree
from specdec.attention.trees.tree_builder import select_tree
from specdec.attention.trees.walk import tree_fields
from specdec.draft_models.centroid_head import CentroidHead, centroid_best, centroid_sample
from specdec.gpu.dependent_launch import pdl_options
from specdec.gpu.exchange_kernels import (
    EMPTY,
    NUMBERS,
    PROGRAMS,
    STEPS,
    TAGGED_NUMBERS,
    exchange_kernel,
    exchange_tagged_kernel,
    next_round_kernel,
    pull_kernel,
)
from specdec.gpu.operations import KERNELS
from specdec.gpu.stage_clock import StageClock
from specdec.kvcache.fp8_pool import FieldPool, Fp8Pool, numbers_and_scales
from specdec.kvcache.index_spaces import ByGroup, GroupId, GroupLoc, PrimaryLoc
from specdec.kvcache.layer_context import Destination, Recurrence
from specdec.kvcache.recurrent_state import RecurrentState, StateShape
from specdec.kvcache.store import LayerKV, PoolAddresses, RecurrentLayers, move_kv, store_kv
from specdec.kvcache.table import RequestTable, Rows
from specdec.layers.accepted_path import keep_last, path_rows
from specdec.layers.embedding import embed, embed_and_norm
from specdec.layers.gated_delta import DeltaHeads, delta_heads, delta_inputs, gate_norm
from specdec.layers.head_gates import gate_channels, gate_heads
from specdec.layers.latent import LatentParts, expand_latent
from specdec.layers.linear import Mlp, gated_linear, linear, linear_parts, vendor_gated_linear, vendor_linear
from specdec.layers.moe.dense_and_moe import mlp_and_experts
from specdec.layers.moe.experts import Experts, apply_experts
from specdec.layers.moe.fork_join import Fork, fork_norm, join_norm
from specdec.layers.moe.routing import Router, Routing, route
from specdec.layers.norm import Norm, norm, qk_norm
from specdec.layers.packed.packed_weight import BITS, PackedWeight
from specdec.layers.per_layer_embedding import gated_projection, layer_inputs, vendor_gated_projection
from specdec.layers.product import Product, cut_of, finish
from specdec.layers.rope_store import Heads, Rotary, rope_store, rotary
from specdec.runtime.rounds.closing import closing
from specdec.runtime.rounds.opening import opening
from specdec.sampling.kernel_sampler import best_tokens, sample
from specdec.sampling.row_scores import SeenTokens
from specdec.sampling.sampling_table import REAL, WHOLE, ParamVectors
from specdec.sampling.softcap import softcap
from specdec.sampling.token_bitmaps import mark_seen

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def integers(*shape: int) -> torch.Tensor:
    return numbers(*shape, dtype=torch.int64)


def parts_of(num_parts: int, num_rows: int, width: int, dtype: torch.dtype, *, bias: bool = False) -> Product:
    """A product whose last sum is left to its reader."""
    added = numbers(width, dtype=dtype) if bias else None
    return Product(numbers(num_parts, num_rows, width, dtype=FP32), added, dtype)


def gain_of(width: int, dtype: torch.dtype, *, round_first: bool = False) -> Norm:
    return Norm(numbers(width, dtype=dtype), 1e-6, round_first)


# several devices


def exchange(dtype: torch.dtype, num_rows: int) -> None:
    ints: dict[str, Any] = {"device": "cuda", "dtype": torch.int32}
    word, addresses = torch.empty(1, **ints), integers(2)
    options: dict[str, Any] = {"STEPS": STEPS, "num_warps": 4, **pdl_options(word.device)}
    next_round_kernel[(1,)](word)
    parts, owners = numbers(8, num_rows, 2816, dtype=FP32), torch.empty(num_rows, 8, **ints)
    rest: tuple[int | bool, ...] = (3, 1, 1000, True, False)
    for x, own in ((parts, None), (parts, owners), (None, None)):
        for asm in (True, False):
            exchange_kernel[(PROGRAMS, 2)](
                *(x, own, addresses, addresses, word, word, word, 8, num_rows, 2816, 7, *rest),
                **{**options, "ASM": asm, "PROGRAMS": PROGRAMS, "BLOCK": NUMBERS},
            )
    exchange_tagged_kernel[(3, 2)](
        *(parts, parts, addresses, word, word, word, num_rows * 8192, 2**18, *rest),
        **{**options, "EMPTY": EMPTY, "BLOCK": TAGGED_NUMBERS, "num_warps": 1},
    )
    for kind in (torch.int32, torch.uint8):
        pull_kernel[(3,)](numbers(3000, dtype=kind), numbers(3000, dtype=kind), 3000, BLOCK=1024, num_warps=4)
    for height, width in ((4096, 2048), (512, 512), (512, 256)):  # of columns of a larger weight
        weight = numbers(height, 2 * width, dtype=dtype)
        cut = cut_of(weight).share(2)
        linear_parts(numbers(num_rows, width, dtype=dtype), weight[:, :width], cut)


# recurrent layers


def recurrent(
    dtype: torch.dtype,
    num_nodes: int,
    page_size: int,
    heads: tuple[int, int, int, int],
    channels: int,
    *,
    corrected: bool,
    bias: bool = False,
) -> None:
    """The convolution and the recurrence of one layer, of trees and of runs, after a fold. heads: of keys, of
    values, and their sizes; of values 0: a convolution alone."""
    key_heads, num_heads, k_dim, v_dim = heads
    state = RecurrentState.zeros(9, StateShape(num_heads, k_dim, v_dim, 3, channels), dtype, numbers(1).device)
    records = (
        numbers(9999, count, dim, dtype=FP32) for count, dim in ((key_heads, k_dim), (num_heads, v_dim), (num_heads, 1))
    )
    kept = LayerKV((numbers(9999, 1, channels, dtype=dtype), *records), GroupId(1), state)
    layers = RecurrentLayers(
        integers(3, 6), integers(9), StateShape(num_heads, k_dim, v_dim, 3, channels), key_heads, state, (kept,)
    )
    view: Any = SimpleNamespace(recurrent=(layers,), writable_layer=lambda layer: kept)
    batch, rows = 4, 4 * num_nodes
    write = ByGroup((PrimaryLoc(integers(rows)), GroupLoc(integers(rows))))
    tree = DraftTree(
        *(integers(batch, num_nodes) for _ in range(3)), numbers(batch, num_nodes, num_nodes, dtype=torch.bool)
    )
    tables = PageTables(
        ByGroup((integers(batch, 9), integers(batch, 9))), integers(2, batch), write.map(lambda x: x.view(batch, -1))
    )
    lines = RunSlots(integers(batch, 200), integers(batch), integers(batch))
    runs = Pack(
        *(integers(batch) for _ in range(3)),
        integers(batch + 1),
        integers(rows),
        integers(rows),
        numbers(rows, dtype=torch.bool),
    )
    shared: dict[str, Any] = {
        "backend": None,
        "rows": integers(batch),
        "committed_len": integers(batch),
        "write": write,
    }
    for plan in (
        KVPlan(**shared, positions=integers(batch, num_nodes), prefix=tables, page_size=page_size, tree=tree),
        KVPlan(
            **shared,
            positions=integers(1, rows),
            prefix=PackTables(ByGroup((lines, lines)), write),
            page_size=1,
            pack=runs,
        ),
    ):
        added = numbers(channels, dtype=dtype) if bias else None
        for deterministic in (True, False):
            forward = RecurrentKernels(plan, view, deterministic=deterministic)
            forward.convolve(0, numbers(rows, channels, dtype=dtype), numbers(channels, 4, dtype=dtype), added)
            if num_heads:
                q, k = (numbers(rows, key_heads, k_dim, dtype=FP32) for _ in range(2))
                beta = numbers(rows, num_heads, dtype=dtype) if corrected else None
                v = numbers(rows, num_heads, v_dim, dtype=dtype)
                forward.recur(0, Recurrence(q, k, v, numbers(rows, num_heads, dtype=FP32), beta))


# the cache


def pools_of(heads: int, dim: int, dtype: torch.dtype, slots: int = 9999, *, fp8: bool) -> tuple[FieldPool, FieldPool]:
    """Two pools: K and V."""
    if not fp8:
        return numbers(slots, heads, dim, dtype=dtype), numbers(slots, heads, dim, dtype=dtype)
    bits, scales = numbers(slots, heads, dim, dtype=torch.uint8), numbers(slots, heads, dtype=torch.float32)
    return Fp8Pool(bits, scales, dtype), Fp8Pool(bits, scales, dtype)


def cache(dtype: torch.dtype, page_size: int, *, swa: bool) -> None:
    groups = 2 if swa else 1
    arrays = integers(9, 4096), integers(groups, 9999), integers(groups), integers(3), integers(3)
    build_page_tables(*arrays, num_nodes=5, page_size=page_size, widths=[256, 40][:groups])
    pool = numbers(9999, 2, 256, dtype=dtype)
    merged = numbers(15, 6, 256, dtype=dtype)
    store_kv(merged[:, 2:4], merged[:, 4:], PrimaryLoc(integers(15)), pool, pool)
    store_kv(merged[:, 2:4], merged[:, 4:], PrimaryLoc(integers(15)), *pools_of(2, 256, dtype, fp8=True))


def moves(word: torch.dtype) -> None:
    move_kv(
        PoolAddresses((numbers(99, 2, 64),) * 2, integers(2, 3), word, 32, 64),
        PrimaryLoc(integers(6)),
        PrimaryLoc(integers(6)),
    )


# trees


def trees(num_nodes: int) -> None:
    tree_fields(integers(3, num_nodes), max_depth=4)
    candidates = 4 * num_nodes
    found = Candidates(integers(3, candidates), numbers(3, candidates, dtype=FP32), integers(3, candidates))
    select_tree(integers(3), found, num_nodes=num_nodes, num_levels=4)
    made = Candidates.empty(integers(3), 4 + 3 * 16)
    beam = expand(None, integers(3, 1, 1, 4), numbers(3, 1, 1, 4, dtype=FP32), made, 0)
    expand(beam, integers(3, 1, 4, 4), numbers(3, 1, 4, 4, dtype=FP32), made, 4)
    expand(None, integers(3, 4, 1, 4), numbers(3, 4, 1, 4, dtype=FP32), made, 0)
    x, path = numbers(3, num_nodes, 7680), integers(3, num_nodes)
    rows, _ = path_rows(x, integers(3, num_nodes), path[:, :4], integers(3), integers(3))
    keep_last(numbers(9, 7680), integers(3), rows, integers(3))
    keep_last(numbers(9, 7680), integers(3), x, integers(3), path)


# attention


def attention(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    num_rows: int,
    *,
    batch: int = 3,
    page_size: int = 1,
    window: int | None = None,
    cap: float | None = None,
    sinks: bool = False,
    tree: bool = False,
    block: bool = True,
    chunk: bool = False,
    begun: bool = False,
    first_key: int = 0,
    fp8: bool = False,
) -> None:
    """Chains, trees, runs and frozen queries. begun: the table begins after position 0, as windowed ones do."""
    kv_heads, pages = 2, integers(batch, 640)
    query = numbers(batch, num_rows, kv_heads * group, head_dim, dtype=dtype).transpose(1, 2)
    pool_k, pool_v = pools_of(kv_heads, head_dim, dtype, fp8=fp8)
    positions, length, start = integers(batch, num_rows), integers(batch), integers(batch)
    path_start = start if begun or window is not None else None
    sink = numbers(kv_heads * group, dtype=dtype) if sinks else None
    held = integers(batch) if chunk else None
    write = integers(batch, num_rows) if block else None
    own = own_keys(
        pages, path_start, length, write, integers(batch, num_rows) if tree else None,
        page_size=page_size, max_depth=4 if tree else None,
    )  # fmt: skip
    tree_attention(
        query, pool_k, pool_v, own, pages, path_start, length, positions,
        page_size=page_size, scaling=0.1, block_len=held, window=window, first_key=first_key, softcap=cap, sinks=sink,
    )  # fmt: skip


def draft_level(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    batch: int,
    num_nodes: int,
    level: int,
    *,
    page_size: int = 1,
    window: int | None = None,
    cap: float | None = None,
    sinks: bool = False,
    first_key: int = 0,
    fp8: bool = False,
) -> None:
    """The newest `level` nodes of a draft of `num_nodes`."""
    kv_heads = 2
    own = [numbers_and_scales(pool) for pool in pools_of(kv_heads, head_dim, dtype, batch * num_nodes, fp8=fp8)]
    block_k, block_v = (rows.unflatten(0, (batch, num_nodes)).transpose(1, 2) for rows, _ in own)
    paged_attention(
        numbers(batch, level, kv_heads * group, head_dim, dtype=dtype).transpose(1, 2), block_k, block_v,
        integers(batch, num_nodes), integers(batch, level, -(-num_nodes // 64)),
        *pools_of(kv_heads, head_dim, dtype, fp8=fp8),
        integers(batch, 640), integers(batch) if window else None, integers(batch), integers(batch, level),
        page_size=page_size, scaling=0.1, window=window, first_key=first_key, softcap=cap,
        sinks=numbers(kv_heads * group, dtype=dtype) if sinks else None, block_scales=(own[0][1], own[1][1]),
    )  # fmt: skip


def prompts(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    num_tokens: int,
    *,
    exact: bool,
    window: int | None,
    cap: float | None,
    first_key: int = 0,
    fp8: bool = False,
    tiles: RaggedTiles | None = None,
) -> None:
    """Runs of eight requests in one row. Of windowed layers the lines begin after position 0."""
    query = numbers(1, num_tokens, 2 * group, head_dim, dtype=dtype).transpose(1, 2)
    pools = pools_of(2, head_dim, dtype, fp8=fp8)
    places = (integers(num_tokens) for _ in range(3))
    pack = Pack(integers(8), integers(8), integers(8), integers(9), *places)
    lines = RunSlots(integers(8, 4096), integers(8), None if window is None else integers(8))
    sinks = None if cap is None else numbers(2 * group, dtype=dtype)
    options: dict[str, Any] = {"scaling": 0.1, "exact": exact, "window": window, "softcap": cap, "sinks": sinks}
    options["first_key"] = first_key
    ragged_attention(query, *pools, pack, lines, tiles=tiles, **options)


# layers


def products(dtype: torch.dtype, num_rows: int, activation: str, *, bias: bool = False) -> None:
    x = numbers(num_rows, 2560, dtype=dtype)
    for height in (512, 4096, 20480):
        finish(linear(x, numbers(height, 2560, dtype=dtype), numbers(height, dtype=dtype) if bias else None))
    gated_linear(x, numbers(20480, 2560, dtype=dtype), activation)
    linear(x[:, :1000], numbers(4096, 1000, dtype=dtype))  # a K that tiles do not divide
    vendor_gated_linear(numbers(257, 2560, dtype=dtype), numbers(20480, 2560, dtype=dtype), "silu")


def some_products(dtype: torch.dtype, num_rows: int, activation: str) -> None:
    """In any order: of E4B, and of weights that are cut otherwise, with a bias."""
    x = numbers(num_rows, 2560, dtype=dtype)
    for height in (256, 2560, 6144, 20480, 262144):
        finish(vendor_linear(x, numbers(height, 2560, dtype=dtype), numbers(height, dtype=dtype)))
    for height in (20480, 28672):
        vendor_gated_linear(x, numbers(height, 2560, dtype=dtype), activation)
    gate, inputs = parts_of(5, num_rows, 256, dtype), numbers(num_rows, 256, dtype=dtype)
    vendor_gated_projection(gate, inputs, numbers(2560, 256, dtype=dtype), activation)


def weight(form: str, *shape: int, dtype: torch.dtype) -> Any:
    """A weight [.., N, K]: "" is plain; "int4", "int4-zeros", "e2m1", "e4m3" with a scale a row, "e4m3-block"."""
    if not form:
        return numbers(*shape, dtype=dtype)
    *leading, n, k = shape
    code, _, kind = form.partition("-")
    group = 32 if BITS[code] == 4 else 128 if kind == "block" else k
    scales = numbers(*leading, k // group, n, dtype=FP32 if code == "e4m3" else dtype)
    words = numbers(*leading, n, k * BITS[code] // 32, dtype=torch.int32)
    return PackedWeight(code, words, scales, numbers(*scales.shape, dtype=dtype) if kind == "zeros" else None, group)


def packed_products(dtype: torch.dtype, num_rows: int, form: str) -> None:
    x = numbers(num_rows, 2560, dtype=dtype)
    for height in (2560, 20480):
        finish(linear(x, weight(form, height, 2560, dtype=dtype)))
    gated_linear(x, weight(form, 20480, 2560, dtype=dtype), "gelu_tanh")
    linear(numbers(num_rows, 2880, dtype=dtype), weight(form.removesuffix("-block"), 4096, 2880, dtype=dtype))
    for rows in (65, 1200):  # decoded once for all rows, and dequantised
        vendor_gated_linear(numbers(rows, 2560, dtype=dtype), weight(form, 20480, 2560, dtype=dtype), "silu")
    gate, inputs = parts_of(1, num_rows, 256, dtype), numbers(num_rows, 256, dtype=dtype)
    gated_projection(gate, inputs, weight(form, 2560, 256, dtype=dtype), "gelu_tanh")


def fp8_products() -> None:
    """Products of some rows: tiles of one height and of two, ranges that programs hold, per-layer embeddings."""
    for rows in (128, 256, 512):
        vendor_gated_linear(numbers(rows, 2560), weight("e4m3", 20480, 2560, dtype=BF16), "silu")
    finish(linear(numbers(64, 2560), weight("e4m3", 256, 2560, dtype=BF16)))
    for rows in (64, 256):
        gate, inputs = parts_of(5, rows, 256, BF16), numbers(rows, 256)
        gated_projection(gate, inputs, weight("e4m3", 2560, 256, dtype=BF16), "gelu_tanh")


def norms(dtype: torch.dtype, splits: int, *, rounds: bool) -> None:
    rows, width = 5, 2560
    gain, residual = gain_of(width, dtype, round_first=rounds), numbers(rows, width, dtype=dtype)
    part = parts_of(splits, rows, width, dtype, bias=rounds)
    norm(Product.from_value(residual), pre=gain)
    norm(part, residual=residual, pre=gain)
    norm(part, post=gain, residual=residual, scale=numbers(1, dtype=dtype), pre=gain)
    norm(part, post=gain, residual=residual)
    norm(part, residual=residual, factor=0.22, pre=gain)
    qk_norm(part, gain_of(1280, dtype, round_first=rounds), gain_of(640, dtype, round_first=rounds))
    embed_and_norm(integers(rows), numbers(99, width, dtype=dtype), part, gain, gain)
    embed_and_norm(integers(rows), numbers(99, width, dtype=dtype), Product.from_value(residual), gain, gain)
    for other in ({"plus_one": True}, {"centred": True}):
        shaped = gain_of(width, dtype)._replace(**other)
        norm(part, post=shaped, residual=residual, pre=shaped)


def forks(dtype: torch.dtype) -> None:
    rows, width = 5, 2816
    plain, rounded = gain_of(width, dtype), gain_of(width, dtype, round_first=True)
    part, residual = parts_of(4, rows, width, dtype), numbers(rows, width, dtype=dtype)
    fork_norm(part, post=plain, residual=residual, mlp=plain, experts=plain, router=rounded, factor=0.02)
    for scale, pre in ((None, None), (numbers(1, dtype=dtype), plain)):
        join_norm(
            part, parts_of(8, rows, width, dtype), dense_gain=plain, chosen_gain=plain, post=plain,
            residual=residual, scale=scale, pre=pre,
        )  # fmt: skip


def heads(
    dtype: torch.dtype, head_dim: int, *, rotated: int, normed: bool, rounds: bool, stored: bool, kv: int
) -> None:
    rows = 5
    cos, sin = rotary(integers(rows), numbers(rotated // 2, dtype=FP32), 1.0, dtype)
    gain = gain_of(head_dim, dtype, round_first=rounds) if normed else None
    layout = Heads(8, kv, head_dim, gain, gain, gain, values_are_keys=normed and head_dim == 512)
    pool = numbers(9999, kv, head_dim, dtype=dtype)
    destination = Destination(pool, pool, PrimaryLoc(integers(rows))) if stored else None
    rope_store(parts_of(3, rows, layout.width, dtype, bias=not normed), layout, Rotary(cos, sin), destination)
    if not normed:
        layout = layout._replace(interleaved=True)
        rope_store(parts_of(3, rows, layout.width, dtype), layout, Rotary(cos, sin), destination)
        rope_store(parts_of(3, rows, layout.width, dtype), layout, Rotary(cos[:, :0], sin[:, :0]), destination)
    elif not rounds:
        shaped = gain_of(head_dim, dtype)._replace(plus_one=True)
        layout = layout._replace(q_norm=shaped, k_norm=shaped, v_norm=None)
        rope_store(parts_of(3, rows, layout.width, dtype), layout, Rotary(cos, sin), destination)


def embeddings(dtype: torch.dtype, num_rows: int) -> None:
    tokens, table = integers(num_rows), numbers(99, 2560, dtype=dtype)
    embed(tokens, table)
    embed(tokens, table, numbers(1, dtype=FP32), numbers(num_rows, 256, dtype=dtype))
    context, inputs = parts_of(2, num_rows, 35 * 256, dtype), numbers(99, 35 * 256, dtype=dtype)
    for rounds in (False, True):
        gain = gain_of(256, dtype, round_first=rounds)
        e = layer_inputs(context, tokens, inputs, gain, context_scale=0.5, table_scale=16.0)
        gated_projection(parts_of(2, num_rows, 256, dtype), e[:, 3], numbers(2560, 256, dtype=dtype), "gelu_tanh")


# mixtures


def mixture(
    dtype: torch.dtype,
    num_rows: int,
    activation: str,
    sizes: tuple[int, int] = (2880, 2880),
    form: str = "",
    *,
    normalised: bool,
    bias: bool,
    interleaved: bool,
) -> None:
    (hidden, width), num_experts, top_k = sizes, 32, 4
    x = numbers(num_rows, hidden, dtype=dtype)
    scale = None if bias else numbers(num_experts, dtype=dtype)
    router = Router(
        numbers(num_experts, hidden, dtype=dtype), top_k, numbers(num_experts, dtype=dtype) if bias else None,
        expert_scale=scale, normalised=normalised,
    )  # fmt: skip
    routing: Routing = route(x, router)
    up, down = (weight(form, num_experts, *shape, dtype=dtype) for shape in ((2 * width, hidden), (hidden, width)))
    biases = (numbers(num_experts, 2 * width, dtype=dtype), numbers(num_experts, hidden, dtype=dtype))
    apply_experts(x, routing, Experts(up, down, activation, *(biases if bias else (None, None)), interleaved, 1.7, 7.0))
    if interleaved and not form:  # the checkpoint's own order of axes
        up, down = up.mT.contiguous().mT, down.mT.contiguous().mT
        apply_experts(x, routing, Experts(up, down, activation, *biases, interleaved, 1.7, 7.0))


def scored_mixture(dtype: torch.dtype, num_rows: int, num_experts: int, groups: int, kept: int, *, form: str) -> None:
    """GLM, DeepSeek, Step and the like: sigmoids with a correction, of some groups, next to a shared expert; and
    ERNIE's softmax with one. form: of weights, as `packed` names it, or ""."""
    hidden, width, top_k, weights = 4096, 1408, 8, partial(weight, form, dtype=dtype)
    x, correction = numbers(num_rows, hidden, dtype=dtype), numbers(num_experts, dtype=FP32)
    router = Router(
        numbers(num_experts, hidden, dtype=dtype), top_k, sigmoid=True, float_logits=True, correction=correction,
        groups=groups, kept_groups=kept, min_sum=1e-20, scaling=2.5,
    )  # fmt: skip
    softmax = router._replace(sigmoid=False, groups=1, kept_groups=1)
    for other in (router, softmax, router._replace(correction=None, normalised=False)):
        route(x, other)
    route(x, router._replace(owned=(num_experts // 2, num_experts // 2)))
    route(x, softmax._replace(weight=numbers(num_experts, hidden, dtype=FP32)))
    up, down = weights(num_experts, 2 * width, hidden), weights(num_experts, hidden, width)
    fork, mlp = Fork(x, x, x, x), Mlp(weights(2 * width, hidden), "silu", weights(hidden, width))
    dense, chosen = mlp_and_experts(fork, mlp, router, Experts(up, down, "silu"))
    gain = gain_of(hidden, dtype, round_first=True)
    norm(chosen, residual=x, pre=gain, beside=dense)
    apply_experts(x, route(x, router), Experts(up, down, "silu_clamped", limit=7.0))
    gated_linear(x, mlp.gate_up, "silu", 16.0)
    norm(
        chosen,
        residual=x,
        pre=gain,
        beside=Product.from_value(gate_heads(finish(dense)[:, None], gates(num_rows, 1, dtype))[:, 0]),
    )


def gates(num_rows: int, num_heads: int, dtype: torch.dtype) -> Product:
    return linear(numbers(num_rows, 4096, dtype=dtype), numbers(num_heads, 4096, dtype=dtype))


def gated_heads(dtype: torch.dtype, num_rows: int) -> None:
    """Step's attention, whose layers have 64 heads or 96."""
    for num_heads in (64, 96):
        gate_heads(numbers(num_rows, num_heads, 128, dtype=dtype), gates(num_rows, num_heads, dtype))


def gated_delta(dtype: torch.dtype, num_rows: int, num_v: int, *, splits: int, groups: int = 1) -> None:
    """Qwen3.5's layers, one of which attends, whose gates are its queries' neighbours, and Qwen3-Next's."""
    heads = DeltaHeads(16, num_v, 128, 128, groups)
    product = parts_of(splits, num_rows, heads.width + (2 * num_v if groups > 1 else 0), dtype)
    gates = product if groups > 1 else parts_of(4, num_rows, 2 * num_v, dtype)
    made = delta_inputs(product, gates, numbers(num_v, dtype=FP32), numbers(num_v, dtype=dtype), heads)
    delta_heads(made.inputs, heads, "silu")
    gate_norm(numbers(num_rows, num_v, 128, dtype=FP32), made.z, gain_of(128, dtype, round_first=True), "silu")
    shaped = gain_of(256, dtype)._replace(plus_one=True)
    attention = Heads(num_v // 2, 4, 256, shaped, shaped, gated=True)
    product, pool = parts_of(splits, num_rows, attention.width, dtype), numbers(9999, 4, 256, dtype=dtype)
    cos, sin = rotary(integers(num_rows), numbers(32, dtype=FP32), 1.0, dtype)
    destination = Destination(pool, pool, PrimaryLoc(integers(num_rows)))
    rope_store(product, attention, Rotary(cos, sin), destination)
    gate_channels(numbers(num_rows, num_v // 2, 256, dtype=dtype), product)


def latents(dtype: torch.dtype, num_rows: int, *, low_rank: bool) -> None:
    """GLM-4.7-Flash, and DeepSeek's without a latent of queries; then K and V of unequal sizes, as MiMo-V2 has them."""
    heads = Heads(20, 20, 256, last=True, narrow_v_dim=256 if low_rank else 128)
    ranks = (768 if low_rank else heads.num_q * heads.head_dim), 512
    parts = LatentParts(
        q=numbers(heads.num_q * heads.head_dim, ranks[0], dtype=dtype) if low_rank else None,
        q_norm=gain_of(ranks[0], dtype, round_first=True) if low_rank else None,
        kv=numbers(heads.num_kv * (192 + heads.v_dim), 512, dtype=dtype),
        kv_norm=gain_of(512, dtype, round_first=True), rotated=64, interleaved=low_rank,
    )  # fmt: skip
    cos, sin = rotary(integers(num_rows), numbers(32, dtype=FP32), 1.0, dtype)
    pools = (numbers(9999, heads.num_kv, dim, dtype=dtype) for dim in (heads.head_dim, heads.v_dim))
    product = expand_latent(parts_of(3, num_rows, sum(ranks) + 64, dtype), parts, heads, KERNELS)
    rope_store(product, heads, Rotary(cos, sin), Destination(*pools, PrimaryLoc(integers(num_rows))))
    narrow = Heads(16, 8, 192, narrow_v_dim=128, v_scale=0.707)
    pools = (numbers(9999, 8, dim, dtype=dtype) for dim in (192, 128))
    product = parts_of(3, num_rows, narrow.width, dtype)
    rope_store(product, narrow, Rotary(cos, sin), Destination(*pools, PrimaryLoc(integers(num_rows))))


def beside(dtype: torch.dtype, num_rows: int, form: str = "") -> None:
    """Gemma 4 26B-A4B, in few experts."""
    hidden, num_experts, top_k, weights = 2816, 16, 8, partial(weight, form, dtype=dtype)
    x = Fork(*(numbers(num_rows, hidden, dtype=dtype) for _ in Fork._fields))
    mlp = Mlp(weights(4224, hidden), "gelu_tanh", weights(hidden, 2112))
    router = Router(numbers(num_experts, hidden, dtype=dtype), top_k, expert_scale=numbers(num_experts, dtype=dtype))
    up, down = weights(num_experts, 1408, hidden), weights(num_experts, hidden, 704)
    mlp_and_experts(x, mlp, router, Experts(up, down, "gelu_tanh"))
    if not form:
        routing = route(x.router, router._replace(owned=(8, 8)))  # of one rank of two
        apply_experts(x.experts, routing, Experts(up[8:], down[8:], "gelu_tanh", shared=True))


# sampling


def params_of(batch: int) -> ParamVectors:
    return ParamVectors(integers(len(WHOLE), batch), numbers(len(REAL), batch, dtype=FP32))


def sampling(dtype: torch.dtype, cap: float | None, *, penalised: bool = False, best: bool = False) -> None:
    """One draw; best: the children of a node."""
    batch, nodes, vocab = 3, 5, 262144
    logits, positions, params = numbers(batch, nodes, vocab, dtype=dtype), integers(batch, nodes), params_of(batch)
    seen = None
    if penalised:
        seen = SeenTokens(numbers(batch, vocab // 32, dtype=torch.int32), integers(batch, nodes, nodes))
        mark_seen(seen.bits, integers(batch), integers(batch, 40), integers(batch))
    if best:
        best_tokens(logits[:, :1], positions[:, :1], params, 8)
        sample(logits, positions, params, cap)
    else:
        sample(logits, positions, params, cap, seen)
    if cap is not None:
        softcap(logits, cap)


def centroids(dtype: torch.dtype, *, best: bool = False) -> None:
    head = CentroidHead(
        numbers(2048, 256, dtype=dtype), numbers(2048, 128, dtype=torch.int32), numbers(262144, 256, dtype=dtype), 32
    )
    hidden = numbers(3, 1, 256, dtype=dtype)
    if best:
        centroid_best(hidden, integers(3, 1), params_of(3), head, 8)
    else:
        centroid_sample(hidden, integers(3, 1), params_of(3), head)


# rounds


def open_and_close(batch: int, num_nodes: int, page_size: int, *, chain: bool) -> None:
    allocator = make_allocator(99, page_size=page_size, device=numbers(1).device)
    table = RequestTable(allocator, max_requests=batch, max_len=256, lookahead=num_nodes)
    seats, tokens = integers(batch), integers(*table.slots.host.shape)
    cells = integers(batch + 1, len(WHOLE) + len(REAL))
    opened = opening(seats, table.committed_len.tensor, tokens, integers(batch + 1), cells, depth=num_nodes)
    parents = integers(batch, num_nodes)
    tree = DraftTree(integers(batch, num_nodes), parents, parents, parents, is_chain=chain)
    closing(
        tree, integers(batch, num_nodes), opened.max_path, Rows(seats, 99), opened.committed_len, table, tokens,
        integers(batch, 1 + 2 * num_nodes), width=num_nodes, depth=num_nodes,
    )  # fmt: skip


def stamps() -> None:
    clock = StageClock(numbers(1).device)
    for out in (None, integers(2)):
        clock.start("draft")
        clock.stop(out)


Launch = tuple[str, Callable[[], None]]


def launch(function: Callable[..., None], *args: object, **kwargs: object) -> Launch:
    shown = [str(a).removeprefix("torch.") for a in (*args, *(f"{k}={v}" for k, v in kwargs.items()))]
    return f"{function.__name__}({', '.join(shown)})", lambda: function(*args, **kwargs)


def usual() -> Iterator[Launch]:
    """A variant of each kind: every statement of every kernel becomes code in one of them."""
    yield launch(exchange, BF16, 5)
    yield launch(cache, BF16, 1, swa=True)
    yield launch(cache, FP32, 16, swa=False)
    yield launch(moves, torch.int64)
    yield launch(trees, 5)
    yield launch(trees, 64)
    yield launch(recurrent, BF16, 1, 16, (16, 32, 128, 128), 8192, corrected=True)  # Qwen3.5-4B and 9B
    yield launch(recurrent, BF16, 24, 1, (16, 32, 128, 128), 8192, corrected=True)
    yield launch(recurrent, BF16, 4, 1, (8, 128, 128, 64), 10240, corrected=False, bias=True)  # Nemotron-H 8B
    yield launch(recurrent, FP32, 5, 1, (1, 48, 128, 64), 3328, corrected=False, bias=True)  # Granite 4
    yield launch(recurrent, FP16, 5, 1, (1, 0, 0, 0), 2048, corrected=False)  # LFM2
    yield launch(attention, BF16, 256, 4, 5, window=512)  # Gemma 4's layers with a window, and its frozen drafter
    yield launch(attention, BF16, 512, 8, 1, begun=True, block=False)
    yield launch(attention, FP16, 64, 8, 512, sinks=True, chunk=True, window=128, page_size=16)  # gpt-oss
    yield launch(attention, BF16, 128, 4, 130, tree=True, cap=50.0)
    yield launch(attention, FP32, 80, 1, 5, page_size=16, tree=True, window=64)
    yield launch(attention, BF16, 128, 8, 4, first_key=2)  # later MTP modules
    yield launch(draft_level, BF16, 128, 8, 3, 4, 2, first_key=2)
    yield launch(attention, BF16, 128, 4, 5, tree=True, fp8=True)  # K/V of 8 bits
    yield launch(attention, FP16, 256, 4, 1, window=512, fp8=True)
    yield launch(draft_level, BF16, 128, 4, 3, 16, 4, fp8=True)
    yield launch(draft_level, BF16, 128, 4, 3, 80, 8, cap=50.0, sinks=True)  # two words of bits
    yield launch(draft_level, FP32, 80, 1, 3, 5, 1, window=64)
    yield launch(draft_level, BF16, 256, 4, 1, 16, 16, page_size=16)
    for exact in (False, True):
        yield launch(prompts, BF16, 512, 4, 16, exact=exact, window=None, cap=None)
        yield launch(prompts, BF16, 256, 4, 2048, exact=exact, window=512, cap=50.0)
        yield launch(prompts, BF16, 128, 8, 512, exact=exact, window=None, cap=None, first_key=2)
        yield launch(prompts, BF16, 128, 4, 512, exact=exact, window=None, cap=None, fp8=True)
    in_memory = RaggedTiles(64, 32, 8, 2, 256, total_in_memory=True)
    yield launch(prompts, BF16, 512, 4, 2048, exact=True, window=None, cap=None, tiles=in_memory)
    yield launch(products, BF16, 5, "gelu_tanh")
    yield launch(products, FP32, 5, "silu", bias=True)
    yield launch(products, BF16, 160, "silu")
    yield launch(products, FP16, 600, "silu")
    yield launch(products, BF16, 600, "gelu_tanh", bias=True)
    yield launch(some_products, BF16, 100, "gelu_tanh")
    yield launch(some_products, FP16, 40, "silu")
    yield launch(some_products, BF16, 200, "silu")
    yield launch(packed_products, BF16, 5, "int4")
    yield launch(packed_products, BF16, 160, "int4-zeros")
    yield launch(packed_products, FP16, 5, "int4-zeros")
    yield launch(packed_products, BF16, 5, "e2m1")
    yield launch(packed_products, BF16, 5, "e4m3-block")
    yield launch(packed_products, FP16, 5, "e4m3")
    yield launch(fp8_products)
    yield launch(packed_products, FP32, 5, "e2m1")
    yield launch(packed_products, FP32, 5, "int4")
    yield launch(packed_products, FP32, 5, "int4-zeros")
    for dtype, num_rows, form in ((BF16, 8, "e2m1"), (BF16, 300, "int4"), (FP16, 1, "int4")):
        clamped = {"normalised": True, "bias": True, "interleaved": True}
        yield launch(mixture, dtype, num_rows, "swiglu_clamped", (2880, 2880), form, **clamped)
        yield launch(beside, dtype, num_rows, form)
    yield launch(norms, BF16, 4, rounds=False)
    yield launch(norms, FP16, 1, rounds=True)
    yield launch(forks, BF16)
    yield launch(heads, BF16, 512, rotated=128, normed=True, rounds=False, stored=True, kv=2)
    yield launch(heads, FP16, 128, rotated=128, normed=True, rounds=True, stored=False, kv=8)
    yield launch(heads, FP32, 64, rotated=64, normed=False, rounds=False, stored=True, kv=0)
    yield launch(embeddings, BF16, 5)
    yield launch(embeddings, FP16, 600)
    yield launch(mixture, BF16, 1, "swiglu_clamped", normalised=True, bias=True, interleaved=True)
    yield launch(mixture, BF16, 20, "gelu_tanh", (1000, 1000), normalised=False, bias=False, interleaved=False)
    yield launch(mixture, FP32, 300, "silu", normalised=True, bias=False, interleaved=False)
    yield launch(beside, BF16, 8)
    yield launch(scored_mixture, BF16, 1, 128, 1, 1, form="int4")
    yield launch(scored_mixture, BF16, 16, 24, 3, 2, form="")  # groups of 8, padded to 4 groups
    yield launch(scored_mixture, FP32, 300, 32, 8, 4, form="")
    yield launch(gated_heads, BF16, 8)
    yield launch(gated_heads, FP32, 1)
    yield launch(gated_delta, BF16, 8, 32, splits=1)
    yield launch(gated_delta, FP16, 1, 48, splits=3)  # of a packed weight
    yield launch(gated_delta, FP32, 1, 32, splits=1, groups=16)
    yield launch(latents, BF16, 8, low_rank=True)
    yield launch(latents, FP32, 1, low_rank=False)
    yield launch(sampling, BF16, 30.0, penalised=True)
    yield launch(sampling, FP16, 30.0, best=True)
    yield launch(sampling, FP32, None)
    yield launch(centroids, BF16, best=True)
    yield launch(open_and_close, 3, 5, 1, chain=True)
    yield launch(open_and_close, 32, 8, 1, chain=False)
    yield launch(open_and_close, 3, 5, 16, chain=False)
    yield launch(stamps)
