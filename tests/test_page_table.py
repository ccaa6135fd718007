"""Page tables and write locations: literal cases, and equality with the reference on real tables."""

import numpy as np
import pytest
import torch
from kv_rig import SWA, KVRig, layer_spec, make_allocator

from specdec.attention.kernels import page_table as page_table_module
from specdec.attention.kernels.page_table import PageTables, build_page_tables, reference_build_page_tables
from specdec.kvcache.layout import PRIMARY, ByGroup, GroupId, KVLayout
from specdec.kvcache.table import RequestTable, Rows

from marks import usual_cases

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_table_module, "BLOCK", 8)  # several programs for small tables


def long(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def filled(page_size: int, windows: list[int], lengths: list[int], lookahead: int) -> tuple[KVRig, np.ndarray]:
    """Requests of these lengths, interleaved in the pools and evicted as the engine does, in shuffled rows."""
    pages = sum(-(-(n + lookahead) // page_size) + 1 for n in lengths)
    table = KVRig(
        KVLayout(tuple(layer_spec(layer, window) for layer, window in enumerate((None, *windows)))),
        pages=pages,
        page_size=page_size,
        max_requests=len(lengths) + 1,
        max_len=max(lengths) + 1,
        lookahead=lookahead,
        device=DEVICE,
    )
    rows = [table.open_row() for _ in lengths]
    for done in range(0, max(lengths), 5):  # in turns, so that pages interleave
        for row, length in zip(rows, lengths, strict=True):
            step = np.array([min(5, max(length - done, 0))])
            table.ensure_slots(row, int(table.committed_len.host[row] + step[0]) + lookahead)
            table.commit(np.array([row]), step)
            table.evict_unseen(np.array([row]))
    for row in rows:
        table.ensure_slots(row, int(table.committed_len.host[row]) + lookahead)
    table.check()
    return table, np.array(rows[::-1])


def tables_of(table: KVRig, rows: np.ndarray, num_nodes: int, full_width: int) -> PageTables:
    page_size = table.allocator.page_size
    index, committed_len = (torch.from_numpy(x).to(DEVICE) for x in (rows, table.committed_len.host[rows]))
    arguments = table, Rows(index, full_width * page_size), committed_len, num_nodes
    length = np.where(rows == table.padding_row, 0, table.committed_len.host[rows])
    builders = build_page_tables, reference_build_page_tables
    got, want = (held_pages(build(*arguments), length, page_size) for build in builders)
    for name, one, other in zip(PageTables._fields[:3], got, want, strict=False):
        for mine, reference in zip(one, other, strict=True):
            torch.testing.assert_close(mine, reference, msg=lambda text, name=name: f"{name}: {text}")
    return got


def held_pages(tables: PageTables, length: np.ndarray, page_size: int) -> PageTables:
    """With 0 past each prefix, where pages are undefined."""
    end = torch.from_numpy(length).to(DEVICE)[:, None]

    def held(group: GroupId) -> torch.Tensor:
        pages = tables.tables[group]
        first = tables.start[group][:, None] + torch.arange(pages.shape[1], device=DEVICE) * page_size
        return torch.where(first < end, pages, 0)

    return tables._replace(tables=ByGroup(tuple(held(group) for group, _ in tables.tables.items())))


def test_page_tables_by_eye():
    """Pages of 2: 5 tokens in pages 3, 1, 4 (and 2 for drafts), in the window pages 6, 5, 7 after an evicted 3."""
    allocator = make_allocator(4, [1], 7, page_size=2, device=DEVICE)
    table = RequestTable(allocator, max_requests=1, max_len=5, lookahead=3, extra_keys=2)
    table.slots.tensor.copy_(long([[6, 7, 2, 3, 8, 9, 4, 5], [9] * 8]))
    allocator.maps.tensor.copy_(long([[0] * 10, [0, 0, 12, 13, 14, 15, 0, 0, 10, 11]]))
    rows, lengths = Rows(long([0, 1]), 8), long([5, 3])  # row 1 is for padding: its slots and length are ignored
    got = build_page_tables(table, rows, lengths, 3)
    assert got.tables[PRIMARY][0, :3].tolist() == [3, 1, 4]  # the rest is not written: no prefix reaches it
    assert got.start[SWA].tolist() == [2, 0]
    assert got.tables[SWA][0].tolist() == [6, 5]
    assert got.write[PRIMARY].tolist() == [[9, 4, 5], [0, 0, 0]]
    assert got.write[SWA].tolist() == [[11, 14, 15], [0, 0, 0]]


@usual_cases(
    *("1-[]", "1-[1, 3, 9, 60]", "3-[9]", "3-[3, 9]", "4-[1]", "4-[60]", "4-[1, 3, 9, 60]", "16-[3]", "16-[60]"),
    "16-[3, 9]",
)
@pytest.mark.parametrize("windows", [[], [1], [3], [9], [60], [3, 9], [1, 3, 9, 60]], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_page_tables_are_those_of_the_reference(page_size: int, windows: list[int]):
    num_nodes, lengths = 5, [0, 1, 7, 23, 50]
    table, rows = filled(page_size, windows, lengths, num_nodes)
    got = tables_of(table, rows, num_nodes, -(-max(lengths) // page_size) + 3)
    for group, pages in got.tables.items():
        first = got.start[group][:, None] + torch.arange(pages.shape[1], device=DEVICE) * page_size
        held = first < torch.from_numpy(table.committed_len.host[rows]).to(DEVICE)[:, None]
        assert (pages[held] > 0).all()  # nothing in the table was evicted
        assert not pages[~held].any()


def test_widths_may_be_anything():
    """No width at all (a step without full layers), one narrower than a prefix, more nodes than one program takes, rows
    that end in the drafts."""
    table, rows = filled(1, [4], [3, 20], 19)
    got = tables_of(table, rows, 19, 0)
    assert got.tables[PRIMARY].shape == (2, 0) and got.write[PRIMARY].shape == (2, 19)
    assert tables_of(table, rows, 19, 9).tables[PRIMARY].shape == (2, 9)  # and the other row's pages are its own
    past_the_row = [[0] * 7] * 2  # null slots
    assert all(slots[:, -7:].tolist() == past_the_row for slots in tables_of(table, rows, 30, 64).write)


def test_programs_take_blocks_of_a_long_prefix_in_turn(monkeypatch: pytest.MonkeyPatch):
    """Blocks of 16 pages, 4 programs a row: the third of 150 tokens comes round twice, and no block past its end."""
    monkeypatch.setattr(page_table_module, "BLOCK", 16)
    monkeypatch.setattr(page_table_module, "TARGET_PROGRAMS", 0)
    table, rows = filled(1, [4], [0, 64, 150], 2)
    got = tables_of(table, rows, 2, 190)
    assert (got.tables[PRIMARY] > 0).sum(dim=1).tolist() == [150, 64, 0]


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_padding_row_is_null_slots(page_size: int):
    table, rows = filled(page_size, [6], [9, 30], 4)
    table.committed_len[table.padding_row] = 17  # whatever a padded request carries
    got = tables_of(table, np.append(rows, table.padding_row), 4, 12)
    for part in (*got.tables, *got.write, got.start[SWA, :, None]):
        assert not part[-1].any()
        assert part[:2].any()
