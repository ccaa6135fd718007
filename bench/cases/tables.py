"""The small kernels of a round: page tables, K/V stored and moved, trees, rounds opened and closed."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bench.device import DEVICE, ON_CPU  # isort: skip - before triton
import torch
import triton

from bench.clock import microseconds
from bench.kernel_calls import Call, Make, check_calls, time_calls
from bench.report import Row
from specdec.attention.backend import TorchBackend, TritonBackend
from specdec.attention.kernels.page_table import (
    PageTables,
    build_page_tables,
    reference_build_page_tables,
)
from specdec.attention.trees.tree import DraftTree, tree_fields
from specdec.attention.trees.tree_builder import (
    Candidates,
    TreeBackend,
    TreeBuilder,
    reference_select_tree,
    select_tree,
)
from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.cache import KVCache
from specdec.kvcache.layer_context import Destination
from specdec.kvcache.layout import KEEP_ALL, ByGroup, GroupId, PrimaryLoc, Retention, cache_groups
from specdec.kvcache.store import PoolAddresses, move_kv, reference_move_kv, reference_store_kv, store_kv
from specdec.kvcache.table import Move, RequestTable, Rows
from specdec.runtime.rounds.closing import VerifiedRound, closing, reference_closing
from specdec.runtime.rounds.opening import opening, reference_opening

BATCH, NODES, RETAIN = 8, 16, 1025
LIMIT_US = 20.0
"""A page table may take that long."""
Named = Iterator[tuple[str, Make]]
NODE_COUNTS = (1, 2, 7, 16, 33, 64, 200, 512)


def random_table(context: int, page_size: int, seed: int, retain: int = RETAIN) -> RequestTable:
    """A table of BATCH rows with pages in random order, in two groups."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    pages = -(-(context + NODES) // page_size)
    groups = ByGroup((KEEP_ALL, Retention(retain + 1)))
    allocator = HybridAllocator(groups, [BATCH * pages] * 2, page_size=page_size, device=DEVICE)
    table = RequestTable(allocator, max_requests=BATCH, max_len=context, lookahead=NODES, extra_keys=0)
    offsets = torch.arange(page_size, device=DEVICE)
    order = 1 + torch.randperm(BATCH * pages, generator=generator, device=DEVICE).view(BATCH, pages)
    table.slots.tensor[:BATCH] = (order[:, :, None] * page_size + offsets).view(BATCH, -1)
    peers = 1 + torch.randperm(BATCH * pages, generator=generator, device=DEVICE)
    allocator.maps.tensor[1, page_size:] = (peers[:, None] * page_size + offsets).flatten()
    return table


def page_tables(page_sizes: Sequence[int], small: bool) -> Named:
    """Odd lengths, the padding row, widths of all kinds."""
    cases = [([0, 1, 99, 63, 127], 1, 1), ([16, 15, 0, 17, 4999], 64, 33), ([5000, 4097, 7, 1025, 1026], 16, RETAIN)]
    for page_size in page_sizes:
        for lengths, nodes, retain in cases[: 1 if small else None]:
            for width in (-(-5000 // page_size), 0, 16):
                name = f"page table, pages of {page_size}, {nodes} nodes, width {width}"
                yield name, partial(page_table_call, page_size, lengths, nodes, retain, width)


def page_table_call(page_size: int, lengths: list[int], nodes: int, retain: int, width: int, seed: int) -> Call:
    """With 0 past each prefix, where pages are undefined."""
    rows, length = torch.tensor([3, 0, BATCH, 1, 7], device=DEVICE), torch.tensor(lengths, device=DEVICE)
    inputs = random_table(5000, page_size, page_size, retain), Rows(rows, width * page_size), length, nodes
    real = length.masked_fill(rows == BATCH, 0)[:, None]  # the row of padding

    def held(tables: PageTables) -> PageTables:
        def pages_of(group: GroupId) -> torch.Tensor:
            pages = tables.tables[group]
            first = tables.start[group][:, None] + torch.arange(pages.shape[1], device=DEVICE) * page_size
            return torch.where(first < real, pages, 0)

        return tables._replace(tables=ByGroup(tuple(pages_of(group) for group, _ in tables.tables.items())))

    return Call(lambda: held(build_page_tables(*inputs)), lambda: held(reference_build_page_tables(*inputs)))


def stores() -> Named:
    for heads, dim, dtype in ((2, 256, torch.bfloat16), (4, 512, torch.bfloat16), (3, 5, torch.float32)):
        dtype = torch.float32 if ON_CPU else dtype
        yield f"store_kv, {heads} x {dim}, {dtype}", partial(store_call, 77, heads, dim, dtype, 501)
        yield f"move_kv, {heads} x {dim}, {dtype}", partial(move_call, 77, heads, dim, dtype, 3, 501)


def random_pools(count: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(size, heads, dim, device=DEVICE).to(dtype) for _ in range(count)]


def store_call(rows: int, heads: int, dim: int, dtype: torch.dtype, size: int, seed: int) -> Call:
    k = torch.randn(1, heads, rows, dim, device=DEVICE).to(dtype)[0].transpose(0, 1)
    v = torch.randn(rows, 2 * heads, dim, device=DEVICE).to(dtype)[:, ::2]
    slots = PrimaryLoc(1 + torch.randperm(size - 1, device=DEVICE)[:rows])
    ours = random_pools(2, size, heads, dim, dtype)
    theirs = [pool.clone() for pool in ours]
    return Call(
        lambda: (store_kv(Destination(*ours, slots), k, v), *ours)[1:],
        lambda: (reference_store_kv(Destination(*theirs, slots), k, v), *theirs)[1:],
    )


def move_call(rows: int, heads: int, dim: int, dtype: torch.dtype, count: int, size: int, seed: int) -> Call:
    """Rows of several pools, whose old and new places overlap."""
    ours = random_pools(count, size, heads, dim, dtype)
    theirs, addresses = [pool.clone() for pool in ours], PoolAddresses.from_pools(ours)
    window = 1 + torch.randperm(size - 1, device=DEVICE)
    source, destination = PrimaryLoc(window[3 : 3 + rows]), PrimaryLoc(window[:rows])

    def run() -> tuple[torch.Tensor, ...]:
        move_kv(addresses, source, destination)
        return tuple(ours)

    def reference() -> tuple[torch.Tensor, ...]:
        reference_move_kv(theirs, source, destination)
        return tuple(theirs)

    return Call(run, reference)


def select_call(topk: int, levels: int, num_nodes: int, seed: int) -> Call:
    """Roots of `BATCH` requests, and candidates, with many ties."""
    count = topk + (levels - 1) * topk * topk
    number = torch.arange(count, device=DEVICE)
    level = torch.where(number < topk, 0, 1 + (number - topk) // (topk * topk))
    first = torch.where(level <= 1, 0, topk + (level - 2) * topk * topk)
    beam = torch.where(level <= 1, 1, topk) * ((number - topk) % (topk * topk) // topk)
    parents = torch.where(level == 0, -1, first + beam).expand(BATCH, count).contiguous()
    generator = torch.Generator(DEVICE).manual_seed(seed + topk)
    scores = -torch.randint(0, 6, (BATCH, count), generator=generator, device=DEVICE) - 2.0 * level
    candidates = Candidates(number.expand(BATCH, count).contiguous(), scores, parents)
    roots, nodes = torch.zeros(BATCH, dtype=torch.int64, device=DEVICE), min(num_nodes, count + 1)

    def fields(tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor]:
        return tree.tokens, tree.parents

    return Call(
        lambda: fields(select_tree(roots, candidates, num_nodes=nodes, num_levels=levels)),
        lambda: fields(reference_select_tree(roots, candidates, num_nodes=nodes, num_levels=levels)),
    )


def expand_call(topk: int, levels: int, together: bool, seed: int) -> Call:
    """Candidates of blocks, expanded all at once or level by level, and the last beam; with many ties."""
    generator = torch.Generator(DEVICE).manual_seed(topk)
    log_probs = -torch.randint(0, 6, (BATCH, levels, topk), generator=generator, device=DEVICE).float()
    tokens = torch.arange(topk, device=DEVICE).expand(BATCH, levels, -1).contiguous()

    def grown(backend: TreeBackend) -> tuple[torch.Tensor, ...]:
        builder = TreeBuilder(tokens[:, 0, 0].contiguous(), backend, levels)
        if together:
            beam = builder.add_levels(tokens[:, :, None], log_probs[:, :, None])
        else:
            for level in range(levels):
                width = topk if level else 1
                beam = builder.add_level(*(x[:, level, None].expand(-1, width, -1) for x in (tokens, log_probs)))
        assert builder.candidates is not None
        return (*builder.candidates, *beam)

    return Call(lambda: grown(TritonBackend()), lambda: grown(TorchBackend()))


def random_walks(num_nodes: int, seed: int) -> tuple[DraftTree, torch.Tensor]:
    """Trees, and drawn tokens that accept about half of each level."""
    generator = torch.Generator().manual_seed(seed)
    parents = (torch.rand(BATCH, num_nodes, generator=generator) * torch.arange(num_nodes)).long()
    parents[:, 0] = -1
    parents = parents.to(DEVICE)
    siblings = (parents[:, :, None] == parents[:, None, :]).tril(-1).sum(-1)  # tokens are distinct among siblings
    target = torch.randint(0, 2, (BATCH, num_nodes), device=DEVICE)
    return DraftTree.from_parents(siblings, parents), target


def fields_call(num_nodes: int, seed: int) -> Call:
    tree, _ = random_walks(num_nodes, seed)

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        whole = DraftTree.from_parents(tree.tokens, tree.parents)
        return whole.depth, whole.ancestors

    return Call(lambda: tree_fields(tree.parents, max_depth=num_nodes - 1), reference)


def round_call(page_size: int, num_nodes: int, chain: bool, seed: int) -> Call:
    """All that one round opens with and leaves, with pages of one slot, whose rows are permuted, or of 16, whose K/V
    move; two of its seats are padding."""
    drafted, target = random_walks(num_nodes, num_nodes)
    tree = DraftTree.chain(drafted.tokens) if chain else drafted

    def outcome(open_round: Callable[..., Any], close_round: Callable[..., Any]) -> tuple[Any, ...]:
        allocator = HybridAllocator(cache_groups([]), [9999], page_size=page_size, device=DEVICE)
        table = RequestTable(allocator, max_requests=BATCH, max_len=600, lookahead=num_nodes)
        cache, moved = KVCache(allocator, table, TorchBackend()), list[Move]()
        cache.move = moved.append  # type: ignore[method-assign]
        for row in range(BATCH - 2):
            table.open_row()
            table.ensure_slots(row, 70 * row + num_nodes)
            table.committed_len[row] = 70 * row
        generator = torch.Generator().manual_seed(num_nodes)
        shapes = (table.slots.host.shape, (BATCH + 1,), (BATCH + 1, 8))
        tokens, most, cells = (torch.randint(0, 9, shape, generator=generator).to(DEVICE) for shape in shapes)
        seats = torch.arange(BATCH, device=DEVICE)
        rows = Rows(seats.where(seats < BATCH - 2, BATCH), 600)
        opened = open_round(rows.index, table.committed_len.tensor, tokens, most, cells, depth=num_nodes)
        packed = tokens.new_empty((BATCH, 1 + 2 * num_nodes))
        sizes = num_nodes, num_nodes
        verified = VerifiedRound(tree, target, opened.max_path, rows, opened.committed_len, *sizes)
        *closed, move = close_round(verified, table, tokens, packed)
        if move is not None:
            cache.move(move)
        return (*opened, *closed, packed, tokens, table.committed_len.tensor, table.slots.tensor, *sum(moved, ()))

    return Call(lambda: outcome(opening, closing), lambda: outcome(reference_opening, reference_closing))


def trees(small: bool) -> Named:
    for topk, levels in ((1, 7), (2, 3), (4, 5), (8, 8), (10, 6))[: 3 if small else None]:
        for nodes in dict.fromkeys((2, 1 + topk, 64)):
            yield f"select, topk {topk}, {levels} levels, {nodes} nodes", partial(select_call, topk, levels, nodes)
    for topk, levels in ((1, 7), (3, 5), (4, 15), (8, 8), (32, 2))[: 3 if small else None]:
        for together in (False, True):
            words = "at once" if together else "level by level"
            yield f"expand, topk {topk}, {levels} levels {words}", partial(expand_call, topk, levels, together)
    for nodes in NODE_COUNTS[: 6 if small else None]:  # racecheck notes every access to memory
        yield f"tree fields, {nodes} nodes", partial(fields_call, nodes)


def rounds(page_sizes: Sequence[int], small: bool) -> Named:
    for page_size in page_sizes:
        for nodes in NODE_COUNTS[: 5 if small else None]:
            for chain in (False, True):
                name = f"round, pages of {page_size}, {'chain' if chain else 'tree'} of {nodes} nodes"
                yield name, partial(round_call, page_size, nodes, chain)


def check_rows(page_sizes: Sequence[int], small: bool) -> Iterator[Row]:
    """Every small kernel against its reference, exactly, and how many variants the page table was compiled in."""
    compiled: list[int] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, **__: compiled.append(1)
    yield from check_calls(page_tables(page_sizes, small))
    triton.knobs.runtime.jit_post_compile_hook = None
    yield Row("page tables: variants compiled over all lengths, widths and node counts", str(len(compiled)))
    yield from check_calls([*stores(), *trees(small), *rounds(page_sizes, small)])


def times_rows(page_sizes: Sequence[int], contexts: Sequence[int]) -> Iterator[Row]:
    """Page tables, whole and with a prefix of one page, and the other kernels next to plain torch."""
    rows, copies = torch.arange(BATCH, device=DEVICE), 1 if ON_CPU else 8
    for page_size in page_sizes:
        for context in contexts:
            sets = [random_table(context, page_size, seed) for seed in range(copies)] * 8
            length = torch.full((BATCH,), context, device=DEVICE)
            kept: list[Any] = []  # outputs rotate too

            def build(table: RequestTable, max_len: int, length: Any = length, kept: Any = kept) -> None:
                kept.append(build_page_tables(table, Rows(rows, max_len), length, NODES))

            whole, rest = (microseconds(partial(build, max_len=most), sets) for most in (context, page_size))
            found = "" if whole < LIMIT_US else f"slower than {LIMIT_US:.0f} us"
            name = f"page tables, pages of {page_size}, context {context}"
            yield Row(name, found, f"{whole:.2f} us, {rest:.2f} us with a prefix of one page", not found)
    dtype = torch.float32 if ON_CPU else torch.bfloat16
    timed: list[tuple[str, Make]] = [
        ("store_kv, 128 rows of 2 x 256", partial(store_call, 128, 2, 256, dtype, 20000)),
        ("move_kv, 32 rows in 60 pools of 2 x 256", partial(move_call, 32, 2, 256, dtype, 60, 2000)),
        *((f"select, topk {k}, {k} levels, {n} nodes", partial(select_call, k, k, n)) for k, n in ((4, 16), (8, 64))),
        *((f"expand, topk {topk}, 15 levels at once", partial(expand_call, topk, 15, True)) for topk in (4, 8)),
        *((f"tree fields, {nodes} nodes", partial(fields_call, nodes)) for nodes in (16, 64)),
    ]
    yield from time_calls(timed, copies=2)
