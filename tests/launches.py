"""Calls every launcher of the project as engines do: shapes of published models, each dtype, each kind of call.

tests/test_kernels_compile.py runs it for an absent GPU. Fused layers have published shapes; each other group of
launchers has a function. `usual` lists the arguments that change a kernel's program: a dtype, a constant, a None, an
integer that Triton specialises on.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from kv_rig import make_allocator

from specdec.attention.kernels.own_keys import PathKeys, own_keys
from specdec.attention.kernels.page_table import PageTable, PageTables, build_page_tables
from specdec.attention.kernels.paged_attention import BlockKeys, paged_attention
from specdec.attention.kernels.ragged_attention import ragged_attention
from specdec.attention.kernels.tree_attention import tree_attention
from specdec.attention.plan import KVPlan, Pack, PackTables, RunSlots
from specdec.attention.recurrence.gpu_recurrence import RecurrentKernels
from specdec.attention.trees.tree import DraftTree, tree_fields
from specdec.attention.trees.tree_builder import Candidates, expand, select_tree
from specdec.draft_models.centroid_head import CentroidHead, centroid_best, centroid_sample
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
from specdec.gpu.operations import FAST, KERNELS, Operations
from specdec.gpu.ranks import map_tensors
from specdec.gpu.stage_clock import StageClock
from specdec.gpu.triton_shim import pdl_options
from specdec.kvcache.fp8_pool import FieldPool, Fp8Pool, numbers_and_scales
from specdec.kvcache.layer_context import Destination, Recurrence
from specdec.kvcache.layout import ByGroup, GroupId, GroupLoc, PrimaryLoc
from specdec.kvcache.recurrent_state import RecurrentState, StateShape
from specdec.kvcache.store import LayerKV, PoolAddresses, RecurrentLayers, move_kv, store_kv
from specdec.kvcache.table import RequestTable, Rows
from specdec.layers.accepted_path import keep_last, path_rows
from specdec.layers.decoder import FusedLayer, embed_inputs
from specdec.layers.description.decoder_parts import DecoderParts, LayerParts
from specdec.layers.embedding import embed, embed_and_norm
from specdec.layers.fuse import fuse
from specdec.layers.gemm.linear import gated_linear, linear, linear_parts
from specdec.layers.gemm.product import Product, finish, split_k_of
from specdec.layers.moe.experts import Experts, apply_experts
from specdec.layers.moe.routing import Router, route
from specdec.layers.norm import Norm, norm, qk_norm
from specdec.layers.packed.packed_weight import BITS, PackedWeight
from specdec.layers.per_layer_embedding import per_layer_inputs
from specdec.layers.rope_store import Heads, Rotary, rope_store, rotary
from specdec.measurement.model_shapes import SHAPES, Shrink
from specdec.measurement.random_weights import FORMS, build_model, pack_layers
from specdec.modules.private_copy import private_copy
from specdec.runtime.rounds.closing import VerifiedRound, closing
from specdec.runtime.rounds.opening import opening
from specdec.sampling.kernel_sampler import best_tokens, sample
from specdec.sampling.row_scores import LogitRows, SeenTokens
from specdec.sampling.sampling_table import FLOAT_COLUMNS, INT_COLUMNS, ParamVectors
from specdec.sampling.softcap import softcap
from specdec.sampling.token_bitmaps import mark_seen

from no_gpu import PretendedTensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def integers(*shape: int) -> torch.Tensor:
    return numbers(*shape, dtype=torch.int64)


def parts_of(num_parts: int, num_rows: int, width: int, dtype: torch.dtype, *, bias: bool = False) -> Product:
    """A product whose parts are not summed yet."""
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
        split_k = split_k_of(weight).share(2)
        linear_parts(numbers(num_rows, width, dtype=dtype), weight[:, :width], split_k)


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
    """Run the convolution and the recurrence of one layer over trees and runs, after a fold. heads: numbers of key and
    value heads, and their sizes; without value heads a convolution alone."""
    key_heads, num_heads, k_dim, v_dim = heads
    state = RecurrentState.zeros(9, StateShape(num_heads, k_dim, v_dim, 3, channels), dtype, numbers(1).device)
    records = (
        numbers(9999, count, dim, dtype=FP32) for count, dim in ((key_heads, k_dim), (num_heads, v_dim), (num_heads, 1))
    )
    kept = LayerKV((numbers(9999, 1, channels, dtype=dtype), *records), GroupId(1), state)
    layers = RecurrentLayers(
        integers(3, 6), StateShape(num_heads, k_dim, v_dim, 3, channels), key_heads, state, (kept,)
    )
    view: Any = SimpleNamespace(recurrent=(layers,), writable_layer=lambda layer: kept)
    batch, rows = 4, 4 * num_nodes
    write = ByGroup((PrimaryLoc(integers(rows)), GroupLoc(integers(rows))))
    tree = DraftTree(
        *(integers(batch, num_nodes) for _ in range(3)), numbers(batch, num_nodes, num_nodes, dtype=torch.bool)
    )
    pages, slots = ByGroup((integers(batch, 9), integers(batch, 9))), write.map(lambda x: x.view(batch, -1))
    tables = PageTables(pages, integers(2, batch), slots, integers(batch), page_size)
    lines = RunSlots(integers(batch, 200), integers(batch), integers(batch))
    runs = Pack(
        *(integers(batch) for _ in range(3)),
        integers(batch + 1),
        integers(rows),
        integers(rows),
        numbers(rows, dtype=torch.bool),
    )
    shared: dict[str, Any] = {"backend": None, "rows": integers(batch), "write": write}
    for plan in (
        KVPlan(**shared, positions=integers(batch, num_nodes), prefix=tables, tree=tree),
        KVPlan(**shared, positions=integers(1, rows), prefix=PackTables(runs, ByGroup((lines, lines)), write)),
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
    windows = (39 * page_size,) if swa else ()
    allocator = make_allocator(640, windows, page_size=page_size, device=numbers(1).device)
    table = RequestTable(allocator, max_requests=8, max_len=4091, lookahead=5)
    build_page_tables(table, Rows(integers(3), 256 * page_size), integers(3), 5)
    pool = numbers(9999, 2, 256, dtype=dtype)
    merged = numbers(15, 6, 256, dtype=dtype)
    for pools in ((pool, pool), pools_of(2, 256, dtype, fp8=True)):
        store_kv(Destination(*pools, PrimaryLoc(integers(15))), merged[:, 2:4], merged[:, 4:])


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
    """Attend with chains, trees, runs or frozen queries. begun: the table begins after position 0, as with a window."""
    kv_heads, pages = 2, integers(batch, 640)
    query = numbers(batch, num_rows, kv_heads * group, head_dim, dtype=dtype).transpose(1, 2)
    pool_k, pool_v = pools_of(kv_heads, head_dim, dtype, fp8=fp8)
    positions, length, start = integers(batch, num_rows), integers(batch), integers(batch)
    path_start = start if begun or window is not None else None
    sink = numbers(kv_heads * group, dtype=dtype) if sinks else None
    held = integers(batch) if chunk else None
    write = integers(batch, num_rows) if block else None
    table = PageTable(pages, path_start, length, page_size)
    own = own_keys(table, write, integers(batch, num_rows) if tree else None, 4 if tree else None)
    path = PathKeys(table, own, positions, held, window, first_key)
    tree_attention(query, pool_k, pool_v, path, scaling=0.1, softcap=cap, sinks=sink)


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
    """Attend with the newest `level` nodes of a draft of `num_nodes`."""
    kv_heads = 2
    own = [numbers_and_scales(pool) for pool in pools_of(kv_heads, head_dim, dtype, batch * num_nodes, fp8=fp8)]
    block_k, block_v = (rows.unflatten(0, (batch, num_nodes)).transpose(1, 2) for rows, _ in own)
    ancestors = integers(batch, level, -(-num_nodes // 64))
    paged_attention(
        numbers(batch, level, kv_heads * group, head_dim, dtype=dtype).transpose(1, 2),
        *pools_of(kv_heads, head_dim, dtype, fp8=fp8),
        PageTable(integers(batch, 640), integers(batch) if window else None, integers(batch), page_size),
        BlockKeys(block_k, block_v, integers(batch, num_nodes), ancestors, (own[0][1], own[1][1])),
        integers(batch, level),
        scaling=0.1, window=window, first_key=first_key, softcap=cap,
        sinks=numbers(kv_heads * group, dtype=dtype) if sinks else None,
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
) -> None:
    """Attend with the runs of eight requests in one row. With a window the lines begin after position 0."""
    query = numbers(1, num_tokens, 2 * group, head_dim, dtype=dtype).transpose(1, 2)
    pools = pools_of(2, head_dim, dtype, fp8=fp8)
    places = (integers(num_tokens) for _ in range(3))
    pack = Pack(integers(8), integers(8), integers(8), integers(9), *places)
    lines = RunSlots(integers(8, 4096), integers(8), None if window is None else integers(8))
    sinks = None if cap is None else numbers(2 * group, dtype=dtype)
    options: dict[str, Any] = {"scaling": 0.1, "exact": exact, "window": window, "softcap": cap, "sinks": sinks}
    options["first_key"] = first_key
    ragged_attention(query, *pools, pack, lines, **options)


# layers


class LayerRows:
    """A context of layers that stores K/V. Attention and recurrence return arbitrary numbers."""

    def __init__(self, layers: Sequence[LayerParts], num_rows: int, dtype: torch.dtype) -> None:
        self.layers, self.num_rows, self.dtype = layers, num_rows, dtype

    def destination(self, layer: int) -> Destination | None:
        heads = self.layers[layer].heads
        pools = (numbers(9999, heads.num_kv, dim, dtype=self.dtype) for dim in (heads.head_dim, heads.v_dim))
        return Destination(*pools, PrimaryLoc(integers(self.num_rows))) if heads.num_kv else None

    def attend_tokens(self, layer: int, q: torch.Tensor, *own: object, **options: object) -> torch.Tensor:
        return numbers(self.num_rows, q.shape[1], self.layers[layer].heads.v_dim, dtype=self.dtype)

    def convolve(self, layer: int, inputs: torch.Tensor, *weights: object) -> torch.Tensor:
        return inputs

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        return rows.v.float()


def weight(form: str, *shape: int, dtype: torch.dtype) -> PackedWeight:
    """A weight [.., N, K] on `meta`: "int4", "int4-zeros", "e2m1", "e4m3" with a scale a row, "e4m3-block"."""
    *leading, n, k = shape
    code, _, kind = form.partition("-")
    group = 32 if BITS[code] == 4 else 128 if kind == "block" and k % 128 == 0 else k
    sizes = {"scales": (*leading, k // group, n), "words": (*leading, n, k * BITS[code] // 32)}
    scales = torch.empty(sizes["scales"], dtype=FP32 if code == "e4m3" else dtype, device="meta")
    words = torch.empty(sizes["words"], dtype=torch.int32, device="meta")
    return PackedWeight(code, words, scales, scales if kind == "zeros" else None, group)


@functools.cache
def decoder_of(shape: str, dtype: torch.dtype, form: str) -> tuple[DecoderParts, torch.Tensor]:
    """Return the fused parts of the first layers of a published shape, and the weight of its head."""
    model: Any = build_model(SHAPES[shape].target(Shrink(layers=4)), torch.device("meta"), dtype)
    for module in model.modules():
        if hasattr(module, "embed_scale"):  # a number that is read
            module.embed_scale = torch.ones(())
    if form:
        pack_layers(model, FORMS["int4-g32"], lambda size: weight(form, *size, dtype=dtype))
    decoder = model.get_decoder()
    parts = fuse(private_copy(getattr(decoder, "language_model", decoder)), KERNELS).parts
    on_gpu = partial(torch.Tensor.as_subclass, cls=PretendedTensor)
    return map_tensors(parts, on_gpu), on_gpu(model.get_output_embeddings().weight.detach())


def layers(shape: str, dtype: torch.dtype, num_rows: int, form: str = "", ops: Operations = KERNELS) -> None:
    """Run a forward of fused layers. form: of packed weights, as `weight` names it."""
    parts, head = decoder_of(shape, dtype, form)
    tokens, positions, factor = integers(num_rows), integers(num_rows), numbers(1, dtype=FP32)
    embedded = embed(tokens, head, factor if parts.embeddings else None)
    inputs = per_layer_inputs(parts.embeddings, embedded, tokens, ops) if parts.embeddings else None
    hidden, normed, shared = embed_inputs(parts, embedded, positions, inputs, ops)
    context = LayerRows(parts.layers, num_rows, dtype)
    for index, (layer, next_norm) in enumerate(zip(parts.layers, parts.next_norms, strict=True)):
        fused = FusedLayer(index, layer, next_norm, ops)
        hidden, normed = fused(hidden, normed, shared, specdec_ctx=context)  # type: ignore[arg-type]
    norm(Product.from_value(hidden), pre=parts.final_norm)
    finish(ops(linear)(hidden, head))


def other_families(dtype: torch.dtype) -> None:
    """Run features of other families than those of the shapes below: a K that tiles do not divide, biases, limits,
    norms over all heads or of values, factors, and groups of experts divided over ranks."""
    width, num_experts = 1000, 24
    many, part, tokens = numbers(600, width, dtype=dtype), parts_of(3, 5, 1280, dtype, bias=True), integers(5)
    x, gain, half = many[:5], gain_of(1280, dtype, round_first=True), gain_of(320, dtype)
    weights, correction = numbers(num_experts, width, dtype=dtype), numbers(num_experts, dtype=FP32)
    for rows in (x, many):
        finish(linear(rows, numbers(4096, width, dtype=dtype), numbers(4096, dtype=dtype)))
    gated_linear(numbers(5, 4096, dtype=dtype), numbers(1408, 4096, dtype=dtype), "silu", 7.0)
    embed(tokens, weights, right=x)
    embed_and_norm(tokens, numbers(99, 1280, dtype=dtype), part, gain, gain)
    norm(part, residual=numbers(5, 1280, dtype=dtype), factor=0.22, pre=gain._replace(round_first=False, centred=True))
    qk_norm(part, gain_of(640, dtype), half)
    frequencies = rotary(tokens, numbers(32, dtype=FP32), 1.0, dtype)
    rope_store(part, Heads(16, 2, 64, *(gain_of(64, dtype) for _ in "qkv")), Rotary(*frequencies))
    router = Router(weights, 8, sigmoid=True, correction=correction, groups=3, kept_groups=2, owned=(12, 12))
    up, down = numbers(12, 2 * width, width, dtype=dtype), numbers(12, width, width, dtype=dtype)
    for rows in (x, many):
        apply_experts(rows, route(rows, router), Experts(up, down, "silu_clamped", limit=7.0, shared=True))


# sampling


def params_of(batch: int) -> ParamVectors:
    return ParamVectors(integers(len(INT_COLUMNS), batch), numbers(len(FLOAT_COLUMNS), batch, dtype=FP32))


def sampling(dtype: torch.dtype, cap: float | None, *, penalised: bool = False, best: bool = False) -> None:
    """Draw a token for each node. best: also the best tokens, for the children of a node."""
    batch, nodes, vocab = 3, 5, 262144
    logits, positions, params = numbers(batch, nodes, vocab, dtype=dtype), integers(batch, nodes), params_of(batch)
    seen = None
    if penalised:
        seen = SeenTokens(numbers(batch, vocab // 32, dtype=torch.int32), integers(batch, nodes, nodes))
        mark_seen(seen.bits, integers(batch), integers(batch, 40), integers(batch))
    if best:
        best_tokens(LogitRows(logits[:, :1], positions[:, :1], params), 8)
        sample(LogitRows(logits, positions, params, cap))
    else:
        sample(LogitRows(logits, positions, params, cap, seen))
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
    cells = integers(batch + 1, len(INT_COLUMNS) + len(FLOAT_COLUMNS))
    opened = opening(seats, table.committed_len.tensor, tokens, integers(batch + 1), cells, depth=num_nodes)
    parents = integers(batch, num_nodes)
    tree = DraftTree(integers(batch, num_nodes), parents, parents, parents, is_chain=chain)
    rows, sizes = Rows(seats, 99), (num_nodes, num_nodes)
    verified = VerifiedRound(tree, integers(batch, num_nodes), opened.max_path, rows, opened.committed_len, *sizes)
    closing(verified, table, tokens, integers(batch, 1 + 2 * num_nodes))


def stamps() -> None:
    clock = StageClock(numbers(1).device)
    for out in (None, integers(2)):
        clock.start("draft")
        clock.stop(out)


Launch = tuple[str, Callable[[], None]]


def launch(function: Callable[..., None], *args: object, **kwargs: object) -> Launch:
    shown = [str(a).removeprefix("torch.") for a in (*args, *(f"{k}={v}" for k, v in kwargs.items()))]
    return f"{function.__name__}({', '.join(shown)})", lambda: function(*args, **kwargs)


LAYERS: list[tuple[Any, ...]] = [  # shape, dtype, rows; form of packed weights
    ("gemma4-e4b", BF16, 5),
    ("gemma4-e4b", FP16, 600),
    ("gemma4-e4b", BF16, 5, "e4m3-block"),
    ("gemma4-e4b", FP16, 5, "e4m3"),
    ("llama-8b", FP32, 5),
    ("llama-8b", FP32, 5, "e2m1"),
    ("llama-8b", FP32, 5, "int4-zeros"),
    ("llama-8b", FP32, 5, "int4"),
    ("llama-8b", BF16, 160, "int4"),
    ("gpt-oss-20b", BF16, 1),
    ("gpt-oss-20b", BF16, 8, "e2m1"),
    ("gpt-oss-20b", FP16, 300, "int4"),
    ("gemma4-26b-a4b", BF16, 8),
    ("gemma4-26b-a4b", FP32, 300),
    ("gemma4-26b-a4b", FP16, 1, "int4"),
    ("qwen3-30b-a3b", FP16, 5),
    ("exaone-4.0-32b", BF16, 5),
    ("glm-4.5-air", FP32, 300),
    ("glm-4.7-flash", BF16, 8),
    ("ernie-21b-a3b", BF16, 16),
    ("step-3.7-flash", BF16, 1, "int4"),
    ("mimo-v2-flash", FP32, 1),
    ("qwen3.5-4b", BF16, 8),
    ("qwen3.5-4b", FP16, 1, "int4"),
    ("qwen3-next-80b-a3b", FP32, 1),
    # products in any order
    ("gemma4-e4b", BF16, 100, "", FAST),
    ("gemma4-e4b", BF16, 160, "int4-zeros", FAST),
    *(("gemma4-e4b", BF16, rows, "e4m3", FAST) for rows in (64, 256, 512)),
    ("llama-8b", BF16, 200, "", FAST),
    ("llama-8b", BF16, 1200, "int4", FAST),
    ("llama-8b", BF16, 1200, "e4m3-block", FAST),
]


def usual() -> Iterator[Launch]:
    """Yield a variant of each kind. Every statement of every kernel becomes code in one of them."""
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
    yield launch(attention, BF16, 128, 4, 1, batch=64)  # of many requests: one warp
    yield launch(attention, BF16, 256, 4, 5, batch=128, window=512)
    yield launch(attention, BF16, 64, 8, 5, batch=64)  # 64 rows of a chain
    yield launch(attention, BF16, 256, 4, 16, batch=8, tree=True)
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
        yield launch(prompts, BF16, 128, 4, 2048, exact=exact, window=None, cap=None, fp8=True)
        for fp8 in (False, True):
            yield launch(prompts, BF16, 512, 4, 2048, exact=exact, window=None, cap=None, fp8=fp8)
    yield launch(prompts, BF16, 256, 4, 512, exact=True, window=512, cap=None)  # few rows: in parts of the values
    yield launch(prompts, BF16, 512, 4, 512, exact=True, window=None, cap=None)
    for shape, *case in LAYERS:
        yield launch(layers, shape, *case)
    for dtype in (BF16, FP32):
        yield launch(other_families, dtype)
    yield launch(sampling, BF16, 30.0, penalised=True)
    yield launch(sampling, FP16, 30.0, best=True)
    yield launch(sampling, FP32, None)
    yield launch(centroids, BF16, best=True)
    yield launch(open_and_close, 3, 5, 1, chain=True)
    yield launch(open_and_close, 32, 8, 1, chain=False)
    yield launch(open_and_close, 3, 5, 16, chain=False)
    yield launch(stamps)
