"""Random requests for tests of `tree_attention`, `attend_alone` and `paged_attention`.

`lay_out` puts their queries, keys and values into pools with page tables; `dense` computes every row by definition.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.attention.backend import TorchBackend
from specdec.attention.kernels.own_keys import PathKeys, own_keys
from specdec.attention.kernels.page_table import PageTable, PageTables
from specdec.attention.plan import Attend, KVPlan
from specdec.attention.trees.tree import DraftTree
from specdec.kvcache.fp8_pool import Fp8Pool
from specdec.kvcache.layout import NULL_SLOT, PRIMARY, ByGroup, GroupId

from dense_oracle import attend


def bushy(num_nodes: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [-1] + [rng.randrange(max(0, n - 6), n) for n in range(1, num_nodes)]


def depths(parents: Sequence[int]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


@dataclass(frozen=True)
class Text:
    """Random queries q [T, Hq, D], keys and values k, v [T, Hkv, D] of some tokens."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(
        cls,
        length: int,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        v_dim: int | None = None,
    ) -> "Text":
        g = torch.Generator().manual_seed(seed)
        hq, hkv = heads
        sizes = (hq, head_dim), (hkv, head_dim), (hkv, v_dim or head_dim)
        return cls(*(torch.randn(length, *size, generator=g).to(dtype) for size in sizes))

    def __getitem__(self, rows: Any) -> "Text":
        return Text(self.q[rows], self.k[rows], self.v[rows])

    def __add__(self, other: "Text") -> "Text":
        return Text(*(torch.cat(pair) for pair in zip(self.parts, other.parts, strict=True)))

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    def __len__(self) -> int:
        return len(self.q)


@dataclass(frozen=True)
class Request:
    """A prefix and the block after it: a tree of nodes, or a chain if `parents` is None.

    frozen: the block has queries only, all at position len(prefix).   valid: number of rows of the block that exist.
    """

    prefix: Text
    block: Text
    parents: list[int] | None = None
    frozen: bool = False
    valid: int | None = None

    @property
    def depth(self) -> list[int]:
        if self.frozen:
            return [0] * len(self.block)
        return depths(self.parents) if self.parents is not None else list(range(len(self.block)))


def lay_out(
    requests: Sequence[Request],
    *,
    page_size: int = 1,
    window: int | None = None,
    evict: bool = False,
    spare_pages: int = 0,
    first_key: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the arguments of `tree_attention`, `own_keys` and their named tuples. Pages are shuffled, and every slot
    that was not written is NaN."""
    rng = random.Random(seed)
    first = requests[0]
    num_rows, frozen = len(first.block), first.frozen
    totals = [len(r.prefix) + (0 if frozen else num_rows) for r in requests]
    starts = [0] * len(requests)
    if evict:
        assert window is not None
        starts = [max(0, len(r.prefix) - window) // page_size * page_size for r in requests]
    held = [range(s // page_size, -(-n // page_size)) for s, n in zip(starts, totals, strict=True)]
    num_pages = sum(map(len, held)) + 3
    free = list(range(1, num_pages))
    rng.shuffle(free)
    pool_k, pool_v = (
        torch.full((num_pages * page_size, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in first.prefix.parts[1:]
    )
    widths = [-(-(len(r.prefix) - s) // page_size) for r, s in zip(requests, starts, strict=True)]
    pages = torch.zeros(len(requests), max(widths) + spare_pages, dtype=torch.int64)
    write = torch.zeros(len(requests), num_rows, dtype=torch.int64)
    for b, r in enumerate(requests):
        page_of = {page: free.pop() for page in held[b]}
        for page in range(widths[b]):
            pages[b, page] = page_of[page + starts[b] // page_size]
        for p in range(starts[b], totals[b]):
            slot = page_of[p // page_size] * page_size + p % page_size
            node = p - len(r.prefix)
            if node >= 0:
                write[b, node] = slot
            if node < (num_rows if r.valid is None else r.valid):
                source, row = (r.prefix, p) if node < 0 else (r.block, node)
                pool_k[slot], pool_v[slot] = source.k[row], source.v[row]
    lengths = torch.tensor([len(r.prefix) for r in requests])
    parents = None if first.parents is None else torch.tensor([r.parents for r in requests])
    valid = [num_rows if r.valid is None else r.valid for r in requests]
    return {
        "query": torch.stack([r.block.q for r in requests]).transpose(1, 2),
        "pool_k": pool_k,
        "pool_v": pool_v,
        "pages": pages,
        "start": torch.tensor(starts) if evict else None,
        "committed_len": lengths,
        "positions": lengths[:, None] + torch.tensor([r.depth for r in requests]),
        "write": None if frozen else write,
        "parents": parents,
        "page_size": page_size,
        "scaling": first.block.q.shape[2] ** -0.5 * 1.5,
        "block_len": torch.tensor(valid) if any(r.valid is not None for r in requests) else None,
        "window": window,
        "first_key": first_key,
        "softcap": softcap,
        "sinks": sinks,
    }


def rounded(rows: torch.Tensor) -> Fp8Pool:
    """Store rows [slots, heads, D] in a pool of 8 bits."""
    pool = Fp8Pool.zeros(*rows.shape, rows.dtype, rows.device)
    pool.index_copy_(0, torch.arange(len(rows), device=rows.device), rows)
    return pool


def taken(fields: type[Any], args: dict[str, Any], **names: str) -> Any:
    """Remove the fields of a named tuple from `args`, and return the tuple. names: a field's name in `args`, if it is
    another."""
    return fields(*(args.pop(names.get(name, name)) for name in fields._fields))


def path_of(args: dict[str, Any]) -> PathKeys:
    """Remove the keys of `tree_attention` from the arguments of `lay_out`, and return them."""
    table = taken(PageTable, args)
    args |= {"table": table, "own": own_keys(table, args.pop("write"), args.pop("parents"))}
    return taken(PathKeys, args)


def attend_plainly(
    table: PageTable,
    write: torch.Tensor | None,
    parents: torch.Tensor | None,
    positions: torch.Tensor,
    block_len: torch.Tensor | None,
    window: int | None,
    first_key: int = 0,
) -> Attend:
    """Attention of each row alone in plain torch, under a plan of these: see `own_keys` and `PathKeys`."""
    group = PRIMARY if table.start is None else GroupId(1)
    if write is not None and block_len is not None:
        write = write.masked_fill(torch.arange(write.shape[1], device=write.device) >= block_len[:, None], NULL_SLOT)
    slots = None if write is None else ByGroup((write.flatten(),) * 2)
    start, length = table.begin, table.committed_len
    plan = KVPlan(
        backend=TorchBackend(deterministic=True),
        rows=torch.arange(len(length), device=length.device),
        positions=positions,
        prefix=PageTables(ByGroup((table.pages,) * 2), torch.stack([start, start]), ByGroup(()), *table[2:]),
        tree=None if parents is None else DraftTree.from_parents(parents, parents),
        write=slots,
        block_len=block_len,
        first_key=first_key,
    )
    return plan.backend.attention(plan, group, window)


def dense(requests: Sequence[Request], args: dict[str, Any]) -> torch.Tensor:
    """Compute every row by the definition, over the keys of its path."""
    options = {name: args[name] for name in ("scaling", "softcap", "sinks")}
    block = requests[0].block
    out = torch.zeros(len(requests), *block.q.shape[:2], block.v.shape[2], dtype=torch.float64)
    for b, r in enumerate(requests):
        for i in range(len(r.block) if r.valid is None else r.valid):
            path = []
            node = -1 if r.frozen else i
            while node >= 0:
                path.insert(0, node)
                node = node - 1 if r.parents is None else r.parents[node]
            position = len(r.prefix) + r.depth[i]
            oldest = 0 if args["window"] is None else max(0, position - args["window"] + 1)
            oldest = max(oldest, min(args["first_key"], position))
            seen = (r.prefix + r.block[path])[oldest:]
            out[b, i] = attend(r.block.q[i], seen.k, seen.v, **options)
    return out


def request(
    length: int,
    num_rows: int,
    parents: list[int] | None = None,
    *,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    v_dim: int | None = None,
    **fields: Any,
) -> Request:
    text = Text.random(length + num_rows, heads, head_dim, dtype, seed, v_dim)
    return Request(text[:length], text[length:], parents, **fields)
