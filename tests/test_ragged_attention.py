"""Prompts in one row: where tokens lie, what they see, and the kernel in Triton's interpreter against an oracle.

Bits are compared with those that plain decoding gives the same token, by `tree_attention`, and with the same token in
other company. Engines whose prompts are packed give the tokens and log-probabilities of lone prompts, in every family.
"""

import random
from typing import Any

import pytest
import torch
from attention_scene import rounded

from specdec import SamplingParams
from specdec.attention.dense import attend_alone, attend_together, masked_runs, runs_attention
from specdec.attention.kernels.own_keys import PathKeys, own_keys
from specdec.attention.kernels.page_table import PageTable
from specdec.attention.kernels.ragged_attention import RaggedTiles, choose_ragged, ragged_attention, search_width
from specdec.attention.kernels.tree_attention import KeySplit, RowTiles, tree_attention
from specdec.attention.plan import Pack, RunSlots
from specdec.runtime.rounds.captured_prompts import MAX_TOKENS
from specdec.runtime.rounds.prompt_sizes import token_buckets

from dense_oracle import attend
from marks import deep, deep_cases, each_value, examples, pairs
from tiny_models import FAMILIES

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
ANY_ORDER, IN_ORDER = RaggedTiles(16, 16, 4, 1), RaggedTiles(16, 16, 4, 1, 32)
CUT = {"cut": KeySplit(16, 32), "tiles": RowTiles(16, 4, 1)}  # of plain decoding, the same
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty")


def pack_of(starts: list[int], lengths: list[int], num_places: int, rows: list[int] | None = None) -> Pack:
    numbers = (rows or list(range(len(starts))), starts, lengths)
    return Pack.from_lengths(*(torch.tensor(x, device=DEVICE) for x in numbers), num_places)


class Case:
    """Requests with keys at random slots, and queries for some of their newest tokens. begin: see `RunSlots`."""

    def __init__(
        self,
        starts: list[int],
        lengths: list[int],
        spare: int,
        begin: list[int] | None,
        seed: int,
        v_dim: int = HEAD_DIM,
    ) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.starts, self.lengths = starts, lengths
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        width, first = max(ends) + 3, begin or [0] * len(starts)
        slots = 1 + torch.randperm(len(starts) * width, generator=noise).view(len(starts), width)
        shapes = [(len(starts) * width + 1, KV_HEADS, size) for size in (HEAD_DIM, v_dim)]
        self.k, self.v = (torch.full(shape, torch.nan).to(DEVICE) for shape in shapes)
        for number, end in enumerate(ends):
            held = slots[number, : end - first[number]].to(DEVICE)
            self.k[held], self.v[held] = (
                torch.randn(len(held), *shape[1:], generator=noise).to(DEVICE) for shape in shapes
            )
        self.pack = pack_of(starts, lengths, sum(lengths) + spare)
        self.q = torch.randn(1, HEADS, sum(lengths) + spare, HEAD_DIM, generator=noise).to(DEVICE)
        begins = None if begin is None else torch.tensor(begin, device=DEVICE)
        self.lines = RunSlots(slots.to(DEVICE), torch.arange(len(starts), device=DEVICE), begins)

    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.pack, self.lines

    def expected(
        self, window: int | None, softcap: float | None, sinks: torch.Tensor | None, first_key: int = 0
    ) -> torch.Tensor:
        out = torch.zeros(1, self.q.shape[2], HEADS, self.v.shape[2], dtype=torch.float64)
        place = 0
        for number, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            first = 0 if self.lines.begin is None else int(self.lines.begin[number])
            for q in range(start, start + length):
                seen = [p for p in range(first, q + 1) if window is None or q - p < window]
                seen = [p for p in seen if p >= first_key or p == q]
                slots = self.lines.slots[number, torch.tensor(seen) - first].cpu()
                keys, values = (pool[slots] for pool in (self.k.cpu(), self.v.cpu()))
                logits = None if sinks is None else sinks.cpu()
                query = self.q[0, :, place].cpu()
                out[0, place] = attend(query, keys, values, scaling=0.3, softcap=softcap, sinks=logits)
                place += 1
        return out


def test_where_tokens_of_a_pack_lie() -> None:
    """The example of `attention/plan.py`."""
    pack = pack_of([3, 0, 9], [5, 3, 1], 10, rows=[4, 2, 7])
    assert pack.cu_len.tolist() == [0, 5, 8, 9]
    assert pack.run_of.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert pack.positions.tolist() == [3, 4, 5, 6, 7, 0, 1, 2, 9, 0]
    assert pack.exists.tolist() == [True] * 9 + [False]
    assert pack.last.tolist() == [4, 7, 8]
    last = pack.last_tokens()
    assert (last.positions.tolist(), last.run_of.tolist(), last.exists.tolist()) == ([7, 2, 9], [0, 1, 2], [True] * 3)


def test_empty_runs_take_no_place() -> None:
    pack = pack_of([3, 8, 0, 0], [2, 0, 1, 0], 4)
    assert pack.run_of.tolist() == [0, 0, 2, 3]
    assert pack.positions.tolist() == [3, 4, 0, 0]
    assert pack.last_tokens().exists.tolist() == [True, False, True, False]


def test_numbers_of_tokens_are_few() -> None:
    assert token_buckets(200) == [16, 24, 32, 48, 64, 96, 128, 192]
    assert token_buckets(5000)[-5:] == [2048, 2560, 3072, 3584, 4096]
    assert len(token_buckets(MAX_TOKENS)) * 2 <= 46  # with and without the last tokens' head


SEEN = {
    # window, begin, softcap, sinks, first key
    "full": (None, None, None, False, 0),
    "window-cap-sinks": (9, None, 3.0, True, 0),
    "window-lines": (9, [8, 0, 16, 0], None, False, 0),
    "full-cap-sinks": (None, None, 2.0, True, 0),
    "first-key": (None, None, None, False, 7),
    "window-first-key": (9, None, None, True, 7),
}


@pytest.mark.parametrize(("name", "exact", "v_dim"), each_value(pairs(list(SEEN), [False, True], [HEAD_DIM, 20])))
def test_the_kernel_against_the_definition(name: str, exact: bool, v_dim: int) -> None:
    window, begin, softcap, sinks, first_key = SEEN[name]
    case = Case([17, 0, 40, 3], [11, 1, 0, 20], 5, begin, 0, v_dim)
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE) if sinks else None
    options: dict[str, Any] = {"scaling": 0.3, "softcap": softcap, "sinks": logits}
    options |= {"window": window, "first_key": first_key}
    got = ragged_attention(*case.arguments(), **options, exact=exact, tiles=IN_ORDER if exact else ANY_ORDER)
    other = (IN_ORDER if exact else ANY_ORDER)._replace(value_parts=2)
    assert torch.equal(ragged_attention(*case.arguments(), **options, exact=exact, tiles=other), got)
    want = case.expected(window, softcap, logits, first_key)
    torch.testing.assert_close(got.cpu().double(), want, rtol=2e-5, atol=2e-5)
    del options["window"], options["first_key"]
    forms = [
        *(runs_attention(make, case.pack, case.lines, window, first_key) for make in (attend_together, attend_alone)),
        masked_runs(case.pack, case.lines, window, first_key),
    ]
    for form in forms:
        plain = form(case.q, case.k, case.v, **options)
        torch.testing.assert_close(plain.cpu().double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("exact", "tiles"),
    [(False, ANY_ORDER), (False, ANY_ORDER._replace(value_parts=2)), (True, IN_ORDER)],
    ids=["any-order", "any-order-in-parts", "in-order"],
)
def test_keys_and_values_of_8_bits_are_attended_to_as_they_are_read_back(exact: bool, tiles: RaggedTiles) -> None:
    case = Case([17, 0, 3], [11, 1, 20], 5, None, 0, 40)
    k, v = rounded(case.k), rounded(case.v)
    options: dict[str, Any] = {"scaling": 0.3, "exact": exact, "tiles": tiles}
    got = ragged_attention(case.q, k, v, case.pack, case.lines, **options)
    want = ragged_attention(case.q, k.read(), v.read(), case.pack, case.lines, **options)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def tiles_for(
    num_runs: int, num_tokens: int, channels: int = 512, bytes_: int = 2, *, exact: bool = False, values: int = 0
) -> RaggedTiles:
    """Tiles for 8 heads over 2, of 132 multiprocessors."""
    sizes = num_runs, num_tokens, 4, 2, channels, values or channels, bytes_
    return choose_ragged(*sizes, torch.device("cpu"), exact=exact)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.attention.kernels.ragged_attention.device_limits", lambda _: (132, 227 << 10))


@pytest.mark.usefixtures("hopper")
def test_long_prompts_over_512_channels_get_tall_tiles() -> None:
    """Programs of 128 rows take half of the value channels each. Short runs would leave such tiles part empty."""
    assert tiles_for(1, 2048) == tiles_for(64, 2048) == RaggedTiles(128, 32, 8, 3, waves=1.1, value_parts=2)
    for small in (tiles_for(1, 255), tiles_for(65, 2048), tiles_for(1, 2048, bytes_=4)):
        assert small.value_parts == 1 and small.block_m <= 64
    assert tiles_for(1, 2048, 256) == RaggedTiles(128, 64, 8, 3)


@pytest.mark.usefixtures("hopper")
def test_tiles_of_prompts_in_order() -> None:
    """Warps that share their rows would compute one product of queries and keys, so 64 rows have four."""

    def of(*sizes: int, values: int = 0) -> tuple[int, ...]:
        tiles = tiles_for(*sizes, exact=True, values=values)
        return *tiles[:4], tiles.split_len, tiles.value_parts

    assert of(1, 64, 128) == (32, 64, 4, 3, 256, 1)  # 256 rows
    assert of(1, 2048, 128) == (128, 64, 8, 5, 256, 1)
    assert of(500, 2048, 128) == (64, 64, 4, 3, 256, 1)  # short runs
    assert of(1, 2048, 64) == (64, 64, 4, 2, 256, 1)
    assert of(1, 2048, 256) == (128, 32, 8, 5, 128, 1)
    assert of(500, 2048, 256) == (64, 32, 4, 3, 128, 1)
    assert of(1, 512, 256) == (64, 32, 4, 3, 128, 2)  # few programs otherwise
    assert of(1, 2048, 512) == (128, 32, 8, 3, 256, 2)
    assert of(1, 512, 512) == (128, 32, 8, 3, 256, 4)
    assert of(500, 2048, 512) == (32, 32, 4, 3, 256, 1)
    assert of(1, 2048, 256, values=128) == (128, 32, 8, 5, 128, 1)
    assert of(1, 2048, 1024, values=512)[0] == 32  # queries of 128 rows do not fit


def test_a_short_run_after_a_long_prefix_is_cut_into_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program would walk over all of it while the device idles."""
    monkeypatch.setattr("specdec.attention.kernels.ragged_attention.choose_splits", lambda *_: 3)
    case = Case([190, 5], [3, 2], 2, None, 1)  # 193 keys are three splits of 80, 80 and 33
    for sinks in (None, torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE)):
        got = ragged_attention(*case.arguments(), scaling=0.3, sinks=sinks, tiles=ANY_ORDER)
        torch.testing.assert_close(got.cpu().double(), case.expected(None, None, sinks), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_a_window_that_ends_within_a_tile_of_tokens(exact: bool) -> None:
    """Its tile of keys is masked: the first token sees the key at which a split begins, and the last does not. The
    third line begins after what its window would see."""
    case = Case([65, 69, 20], [8, 8, 8], 0, [0, 0, 8], 4)
    got = ragged_attention(
        *case.arguments(), scaling=0.3, window=40, exact=exact, tiles=IN_ORDER if exact else ANY_ORDER
    )
    torch.testing.assert_close(got.cpu().double(), case.expected(40, None, None), rtol=2e-5, atol=2e-5)


def test_places_of_padding_have_a_run_in_the_search() -> None:
    assert [search_width(runs) for runs in (1, 63, 64, 255, 256)] == [64, 64, 256, 256, 1024]


def test_keys_outside_of_a_window_are_not_visited() -> None:
    """Nor are keys past a tile: they hold NaN, and a product with a weight of 0 would show it."""
    case = Case([100], [4], 0, None, 2)
    hidden = case.lines.slots[0, :80]
    case.k[hidden] = case.v[hidden] = torch.nan
    for exact in (False, True):
        tiles = IN_ORDER if exact else ANY_ORDER
        got = ragged_attention(*case.arguments(), scaling=0.3, window=9, exact=exact, tiles=tiles)
        assert got.isfinite().all()


@deep_cases("9-0", "None-20")
@pytest.mark.parametrize(("window", "first_key"), [(None, 0), (9, 0), (None, 20)])
def test_a_token_has_the_bits_of_plain_decoding_in_any_company(window: int | None, first_key: int) -> None:
    case = Case([37, 0, 62], [9, 5, 1], 3, None, 3)
    options: dict[str, Any] = {"scaling": 0.3, "window": window, "first_key": first_key}
    together = ragged_attention(*case.arguments(), **options, exact=True, tiles=IN_ORDER)
    alone = case.pack._replace(
        rows=case.pack.rows[:1],
        start=case.pack.start[:1] + 4,
        length=case.pack.length[:1] - 4,
        cu_len=torch.tensor([0, 5], device=DEVICE),
        run_of=torch.zeros(5, dtype=torch.int64, device=DEVICE),
    )
    lines = case.lines._replace(line=case.lines.line[:1])
    tail = ragged_attention(case.q[:, :, 4:9], case.k, case.v, alone, lines, **options, exact=True, tiles=IN_ORDER)
    assert torch.equal(tail, together[:, 4:9])
    for place, run, position in ((3, 0, 40), (8, 0, 45), (12, 1, 3), (14, 2, 62)):
        committed, pages = torch.tensor([position], device=DEVICE), case.lines.slots[run, None, : position + 1]
        table = PageTable(pages, None, committed, 1)
        own = own_keys(table, case.lines.slots[run, None, position, None].contiguous())
        query, where = case.q[:, :, place, None], torch.tensor([[position]], device=DEVICE)
        path = PathKeys(table, own, where, None, window, first_key)
        decoded = tree_attention(query, case.k, case.v, path, scaling=0.3, **CUT)
        assert torch.equal(decoded[0, 0], together[0, place]), f"{position=}"


def test_random_packs_are_as_each_run_alone() -> None:
    draw = random.Random(0)
    for seed in range(examples(8, 20)):
        count = draw.randint(1, 6)
        starts, lengths = ([draw.randint(0, most) for _ in range(count)] for most in (90, 20))
        if not any(lengths):
            continue
        case = Case(starts, lengths, draw.randint(0, 9), None, seed)
        window = draw.choice([None, 7, 30])
        want = case.expected(window, None, None)
        for make in (attend_together, attend_alone):
            attend = runs_attention(make, case.pack, case.lines, window)
            got = attend(case.q, case.k, case.v, scaling=0.3)
            torch.testing.assert_close(got.cpu().double(), want, rtol=2e-5, atol=2e-5)


# engines


@pytest.mark.parametrize(
    "family", [family if family in ("gemma4-e2b", "gpt_oss") else deep(family) for family in FAMILIES]
)
def test_random_packs_are_as_lone_prompts(family, make_target, make_engine, random_prompt) -> None:
    """In float64, so that rounding hides nothing: a sum of float32 is apart by up to 1e-4 in another order."""
    draw = random.Random(family)
    model = make_target(family, fresh=True).double()  # others have the shared one after this
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped products have no float64
    sizes = {"max_model_len": 96, "prefix_cache": False}
    lone = make_engine(model, max_batch_size=1, prefill_chunk=64, **sizes)
    packed = make_engine(model, max_batch_size=6, prefill_chunk=draw.randint(3, 20), max_prefill_tokens=29, **sizes)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=0)
    for seed in range(examples(2, 20)):
        prompts = [
            random_prompt(draw.choice([1, 2, 7, 19, 33, 50]), seed=9 * seed + i) for i in range(draw.randint(2, 6))
        ]
        together = packed.generate(prompts, params)
        for prompt, out in zip(prompts, together, strict=True):
            [alone] = lone.generate([prompt], params)
            assert out.token_ids == alone.token_ids
            for one, other in zip(out.logprobs, alone.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
        packed.table.check()
