"""Check the small kernels against their references on a GPU, then time them: `python tools/gpu_tables.py`.

Times are medians of CUDA-graph replays; a graph holds `LAUNCHES` calls that rotate over `SETS` sets of inputs, so at
long contexts nothing is left in the cache. Exits with 1 when a check fails or when a page table takes 20 us or more.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
import triton
from result_table import ResultTable, Row, table_head, table_row

from specdec.attention.kernels.page_table import (
    PageTables,
    build_page_tables,
    reference_build_page_tables,
    table_widths,
)
from specdec.attention.torch_backend import TorchBackend
from specdec.attention.trees.beam import Candidates
from specdec.attention.trees.growth import Growth, TreeBackend, reference_select_tree, select_tree
from specdec.attention.trees.tree import DraftTree
from specdec.attention.trees.walk import tree_fields
from specdec.attention.triton_backend import TritonBackend
from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.cache import KVCache
from specdec.kvcache.index_spaces import ByGroup, GroupId, PrimaryLoc
from specdec.kvcache.layout import PRIMARY_ONLY
from specdec.kvcache.store import StoreAddresses, move_kv, reference_move_kv, reference_store_kv, store_kv
from specdec.kvcache.table import Move, RequestTable, Rows
from specdec.runtime.rounds.closing import closing, reference_closing
from specdec.runtime.rounds.opening import opening, reference_opening

BATCH, NODES, RETAIN = 8, 16, 1025
CONTEXTS, PAGE_SIZES = (1024, 8192, 32768, 131072), (1, 16)
SETS, LAUNCHES, REPLAYS = 8, 64, 20
LIMIT_US = 20.0


def random_slots(context: int, page_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """req_to_slot [B + 1, W] and maps [2, slots] with pages in random order; the last row is for padding."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    pages = -(-(context + NODES) // page_size)
    offsets = torch.arange(page_size, device=DEVICE)
    order = 1 + torch.randperm(BATCH * pages, generator=generator, device=DEVICE).view(BATCH, pages)
    slots = torch.zeros((BATCH + 1, pages * page_size), dtype=torch.int64, device=DEVICE)
    slots[:BATCH] = (order[:, :, None] * page_size + offsets).view(BATCH, -1)
    peers = 1 + torch.randperm(BATCH * pages, generator=generator, device=DEVICE)
    mapping = torch.zeros((BATCH * pages + 1, page_size), dtype=torch.int64, device=DEVICE)
    mapping[1:] = peers[:, None] * page_size + offsets
    mapping = mapping.view(1, -1)
    return slots, torch.cat([torch.zeros_like(mapping), mapping])


def random_parents(batch: int, num_nodes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    parents = (torch.rand(batch, num_nodes, generator=generator) * torch.arange(num_nodes)).long()
    parents[:, 0] = -1
    return parents.to(DEVICE)


def same(name: str, got: Any, want: Any) -> None:
    """Exact equality of tensors, tuples of them (None too), values by group and trees."""
    if isinstance(got, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda text: f"{name}: {text}")
    elif isinstance(got, tuple | ByGroup):
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            same(f"{name}[{i}]", one, other)
    else:
        assert got is None and want is None, f"{name}: {got} {want}"


def microseconds(call: Callable[[int], object]) -> float:
    """Median time of one `call(set)` in a CUDA graph of many."""
    for i in range(SETS):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            call(i % SETS)
    times = []
    for _ in range(REPLAYS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / LAUNCHES)
    return statistics.median(times[3:])


def check_tables(quick: bool) -> int:
    """Odd lengths, the padding row, widths of all kinds; returns how many times the kernels were compiled for them."""
    compiled = 0

    def count(*_: object, **__: object) -> None:
        nonlocal compiled
        compiled += 1

    triton.knobs.runtime.jit_post_compile_hook = count
    rows = torch.tensor([3, 0, BATCH, 1, 7], device=DEVICE)
    for page_size in PAGE_SIZES:
        slots, maps = random_slots(5000, page_size, seed=page_size)
        cases = [
            ([0, 1, 99, 63, 127], 1, 1),
            ([16, 15, 0, 17, 4999], 64, 33),
            ([5000, 4097, 7, 1025, 1026], 16, RETAIN),
        ]
        for lengths, nodes, retain in cases[:1] if quick else cases:
            length = torch.tensor(lengths, device=DEVICE)
            keys = torch.tensor([slots.shape[1], retain])
            for full_width in (-(-5000 // page_size), 0, 16):
                widths = table_widths(keys.numpy(), full_width, page_size)
                arguments = (slots, maps, keys.to(DEVICE), rows, length)
                options = {"num_nodes": nodes, "page_size": page_size, "widths": widths}
                builders = build_page_tables, reference_build_page_tables
                tables = [build(*arguments, **options) for build in builders]
                real = length.masked_fill(rows == BATCH, 0)  # the row of padding
                same("page tables", *(held_pages(each, real, page_size) for each in tables))
    triton.knobs.runtime.jit_post_compile_hook = None
    return compiled


def held_pages(tables: PageTables, length: torch.Tensor, page_size: int) -> PageTables:
    """With 0 past each prefix, where pages are undefined."""

    def held(group: GroupId) -> torch.Tensor:
        pages, start = tables.pages(group)
        first = start[:, None] + torch.arange(pages.shape[1], device=DEVICE) * page_size
        return torch.where(first < length[:, None], pages, 0)

    return tables._replace(tables=ByGroup(tuple(held(group) for group, _ in tables.tables.items())))


def check_kv() -> None:
    for heads, dim, dtype in ((2, 256, torch.bfloat16), (4, 512, torch.bfloat16), (3, 5, torch.float32)):
        k = torch.randn(1, heads, 77, dim, device=DEVICE).to(dtype)[0].transpose(0, 1)
        v = torch.randn(77, 2 * heads, dim, device=DEVICE).to(dtype)[:, ::2]
        slots = PrimaryLoc(1 + torch.randperm(500, device=DEVICE)[:77])
        pools = [torch.randn(501, heads, dim, device=DEVICE).to(dtype) for _ in range(2)]
        want = [pool.clone() for pool in pools]
        reference_store_kv(k, v, slots, *want)
        store_kv(k, v, slots, *pools)
        same("store", tuple(pools), tuple(want))
        pools += [torch.randn(501, 1, 64, device=DEVICE).to(dtype)]
        want = [pool.clone() for pool in pools]
        window = 1 + torch.randperm(300, device=DEVICE)
        source, destination = PrimaryLoc(window[3:80]), PrimaryLoc(window[:77])  # overlap
        reference_move_kv(want, source, destination)
        move_kv(StoreAddresses.from_pools(pools), source, destination)
        same("move", tuple(pools), tuple(want))


def tree_inputs(topk: int, levels: int, seed: int) -> tuple[torch.Tensor, Candidates]:
    """Roots of `BATCH` requests, and candidates, with many ties."""
    count = topk + (levels - 1) * topk * topk
    number = torch.arange(count, device=DEVICE)
    level = torch.where(number < topk, 0, 1 + (number - topk) // (topk * topk))
    first = torch.where(level <= 1, 0, topk + (level - 2) * topk * topk)
    beam = torch.where(level <= 1, 1, topk) * ((number - topk) % (topk * topk) // topk)
    parents = torch.where(level == 0, -1, first + beam).expand(BATCH, count).contiguous()
    generator = torch.Generator(DEVICE).manual_seed(seed)
    scores = -torch.randint(0, 6, (BATCH, count), generator=generator, device=DEVICE) - 2.0 * level
    tokens = number.expand(BATCH, count).contiguous()
    return torch.zeros(BATCH, dtype=torch.int64, device=DEVICE), Candidates(tokens, scores, parents)


def marginals(topk: int, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and log-probabilities (with many ties) [B, L, K] of blocks."""
    generator = torch.Generator(DEVICE).manual_seed(topk)
    log_probs = -torch.randint(0, 6, (BATCH, levels, topk), generator=generator, device=DEVICE).float()
    return torch.arange(topk, device=DEVICE).expand(BATCH, levels, -1).contiguous(), log_probs


def grown(
    backend: TreeBackend, tokens: torch.Tensor, log_probs: torch.Tensor, together: bool = True
) -> tuple[torch.Tensor, ...]:
    """The candidates, expanded all at once or level by level, and the last beam."""
    levels, topk = tokens.shape[1:]
    growth = Growth(tokens[:, 0, 0].contiguous(), backend, levels)
    if together:
        beam = growth.add_all_levels(tokens, log_probs)
    else:
        for level in range(levels):
            width = topk if level else 1
            beam = growth.add_level(*(x[:, level, None].expand(-1, width, -1) for x in (tokens, log_probs)))
    assert growth.candidates is not None
    return (*growth.candidates, *beam)


def random_walks(num_nodes: int, seed: int) -> tuple[DraftTree, torch.Tensor]:
    """Trees, and drawn tokens that accept about half of each level."""
    parents = random_parents(BATCH, num_nodes, seed)
    siblings = (parents[:, :, None] == parents[:, None, :]).tril(-1).sum(-1)  # tokens are distinct among siblings
    target = torch.randint(0, 2, (BATCH, num_nodes), device=DEVICE)
    return DraftTree.from_parents(siblings, parents), target


def check_trees(quick: bool) -> None:
    for topk, levels in ((1, 7), (2, 3), (4, 5), (8, 8), (10, 6))[: 3 if quick else None]:
        inputs = tree_inputs(topk, levels, seed=topk)
        for num_nodes in {2, 1 + topk, min(64, inputs[1].tokens.shape[1] + 1)}:
            got = select_tree(*inputs, num_nodes=num_nodes, num_levels=levels)
            got.check()
            want = reference_select_tree(*inputs, num_nodes=num_nodes)
            same("select", (got.tokens, got.parents), (want.tokens, want.parents))
    for topk, levels in ((1, 7), (3, 5), (4, 15), (8, 8), (32, 2))[: 3 if quick else None]:
        for together in (False, True):
            inputs = marginals(topk, levels)
            got, want = (grown(backend, *inputs, together) for backend in (TritonBackend(), TorchBackend()))
            same("expand", got, want)
    for num_nodes in (1, 2, 7, 16, 33, 64, 200, 512)[: 6 if quick else None]:  # racecheck notes every access to memory
        for seed in range(1 if quick else 10):
            tree, _ = random_walks(num_nodes, seed)
            want = DraftTree.from_parents(tree.tokens, tree.parents)
            same("fields", tree_fields(tree.parents), (want.depth, want.ancestors))


def check_rounds(quick: bool) -> None:
    """Trees and chains of all sizes, with pages of one slot, whose rows are permuted, and of 16, whose K/V move."""
    for page_size in PAGE_SIZES:
        for num_nodes in (1, 2, 7, 16, 33, 64, 200, 512)[: 5 if quick else None]:
            tree, target = random_walks(num_nodes, num_nodes)
            chain = DraftTree.chain(tree.tokens)
            for drafted in (tree, chain):
                got, want = (round_outcome(page_size, drafted, target, kernels) for kernels in (True, False))
                same("round", got, want)


def round_outcome(page_size: int, tree: DraftTree, target: torch.Tensor, kernels: bool) -> tuple[Any, ...]:
    """All that one round opens with and leaves behind; two of its seats are padding."""
    num_nodes = tree.num_nodes
    allocator = HybridAllocator(PRIMARY_ONLY, [9999], page_size=page_size, device=DEVICE)
    table = RequestTable(allocator, max_requests=BATCH, max_len=600, lookahead=num_nodes)
    cache, moved = KVCache(allocator, table, TorchBackend()), list[Move]()
    cache.move = moved.append  # type: ignore[method-assign]
    for row in range(BATCH - 2):
        table.open_row()
        table.ensure_slots(row, 70 * row + num_nodes)
        table.committed_len[row] = 70 * row
    generator = torch.Generator().manual_seed(num_nodes)
    tokens, most, cells = (
        torch.randint(0, 9, shape, generator=generator).to(DEVICE)
        for shape in (table.slots.host.shape, (BATCH + 1,), (BATCH + 1, 8))
    )
    rows = Rows(torch.arange(BATCH, device=DEVICE).where(torch.arange(BATCH, device=DEVICE) < BATCH - 2, BATCH), 600)
    state = (table.committed_len.tensor, tokens, most, cells)
    opened = (opening if kernels else reference_opening)(rows.index, *state, depth=num_nodes)
    packed = tokens.new_empty((BATCH, 1 + 2 * num_nodes))
    *closed, move = (closing if kernels else reference_closing)(
        *(tree, target, opened.most, rows, opened.committed_len, table, tokens, packed),
        width=num_nodes,
        depth=num_nodes,
    )
    if move is not None:
        cache.move(move)
    return (*opened, *closed, packed, tokens, table.committed_len.tensor, table.slots.tensor, *sum(moved, ()))


def page_table_rows() -> Iterator[tuple[str, float, float]]:
    """(what, us, us for the write locations and a prefix of one page)."""
    rows = torch.arange(BATCH, device=DEVICE)
    for page_size in PAGE_SIZES:
        for context in CONTEXTS:
            sets = [random_slots(context, page_size, seed) for seed in range(SETS)]
            length = torch.full((BATCH,), context, device=DEVICE)
            keys = torch.tensor([sets[0][0].shape[1], RETAIN])
            retain, options = keys.to(DEVICE), {"num_nodes": NODES, "page_size": page_size}
            keep: list[Any] = [None] * SETS  # outputs rotate too

            def call(i: int, widths, sets=sets, retain=retain, length=length, options=options, keep=keep) -> None:
                keep[i] = build_page_tables(*sets[i], retain, rows, length, **options, widths=widths)

            wide, narrow = (table_widths(keys.numpy(), width, page_size) for width in (-(-context // page_size), 1))
            whole = microseconds(lambda i, call=call, widths=wide: call(i, widths))
            rest = microseconds(lambda i, call=call, widths=narrow: call(i, widths))
            yield f"build_page_tables  page_size {page_size:2}, context {context:6}", whole, rest


def other_rows() -> Iterator[tuple[str, float, float]]:
    """(what, us, us of the plain torch reference in a graph)."""
    pools = [torch.randn(20000, 2, 256, device=DEVICE, dtype=torch.bfloat16) for _ in range(60)]
    k, v = (torch.randn(2, 128, 256, device=DEVICE, dtype=torch.bfloat16).transpose(0, 1) for _ in range(2))
    where = [PrimaryLoc(1 + torch.randperm(19999, device=DEVICE)[:128]) for _ in range(SETS)]
    yield (
        "store_kv           128 rows of 2 x 256 bf16",
        microseconds(lambda i: store_kv(k, v, where[i], pools[2 * i], pools[2 * i + 1])),
        microseconds(lambda i: reference_store_kv(k, v, where[i], pools[2 * i], pools[2 * i + 1])),
    )
    table = StoreAddresses.from_pools(pools)
    yield (
        "move_kv            32 rows in 60 pools of 2 x 256 bf16",
        microseconds(lambda i: move_kv(table, where[i][:32], where[i][16:48])),
        microseconds(lambda i: reference_move_kv(pools, where[i][:32], where[i][16:48])),
    )
    for topk, levels, num_nodes in ((4, 4, 16), (8, 8, 64)):
        inputs = tree_inputs(topk, levels, seed=0)
        size = {"num_nodes": num_nodes, "num_levels": levels}
        yield (
            f"select_tree        topk {topk}, {levels} levels, {num_nodes} nodes (with fields)",
            microseconds(lambda _, inputs=inputs, size=size: select_tree(*inputs, **size)),
            microseconds(lambda _, inputs=inputs, size=size: reference_select_tree(*inputs, **size)),
        )
    for topk, levels in ((4, 15), (8, 15)):
        inputs = marginals(topk, levels)
        yield (
            f"expand             topk {topk}, {levels} levels at once",
            microseconds(lambda _, inputs=inputs: grown(TritonBackend(), *inputs)),
            microseconds(lambda _, inputs=inputs: grown(TorchBackend(), *inputs)),
        )
    for num_nodes in (16, 64):
        tree, _ = random_walks(num_nodes, seed=0)
        yield (
            f"tree_fields        {num_nodes} nodes",
            microseconds(lambda _, tree=tree: tree_fields(tree.parents)),
            microseconds(lambda _, tree=tree: DraftTree.from_parents(tree.tokens, tree.parents)),
        )


def check_rows(quick: bool = False) -> Iterator[Row]:
    """Every small kernel against its reference, exactly."""
    compiled = 0

    def tables() -> None:
        nonlocal compiled
        compiled = check_tables(quick)

    checks: dict[str, Callable[[], None]] = {
        "page tables": tables,
        "store_kv, move_kv": check_kv,
        "tree selection and fields": lambda: check_trees(quick),
        "rounds opened and closed": lambda: check_rounds(quick),
    }
    for name, check in checks.items():
        try:
            check()
            yield Row(name, "equal")
        except Exception as exception:  # every check, then the verdict
            yield Row(name, f"{type(exception).__name__} {str(exception)[:200]}", ok=False)
    yield Row("page tables: variants compiled over all lengths, widths and node counts", str(compiled))


def timed_rows() -> Iterator[tuple[str, float, float | None, float | None]]:
    """(what, us, us of its SWA part, us of plain torch)."""
    for what, us, swa in page_table_rows():
        yield what, us, swa, None
    for what, us, reference in other_rows():
        yield what, us, None, reference


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[device_option]).parse_args()
    require_device()
    torch.manual_seed(0)
    results = ResultTable(machine())
    results.add(check_rows())
    if ON_CPU or results.failed:
        return results.finish()
    print(f"batch {BATCH}, {NODES} nodes, {RETAIN} keys kept in SWA space; us per call, median of CUDA-graph replays")
    print(table_head("call", "us", "SWA part", "torch"))
    slowest = 0.0
    for what, us, swa, reference in timed_rows():
        print(table_row([what, f"{us:.2f}", *("" if x is None else f"{x:.2f}" for x in (swa, reference))]))
        slowest = slowest if swa is None else max(slowest, us)
    if slowest >= LIMIT_US:
        print(f"build_page_tables: {slowest:.2f} us, at most {LIMIT_US} wanted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
