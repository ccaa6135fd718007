"""How a round opens and closes: kernels against plain torch, cases to check by eye, and how few launches there are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from cpu_capture import around_launches, record
from kv_rig import make_allocator
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import DraftTree, Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention.backend import TorchBackend
from specdec.attention.trees.tree import force_tokens
from specdec.gpu.stage_clock import StageClock
from specdec.kvcache.cache import KVCache
from specdec.kvcache.table import Move, RequestTable, Rows
from specdec.runtime.rounds.closing import VerifiedRound, closing, reference_closing
from specdec.runtime.rounds.decode_round import DecodeRound
from specdec.runtime.rounds.opening import opening, reference_opening
from specdec.runtime.rounds.result import DraftShape, RoundResult, RoundShape, empty_result
from specdec.sampling.sampling_table import FLOAT_COLUMNS, INT_COLUMNS, SamplerFeatures, SamplingTable

from marks import deep, slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOOKAHEAD = 8
pytestmark = pytest.mark.usefixtures("kernels_run")
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels are compiled here; see make gpu-test")


def long(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


# opening


def test_an_opening_by_eye(poison_empty: None) -> None:
    """Rows 2, 0, and 3, which is for padding: 4, 1 and 0 tokens committed, the root after them."""
    params = [
        SamplingParams(temperature=0.5, top_k=7),
        SamplingParams(),
        SamplingParams(top_p=0.25, presence_penalty=1),
    ]
    table = SamplingTable(4, DEVICE)
    for row, each in enumerate(params):
        table.load(np.array([row]), [(each, -row)])
    text = long([[10, 11, 12, 13, 14, 15], [0] * 6, [30, 31, 32, 33, 34, 35], [0] * 6])
    for function in (opening, reference_opening):
        opened = function(long([2, 0, 3]), long([1, 9, 4, 0]), text, long([2, 9, 0, 0]), table.cells.tensor, depth=2)
        assert opened.committed_len.tolist() == [4, 1, 0] and opened.history_len.tolist() == [5, 2, 1]
        assert opened.root.tolist() == [34, 11, 0]
        assert opened.max_path.tolist() == [1, 3, 1]
        assert opened.level_pos.tolist() == [[4, 1, 0], [5, 2, 1], [6, 3, 2]]
        assert opened.chain_pos.tolist() == [[4, 5], [1, 2], [0, 1]]
        assert opened.drawn_pos.tolist() == [[5, 6], [2, 3], [1, 2]]
        params = opened.params
        column = {name: params.column(name).tolist() for name in (*INT_COLUMNS, *FLOAT_COLUMNS)}
        assert column["seed"] == [-2, 0, 0] and column["top_k"] == [0, 7, 0]
        assert column["temperature"] == [0, 0.5, 0] and column["top_p"] == [0.25, 1, 0]
        assert column["repetition_penalty"] == [1, 1, 0] and column["presence_penalty"] == [1, 0, 0]
        assert all(vector.is_contiguous() for vector in (*opened[:-1], *opened.params))


@pytest.mark.parametrize(("seats", "depth"), [(1, 1), (3, 5), (33, 2), (70, 16)])
def test_an_opening_is_that_of_torch(seats: int, depth: int, poison_empty: None) -> None:
    torch.manual_seed(seats)
    cells = torch.randint(-(1 << 62), 1 << 62, (80, len(INT_COLUMNS) + len(FLOAT_COLUMNS)), device=DEVICE)
    cells[:, len(INT_COLUMNS) :] = (
        torch.randn((80, len(FLOAT_COLUMNS)), dtype=torch.float64, device=DEVICE).exp().view(torch.int64)
    )
    committed, most = (torch.randint(0, 40, (80,), device=DEVICE) for _ in range(2))
    given = (torch.randperm(80, device=DEVICE)[:seats], committed, torch.randint(0, 99, (80, 41), device=DEVICE), most)
    got, want = (function(*given, cells, depth) for function in (opening, reference_opening))
    for name in got._fields:
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=0)


# closing


class Scene:
    """Rows of which `lengths` tokens are committed, and what a closing changes there."""

    def __init__(self, lengths: list[int], page_size: int = 1, lookahead: int = LOOKAHEAD) -> None:
        allocator = make_allocator(600, page_size=page_size, device=DEVICE)
        self.table = RequestTable(allocator, max_requests=len(lengths), max_len=40, lookahead=lookahead)
        self.cache = KVCache(allocator, self.table, TorchBackend())
        self.moved: list[Move] = []
        self.cache.move = self.moved.append  # type: ignore[method-assign]
        self.rows = [self.table.open_row() for _ in lengths]
        for row, length in zip(self.rows, lengths, strict=True):
            self.table.ensure_slots(row, length + lookahead)
            self.table.committed_len[row] = length
        width = self.table.slots.host.shape[1]
        self.tokens = (torch.arange(width, device=DEVICE) - 99).repeat(len(lengths) + 1, 1)

    def close(
        self, kernel: bool, seats: list[int], tree: DraftTree, drawn: torch.Tensor, most: list[int], **sizes: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """sizes: width and depth. -> and what is packed."""
        rows = Rows(long(seats), 40)
        packed = torch.empty(len(seats), 1 + sum(sizes.values()), dtype=torch.int64, device=DEVICE)
        start = self.table.committed_len.tensor[rows.index]
        function = closing if kernel else reference_closing
        verified = VerifiedRound(tree, drawn, long(most), rows, start, **sizes)
        *closed, move = function(verified, self.table, self.tokens, packed)
        if move is not None:
            self.cache.move(move)
        return tuple(closed), packed

    def state(self) -> list[list[Any]]:
        """Slots, committed lengths, tokens, and the slots that were moved."""
        there = [self.table.slots.tensor, self.table.committed_len.tensor, self.tokens]
        return [*(x.tolist() for x in there), [[x.tolist() for x in move] for move in self.moved]]


@pytest.mark.parametrize("kernel", [True, False])
def test_chains_by_eye(kernel: bool, poison_empty: None) -> None:
    """Cases of 3 drafts: all are right; two are, but one may be accepted; none is; a seat of padding."""
    scene = Scene([3, 1, 0])
    tree = DraftTree.chain(long([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [0, 0, 0, 0]]))
    drawn = long([[6, 7, 8, 9], [6, 7, 1, 2], [1, 2, 3, 4], [0, 0, 0, 0]])
    before = scene.state()[0]
    closed, packed = scene.close(kernel, [0, 2, 1, 3], tree, drawn, [4, 2, 4, 4], depth=4, width=4)
    assert [x.tolist() for x in closed] == [[4, 2, 1, 4], [9, 7, 1, 0]]
    assert packed[:3].tolist() == [
        [4, 0, 1, 2, 3, 6, 7, 8, 9],
        [2, 0, 1, 2, 0, 6, 7, 1, 6],
        [1, 0, 0, 0, 0, 1, 1, 1, 1],
    ]
    slots, committed, tokens, moved = scene.state()
    assert slots == before and not moved and committed == [3 + 4, 1 + 1, 0 + 2, 0]
    assert tokens[0][2:9] == [-97, -96, 6, 7, 8, 9, -91]  # root at 3, emitted after it
    assert tokens[2][:4] == [-99, 6, 7, -96] and tokens[1][1:4] == [-98, 1, -96]
    assert tokens[3] == [x - 99 for x in range(len(tokens[3]))]


@pytest.mark.parametrize("kernel", [True, False])
def test_a_tree_by_eye(kernel: bool, poison_empty: None) -> None:
    """Children 1 and 2 of the root, 3 and 4 of 2: the path 0 2 4 comes first, then 1 and 3 in their order."""
    tree = DraftTree.from_parents(long([[5, 6, 7, 8, 9]]), long([[-1, 0, 0, 2, 2]]))
    scene, drawn = Scene([2]), long([[7, 0, 9, 0, 3]])
    slots = scene.state()[0][0]
    closed, packed = scene.close(kernel, [0], tree, drawn, [9], depth=3, width=6)
    assert packed.tolist() == [[3, 0, 2, 4, 0, 0, 0, 7, 9, 3]]
    assert scene.state()[0][0] == [*slots[:2], *(slots[2 + n] for n in (0, 2, 4, 1, 3)), *slots[7:]]
    assert not scene.moved and scene.state()[1] == [5, 0]

    scene = Scene([2])  # the same where no more than two may be accepted
    closed, packed = scene.close(kernel, [0], tree, drawn, [2], depth=3, width=5)
    assert packed.tolist() == [[2, 0, 2, 4, 0, 0, 7, 9, 3]] and closed[1].tolist() == [9]
    assert scene.state()[0][0] == [*slots[:2], *(slots[2 + n] for n in (0, 2, 1, 3, 4)), *slots[7:]]


@pytest.mark.parametrize("kernel", [True, False])
def test_a_tree_in_larger_pages_by_eye(kernel: bool, poison_empty: None) -> None:
    """Slots stay, and the K/V of nodes 2 and 4 are moved to the places of 1 and 2; of padding nothing is."""
    tree = DraftTree.from_parents(long([[5, 6, 7, 8, 9]] * 2), long([[-1, 0, 0, 2, 2]] * 2))
    scene = Scene([2], page_size=4)
    before = scene.state()[0]
    scene.close(kernel, [0, 1], tree, long([[7, 0, 9, 0, 3]] * 2), [9, 9], depth=3, width=5)
    slots = before[0]
    after, _, _, [[source, destination]] = scene.state()
    assert after == before
    assert source == [0, slots[4], slots[6], 0, 0, *[0] * 5]
    assert destination == [0, slots[3], slots[4], 0, 0, *[0] * 5]


@pytest.mark.parametrize(
    ("num_nodes", "page_size"), [(1, 1), (2, 4), (5, 1), (8, 4), deep(17, 1), deep(63, 4), slow(64, 1), slow(100, 4)]
)
def test_a_closing_is_that_of_torch(num_nodes: int, page_size: int, poison_empty: None) -> None:
    """Random trees of three tokens, some with tokens forced in the place of drafts, next to seats of padding; and a
    chain that is accepted to its end."""
    generator, widest = torch.Generator().manual_seed(num_nodes), max(num_nodes, 8)

    def random(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator).to(DEVICE)

    chain = DraftTree.chain(torch.zeros((4, num_nodes), dtype=torch.int64, device=DEVICE))
    rounds = [([0, 1, 2, 3], chain, chain.tokens, [num_nodes] * 4)]
    for seats, most in (([3, 4, 0, 4, 2], [num_nodes] * 5), ([1, 2, 0, 3], [1, 2, 3, 4])):
        batch = len(seats)
        parents = torch.cat(
            [random(99, batch, 1) % max(n, 1) if n else long([[-1]] * batch) for n in range(num_nodes)], 1
        )
        tree = DraftTree.from_parents(random(3, batch, num_nodes), parents)
        if batch == 4:
            tree = force_tokens(tree, random(3, batch, 15), random(8, batch), widest)
        # equal siblings: the walks take another each, so they are told apart
        rounds.append((seats, distinct(tree), random(3, batch, tree.num_nodes), most))
    for seats, tree, drawn, most in rounds:
        scenes = [Scene([0, 1, 7, 30], page_size, lookahead=widest) for _ in "kt"]
        (got, mine), (want, other) = (
            scene.close(kernel, seats, tree, drawn, most, depth=widest, width=widest)
            for scene, kernel in zip(scenes, (True, False), strict=True)
        )
        for one, wanted in zip((*got, mine), (*want, other), strict=True):
            torch.testing.assert_close(one, wanted, rtol=0, atol=0)
        assert scenes[0].state() == scenes[1].state()
        assert tree is not chain or got[0].tolist() == most


def distinct(tree: DraftTree) -> DraftTree:
    """With siblings of different tokens: a node whose older sibling has its token is a blank."""
    older = torch.tril(torch.ones(tree.ancestors.shape[1:], dtype=torch.bool, device=DEVICE), -1)
    alike = (tree.tokens[:, :, None] == tree.tokens[:, None]) & (tree.parents[:, :, None] == tree.parents[:, None])
    tree.tokens[(alike & older).any(-1)] = -1
    return tree


def test_the_time_stamps_of_a_round_follow_its_rows() -> None:
    shape = RoundShape(2, 9, DraftShape(2, 1, 3), SamplerFeatures.from_params([]), None)
    (packed, rows, stamps), clock = empty_result(shape, 3, DEVICE), StageClock(DEVICE)
    packed.fill_(-1)
    rows.copy_(torch.arange(14, device=DEVICE).view(2, 7))
    clock.start("draft")
    clock.mark("verify")
    assert clock.stop(stamps) is stamps
    numbers = packed.tolist()
    assert numbers[:14] == [*range(14)] and 0 < numbers[14] <= numbers[15] <= numbers[16] and len(numbers) == 17


def test_every_number_of_the_requests_that_still_have_their_row_is_selected() -> None:
    line = np.arange(3)
    result = RoundResult(line, line[:, None], line[:, None], [[0], [1], [2]], line, {}, line)
    kept = result.select_requests([2, 0])
    of_requests = kept.length, kept.path, kept.tokens, kept.logprobs, kept.draft_depth, kept.forced
    assert [np.ravel(numbers).tolist() for numbers in of_requests] == [[2, 0]] * 6


def test_a_replay_on_a_tape_reads_the_clock_anew() -> None:
    """Regression: replays repeated the time of the capture, so drafts seemed to take less than no time."""
    clock, out = StageClock(torch.device("cpu")), torch.zeros(2, dtype=torch.int64, device="cpu")
    replay, stamps = record(lambda: (clock.start("draft"), clock.stop(out))[1])
    assert out.tolist() == [0, 0]  # a capture runs nothing
    replay()
    last = stamps.tolist()
    replay()
    assert 0 < last[0] <= last[1] < stamps[0] <= stamps[1]


# whole rounds


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines made from now on open, draw and close by kernels, in the interpreter."""
    monkeypatch.setattr("specdec.runtime.rounds.device_state.runs_on_kernels", lambda backend, device: True)


SMALL = {"vocab_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
SMALL |= {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}


class Launches(TorchDispatchMode):
    """Names of what a GPU would be asked to run: operators that compute, and kernels (with a *)."""

    FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "alias", "lift_fresh", "_unsafe_view")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            out = func.decompose(*args, **kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
            name = func._schema.name.removeprefix("aten::")
            is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
            if not is_view and name not in self.FREE:
                self.names.append(name)
        return out

    def unseen(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function: its name is noted, and nothing that it runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            kept = len(self.names)
            out = function(*args, **kwargs)
            del self.names[kept:]
            return out

        return run

    @contextmanager
    def noted(self) -> Iterator[None]:
        def noted(launch: Callable[[], None], args: Any, kwargs: Any, executor: Any) -> None:
            self.names.append(f"*{executor.fn.__name__}")
            launch()

        with around_launches(noted), self:
            yield


@interpreted
def test_few_launches_stand_around_the_models_of_a_greedy_round(
    on_kernels, make_target, make_assistant, monkeypatch
) -> None:
    """fill_ is the clock's stamp, which is a kernel on a GPU."""
    model = make_target("gemma4-e2b", **SMALL)
    config = EngineConfig(attention="triton", max_batch_size=2, max_model_len=64, fused=True)
    engine = Engine.from_pretrained(model, make_assistant(model), spec=SpecConfig(2), config=config)
    DraftTree.chain(torch.zeros((2, 3), dtype=torch.int64))  # a shape's first, which makes its constants
    launches, run = Launches(), DecodeRound.run
    target, drafter = engine.target, engine.state.worker.drafter
    target.run, target.head = launches.unseen("[forward]", target.run), launches.unseen("[head]", target.head)
    drafter.step, drafter.draw = launches.unseen("[step]", drafter.step), launches.unseen("[draw]", drafter.draw)

    rounds = []

    def noted(decode: DecodeRound) -> torch.Tensor:
        launches.names.clear()
        with launches.noted():
            packed = run(decode)
        rounds.append([*launches.names])
        return packed

    monkeypatch.setattr(DecodeRound, "run", noted)
    with engine:
        engine.submit_many([[5, 9], [7]], SamplingParams(max_new_tokens=6, ignore_eos=True))
        while not rounds:
            engine.step()
    sampling = ["*scan_kernel", "*floor_kernel", "*collect_kernel", "*choose_kernel", "*choose_kernel"]
    assert rounds[0] == [
        *("fill_", "*_opening_kernel", "*_page_tables_kernel", "fill_"),
        *("index", "*_own_keys_kernel", "*_own_keys_kernel"),
        *["[step]", "[draw]"] * 2,
        *("cat", "fill_", "*_own_keys_kernel", "*_own_keys_kernel"),
        *("[forward]", "[head]", "fill_", *sampling),
        *("*_closing_kernel", "*_keep_last_kernel", "fill_", "copy_"),  # a stamp brings the others
    ]
