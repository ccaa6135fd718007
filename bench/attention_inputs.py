"""Inputs of attention: a committed prefix in shuffled pages, and a block of rows after it; each kernel over them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from bench.device import DEVICE  # isort: skip - before triton
import torch
from attention_scene import attend_plainly, depths, rounded

from bench.verify import in_float64
from specdec.attention.kernels import paged_attention as pa
from specdec.attention.kernels.own_keys import PathKeys, own_keys
from specdec.attention.kernels.page_table import PageTable
from specdec.attention.kernels.ragged_attention import ragged_attention
from specdec.attention.kernels.tree_attention import tree_attention
from specdec.attention.plan import Pack, RunSlots

Shape = dict[str, Any]
"""Arguments of `make_inputs`, and: kind of the rows, level of a draft's newest nodes, exact, softcap, sinks, fp8:
K and V in 8 bits."""


class Prepared(NamedTuple):
    """One call of a kernel on inputs of its own, with any tiles, and its reference in float64."""

    run: Callable[..., torch.Tensor]
    reference: Callable[[], torch.Tensor]


def case(batch: int, length: int, num_rows: int, heads: tuple[int, int], head_dim: int, **extra: Any) -> Shape:
    shape = {"batch": batch, "length": length, "num_rows": num_rows, "heads": heads, "head_dim": head_dim}
    return {**shape, **extra}


def make_inputs(
    batch: int,
    length: int,
    num_rows: int,
    heads: tuple[int, int],
    head_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 1,
    window: int | None = None,
    ragged: bool = False,
    seed: int = 0,
    evicted: bool = False,
) -> dict[str, Any]:
    """Puts NaN in every slot that holds nothing of the prefix. ragged: prefixes of up to `length` keys. evicted: tables
    begin with what the window needs."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    hq, hkv = heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=DEVICE, dtype=torch.float32).to(dtype)

    committed = torch.full((batch,), length, device=DEVICE)
    if ragged:
        committed = torch.randint(0, length + 1, (batch,), generator=g, device=DEVICE)
    start = torch.zeros_like(committed)
    width = length
    if evicted and window is not None:
        start = (committed - window - num_rows).clamp(min=0) // page_size * page_size
        width = min(length, window + num_rows + page_size)
    num_pages = -(-width // page_size)
    pages = torch.randperm(batch * num_pages, generator=g, device=DEVICE).view(batch, num_pages) + 1
    slots = (pages[:, :, None] * page_size + torch.arange(page_size, device=DEVICE)).flatten(1)
    held = start[:, None] + torch.arange(slots.shape[1], device=DEVICE) < committed[:, None]
    pool_k, pool_v = (
        torch.full(((batch * num_pages + 1) * page_size, hkv, head_dim), torch.nan, device=DEVICE, dtype=dtype)
        for _ in range(2)
    )
    pool_k[slots[held]], pool_v[slots[held]] = (normal(int(held.sum()), hkv, head_dim) for _ in range(2))
    query, block_k, block_v = (normal(batch, num_rows, count, head_dim).transpose(1, 2) for count in (hq, hkv, hkv))
    return {
        "query": query,
        "block_k": block_k,
        "block_v": block_v,
        "pool_k": pool_k,
        "pool_v": pool_v,
        "table": PageTable(pages, None if window is None else start, committed, page_size),
        "scaling": head_dim**-0.5,
        "window": window,
    }


def binary(num_nodes: int) -> list[int]:
    """Parents: node n is a child of node (n - 1) // 2."""
    return [-1] + [(n - 1) // 2 for n in range(1, num_nodes)]


def _common(shape: Shape, *own: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """(arguments of `make_inputs`, arguments of any kernel, the fields named in `own`)."""
    shape = dict(shape)
    fields = [shape.pop(name, None) for name in own]
    sinks, softcap = shape.pop("sinks", None), shape.pop("softcap", None)
    extra: dict[str, Any] = {"softcap": softcap}
    if sinks:
        extra["sinks"] = torch.linspace(-1, 2, shape["heads"][0], device=DEVICE).to(shape["dtype"])
    return shape, extra, fields


def prepare_paged(shape: Shape) -> Prepared:
    """`paged_attention` of the newest `level` nodes of a binary tree of `num_rows`; None: all of them."""
    inputs, extra, [level, fp8] = _common(shape, "level", "fp8")
    args = {**make_inputs(**inputs, evicted=True), **extra}
    batch, num_nodes = inputs["batch"], inputs["num_rows"]
    newest = slice(num_nodes - (level or num_nodes), None)
    parents = binary(num_nodes)
    bits = torch.zeros((num_nodes, -(-num_nodes // pa.WORD)), dtype=torch.int64)
    for node, parent in enumerate(parents):
        bits[node] = bits[parent] if parent >= 0 else 0
        bits[node, node // pa.WORD] |= torch.tensor(1) << node % pa.WORD
    positions = args["table"].committed_len[:, None] + torch.tensor(depths(parents), device=DEVICE)
    block_k, block_v = args.pop("block_k"), args.pop("block_v")
    block = pa.BlockKeys(block_k, block_v, positions, bits[newest].to(DEVICE).repeat(batch, 1, 1))
    args |= {"query": args["query"][:, :, newest], "positions": positions[:, newest], "block": block}
    if fp8:
        args |= {name: rounded(args[name]) for name in ("pool_k", "pool_v")}
        rows = (each.transpose(1, 2).flatten(0, 1) for each in (block_k, block_v))  # [B * M, Hkv, D]
        blocks = [rounded(each) for each in rows]
        numbers = [each.bits.view(torch.int16).unflatten(0, (batch, -1)).transpose(1, 2) for each in blocks]
        args["block"] = block._replace(k=numbers[0], v=numbers[1], scales=tuple(each.scales for each in blocks))
    return Prepared(lambda **options: pa.paged_attention(**args, **options), lambda: _stored(shape)[3]()[:, newest])


def prepare_tree(shape: Shape) -> Prepared:
    """`tree_attention` of "tree", "chain", "causal" or "frozen" rows, whose K and V are in the pools already."""
    args, _, path, reference = _stored(shape)
    return Prepared(lambda **options: tree_attention(path=path, **args, **options), reference)


def prepare_ragged(shape: Shape) -> Prepared:
    """`ragged_attention` of one run, in any order of sums, or `exact`."""
    [exact] = _common(shape, "exact")[2]
    args, write, path, reference = _stored({**shape, "kind": "causal"})
    pages, start, committed, _ = path.table
    held = pages[:, : int(committed - (0 if start is None else start))]
    length = torch.full_like(committed, shape["num_rows"])
    pack = Pack.from_lengths(torch.zeros_like(length), committed, length, shape["num_rows"])
    lines = RunSlots(torch.cat([held, write], dim=1), torch.zeros_like(length), start)
    args = {**args, "window": path.window, "pack": pack, "lines": lines}  # the reference has the others
    return Prepared(lambda **options: ragged_attention(exact=bool(exact), **args, **options), reference)


def _stored(shape: Shape) -> tuple[dict[str, Any], Any, PathKeys, Callable[[], torch.Tensor]]:
    """(arguments of kernels that find all keys in the pools, slots of the rows, visible keys, the reference in
    float64)."""
    shape, extra, [kind, fp8, *_] = _common(shape, "kind", "fp8", "level", "exact")
    kind, (batch, num_rows) = kind or "tree", (shape["batch"], shape["num_rows"])
    args = {**make_inputs(**shape, evicted=True), **extra}
    block_k, block_v, table, window = (args.pop(name) for name in ("block_k", "block_v", "table", "window"))
    length, parents, write, block_len = table.committed_len[:, None], None, None, None
    positions = length + torch.arange(num_rows, device=DEVICE)
    if kind == "tree":
        tree = binary(num_rows)
        parents = torch.tensor(tree, device=DEVICE).expand(batch, -1)
        positions = length + torch.tensor(depths(tree), device=DEVICE)
    if kind == "causal":
        block_len = (torch.arange(batch, device=DEVICE) * -7 + num_rows).clamp_(min=1)
    if kind == "frozen":
        positions = length.expand(-1, num_rows)
    else:
        spare = -batch * num_rows % table.page_size
        write = torch.arange(batch * num_rows, device=DEVICE).view(batch, num_rows) + len(args["pool_k"])
        for name, block in (("pool_k", block_k), ("pool_v", block_v)):
            rows = block.transpose(1, 2).flatten(0, 1)  # [B * N, Hkv, D]
            args[name] = torch.cat([args[name], rows, rows[:1].expand(spare, -1, -1)])
    if fp8:
        args |= {name: rounded(args[name]) for name in ("pool_k", "pool_v")}

    path = PathKeys(table, own_keys(table, write, parents), positions, block_len, window)
    plain = attend_plainly(table, write, parents, positions, block_len, window)
    return args, write, path, lambda: plain(**in_float64(args))


def kv_bytes(shape: Shape) -> int:
    """Bytes of K and V that some row of the shape can see, each once, in 16 bits, or in 8 with their scales."""
    keys = shape["length"] if shape.get("window") is None else min(shape["length"], shape["window"] - 1)
    keys += 0 if shape.get("kind") == "frozen" else shape["num_rows"]
    row = shape["head_dim"] + 4 if shape.get("fp8") else 2 * shape["head_dim"]
    return int(2 * shape["batch"] * keys * shape["heads"][1] * row)


def flops(shape: Shape) -> int:
    """Operations of a causal shape: four a pair of visible row and key, head and channel."""
    window = shape.get("window") or 1 << 40
    pairs = sum(min(shape["length"] + i + 1, window) for i in range(shape["num_rows"]))
    return int(4 * shape["batch"] * pairs * shape["heads"][0] * shape["head_dim"])


def reduced(shape: Shape) -> Shape:
    """Returns the case small enough for a sanitizer or the interpreter."""
    most = {"batch": 2, "length": 70, "num_rows": 20, "window": 24}
    return {key: min(value, most.get(key, value)) if type(value) is int else value for key, value in shape.items()}
