"""Draft trees: the walk that accepts a path of one, growing and describing them; literal trees, and properties against
a naive best-first search."""

import heapq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.attention.backend import TorchBackend, TritonBackend
from specdec.attention.trees.tree import DraftTree, reference_accept, tree_fields
from specdec.attention.trees.tree_builder import (
    Candidates,
    TreeBackend,
    TreeBuilder,
    reference_select_tree,
    select_tree,
)

from marks import deep_cases, examples, slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QUICK = settings(max_examples=examples(10, 40), deadline=None, derandomize=True, database=None)
INF, NAN = float("inf"), float("nan")
BACKENDS = [TorchBackend(), TritonBackend()]

pytestmark = pytest.mark.usefixtures("kernels_run")


def matrix(*rows: str) -> torch.Tensor:
    """ "TF FT" style rows of ancestors."""
    return torch.tensor([[letter == "T" for letter in row] for row in rows])[None]


def ids(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def worked() -> DraftTree:
    """The tree in the docstring of attention/trees/tree.py."""
    return DraftTree.from_parents(ids([[10, 11, 12, 13, 14]]), ids([[-1, 0, 0, 1, 3]]))


def test_worked_tree():
    tree = worked()
    assert tree.depth.tolist() == [[0, 1, 1, 2, 3]]
    assert torch.equal(tree.ancestors, matrix("TFFFF", "TTFFF", "TFTFF", "TTFTF", "TTFTT"))
    assert tree.num_nodes == 5
    tree.check()


def test_chain():
    tree = DraftTree.chain(ids([[5, 6, 7], [5, 5, 5]]))
    assert tree.parents.tolist() == [[-1, 0, 1]] * 2
    assert tree.depth.tolist() == [[0, 1, 2]] * 2
    assert torch.equal(tree.ancestors, matrix("TFF", "TTF", "TTT").expand(2, 3, 3))
    tree.check()


def test_chains_of_one_length_share_what_their_tokens_do_not_say():
    first, second = DraftTree.chain(ids([[5, 6, 7]])), DraftTree.chain(ids([[1, 2, 3], [4, 5, 6]]))
    for name in ("parents", "depth", "ancestors"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr(), name


def changed(**fields: torch.Tensor) -> DraftTree:
    tree = worked()
    names = ("tokens", "parents", "depth", "ancestors")
    return DraftTree(**{name: fields.get(name, getattr(tree, name)) for name in names})


def flipped(i: int, j: int) -> torch.Tensor:
    ancestors = worked().ancestors.clone()
    ancestors[0, i, j] ^= True
    return ancestors


FAULTS = {
    "root-with-parent": (changed(parents=ids([[0, 0, 0, 1, 3]])), "node 0 is not the root"),
    "root-with-depth": (changed(depth=ids([[1, 1, 1, 2, 3]])), "node 0 is not the root"),
    "parent-after": (changed(parents=ids([[-1, 0, 3, 1, 3]])), "a parent after its child"),
    "own-parent": (changed(parents=ids([[-1, 0, 2, 1, 3]])), "a parent after its child"),
    "two-roots": (changed(parents=ids([[-1, 0, -1, 1, 3]])), "a parent after its child"),
    "shape": (changed(parents=ids([[-1, 0, 0, 1]])), "shape"),
    "depth": (changed(depth=ids([[0, 1, 1, 2, 2]])), "depth disagrees with parents"),
    "missing-ancestor": (changed(ancestors=flipped(4, 1)), "ancestors disagree with parents"),
    "false-ancestor": (changed(ancestors=flipped(4, 2)), "ancestors disagree with parents"),
    "not-its-own-ancestor": (changed(ancestors=flipped(2, 2)), "ancestors disagree with parents"),
    "equal-siblings": (changed(tokens=ids([[10, 11, 11, 13, 14]])), "equal siblings"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds(fault: str):
    tree, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=message):
        tree.check()


# accept


@pytest.mark.parametrize(
    ("drawn", "path", "emitted"),
    [
        ([99, 99, 99, 99, 99], [0], [99]),
        ([11, 99, 99, 99, 99], [0, 1], [11, 99]),
        ([12, 13, 99, 99, 99], [0, 2], [12, 99]),  # node 2 is a leaf: what node 1 draws is of no account
        ([11, 13, 99, 99, 14], [0, 1, 3], [11, 13, 99]),
        ([11, 13, 99, 14, 77], [0, 1, 3, 4], [11, 13, 14, 77]),
        ([99, 13, 99, 14, 77], [0], [99]),  # a matching tail after a rejected node
        ([11, 99, 99, 14, 77], [0, 1], [11, 99]),
        ([10, 10, 10, 10, 10], [0], [10]),  # the root's own token is no draft
    ],
)
def test_accept_on_the_worked_tree(drawn: list[int], path: list[int], emitted: list[int]):
    accepted = reference_accept(worked(), ids([drawn]))
    length = len(path)
    assert accepted.length.tolist() == [length]
    assert accepted.path.tolist() == [path + [0] * (5 - length)]
    assert accepted.tokens[0, :length].tolist() == emitted


def test_equal_siblings_of_a_bad_draft_add_no_token():
    """Every tree gives the same output, also one that breaks the rule of distinct siblings."""
    tree = DraftTree.from_parents(ids([[10, 11, 11, 11, 12]]), ids([[-1, 0, 0, 0, 2]]))
    accepted = reference_accept(tree, ids([[11, 12, 12, 12, 77]]))
    assert accepted.length.tolist() == [3] and accepted.tokens[0, :3].tolist() == [11, 12, 77]


# growing and describing


def long(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def candidates(topk: int, levels: int, beams: list[list[int]]) -> list[int]:
    """Parents of all candidates, for the beam (numbers within its level) after each level."""
    parents, first = [-1] * topk, 0
    for level in range(1, levels):
        parents += [first + chosen for chosen in beams[level - 1] for _ in range(topk)]
        first += topk if level == 1 else topk * topk
    return parents


def naive_best_first(scores: list[float], parents: list[int], num_nodes: int) -> list[int]:
    """Candidates taken, in number order: always the best one whose parent is taken, lowest number first on ties."""
    key = {}
    for number, score in enumerate(scores):
        score = -3.4028234663852886e38 if score != score or score == -INF else score
        key[number] = (max(-score, key[parents[number]][0] if parents[number] >= 0 else -INF), number)
    heap = [key[number] for number, parent in enumerate(parents) if parent < 0]
    heapq.heapify(heap)
    taken: list[int] = []
    while len(taken) < num_nodes - 1:
        number = heapq.heappop(heap)[1]
        taken.append(number)
        for child, parent in enumerate(parents):
            if parent == number:
                heapq.heappush(heap, key[child])
    return sorted(taken)


def test_select_by_eye():
    """The example in the docstring of attention/trees/tree_builder.py."""
    grown = select_tree(
        long([9]),
        Candidates(
            long([[10, 11, 12, 13, 14, 15]]),
            torch.tensor([[-0.1, -2.0, -0.1, -3.0, -2.0, -9.0]], device=DEVICE),
            long([candidates(2, 2, [[0, 1]])]),
        ),
        num_nodes=4,
        num_levels=2,
    )
    assert grown.tokens.tolist() == [[9, 10, 11, 12]]
    assert grown.parents.tolist() == [[-1, 0, 0, 1]]
    assert grown.depth.tolist() == [[0, 1, 1, 2]]
    rows = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert grown.ancestors.int().tolist() == [rows]
    grown.check()


def test_a_child_is_never_better_than_its_parent():
    """A child of 0.0 under a parent of -5 waits for it, and counts as -5 then."""
    for select in (select_tree, reference_select_tree):
        grown = select(
            long([0]),
            Candidates(
                long([[1, 2, 3, 4]]),
                torch.tensor([[-5.0, -4.0, -INF, 0.0]], device=DEVICE),
                long([[-1, -1, -1, 0]]),
            ),
            num_nodes=3,
            num_levels=2,
        )
        assert grown.tokens.tolist() == [[0, 1, 2]]
        assert grown.parents.tolist() == [[-1, 0, 0]]


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]], int, int]:
    """Scores (few values, therefore many ties; not monotone; -inf and NaN among them) and parents of two requests."""
    topk, levels = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    beams = st.permutations(range(topk))
    parents = [candidates(topk, levels, [draw(beams) for _ in range(levels)]) for _ in range(2)]
    count = len(parents[0])
    values = draw(st.sampled_from([[0.0, -1.0], [0.0, -0.0], [-1.0, -2.0, -3.0, -INF], [-0.5, NAN, 0.25, INF, -9.0]]))
    scores = [draw(st.lists(st.sampled_from(values), min_size=count, max_size=count)) for _ in range(2)]
    return scores, parents, draw(st.integers(1, min(count + 1, 64))), levels


@pytest.mark.slow
@QUICK
@given(forests())
def test_select_is_a_naive_best_first_search(forest: tuple[list[list[float]], list[list[int]], int, int]):
    scores, parents, num_nodes, levels = forest
    count = len(scores[0])
    tokens = torch.arange(2 * count, device=DEVICE).view(2, count)
    inputs = long([7, 8]), Candidates(tokens, torch.tensor(scores, device=DEVICE), long(parents))
    grown = select_tree(*inputs, num_nodes=num_nodes, num_levels=levels)
    grown.check()  # legal: closed, parents first, depth and ancestors right, siblings distinct
    for b in range(2):
        taken = naive_best_first(scores[b], parents[b], num_nodes)
        assert (grown.tokens[b, 1:] - b * count).tolist() == taken
    for bound in (levels, count):
        reference = reference_select_tree(*inputs, num_nodes=num_nodes, num_levels=bound)
        assert torch.equal(grown.tokens, reference.tokens) and torch.equal(grown.parents, reference.parents)


@pytest.mark.slow
@settings(QUICK, max_examples=examples(6, 20))
@given(st.sampled_from(BACKENDS), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000), st.booleans())
def test_growth_keeps_the_best_paths(backend: TreeBackend, topk: int, levels: int, seed: int, ties: bool):
    """Expanding with a table of log-probabilities: beams are the best of their level, scores sum along paths."""
    generator = torch.Generator().manual_seed(seed)
    builder = TreeBuilder(long([3, 4]), backend, levels)
    path_score = torch.zeros(2, 1)
    for level in range(levels):
        width = 1 if level == 0 else topk
        log_p = -torch.randint(0, 3, (2, width, topk), generator=generator).float() if ties else None
        log_p = (
            torch.randn(2, width, 50, generator=generator).log_softmax(-1).topk(topk).values if log_p is None else log_p
        )
        tokens = torch.rand(2, width, 50, generator=generator).argsort(-1)[:, :, :topk]
        beam = builder.add_level(tokens.to(DEVICE), log_p.to(DEVICE))
        scores = (path_score[:, :, None] + log_p).flatten(1)
        best = scores.sort(dim=1, descending=True, stable=True)
        assert torch.equal(beam.tokens.cpu(), tokens.flatten(1).gather(1, best.indices[:, :topk]))
        assert torch.equal(beam.origin.cpu(), best.indices[:, :topk] // topk)
        path_score = best.values[:, :topk]
    most = topk + (levels - 1) * topk * topk
    for num_nodes in {min(most, 2), min(most + 1, 24)}:
        grown = builder.select(num_nodes)
        grown.check()
        assert grown.tokens[:, 0].tolist() == [3, 4]
        assert int(grown.depth.max()) <= levels


@deep_cases("1-4-False-torch", "4-15-False-triton", "4-15-True-torch", "8-7-False-torch")
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("topk", "levels", "ties"), [(1, 4, False), (3, 5, True), (4, 15, False), slow(4, 15, True), slow(8, 7, False)]
)
def test_all_levels_at_once_are_those_one_by_one(backend: TreeBackend, topk: int, levels: int, ties: bool):
    """The marginals of a block: the same candidates, bit for bit, and the same trees, with -inf and NaN among them."""
    generator = torch.Generator().manual_seed(topk * levels)
    root, tokens = long([3, 4, 5]), torch.rand(3, levels, 50, generator=generator).argsort(-1)[:, :, :topk]
    marginals = torch.randn(3, levels, 50, generator=generator).log_softmax(-1).topk(topk).values
    if ties:
        marginals = -torch.randint(0, 3, marginals.shape, generator=generator).float()
        marginals[0, 1, -1], marginals[1, 1, 0], marginals[2, 0, -1] = NAN, -INF, 0.5
    found = TreeBuilder(root, backend, levels)
    found.add_levels(tokens[:, :, None].to(DEVICE), marginals[:, :, None].to(DEVICE))
    one_by_one, reference = TreeBuilder(root, backend, levels), TreeBuilder(root, TorchBackend(), levels)
    for builder in (one_by_one, reference):
        for level in range(levels):
            width = 1 if level == 0 else topk
            parts = (x[:, level, None].expand(-1, width, -1).to(DEVICE) for x in (tokens, marginals))
            builder.add_level(*parts)
    expected = reference.candidates
    assert expected is not None
    for builder in (found, one_by_one):
        assert builder.candidates is not None
        for ours, theirs in zip(builder.candidates, expected, strict=True):
            assert torch.equal(ours, theirs)
    num_nodes = min(32, 1 + expected.tokens.shape[1])
    want = reference_select_tree(root, expected, num_nodes=num_nodes, num_levels=levels)
    tree = found.select(num_nodes)
    assert torch.equal(tree.tokens, want.tokens) and torch.equal(tree.parents, want.parents)


# walks


def random_tree(batch: int, num_nodes: int, seed: int) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    parents = [
        [-1] + [int(torch.randint(0, n, (), generator=generator)) for n in range(1, num_nodes)] for _ in range(batch)
    ]
    siblings = [[row[:n].count(row[n]) for n in range(num_nodes)] for row in parents]  # distinct tokens in few values
    return DraftTree.from_parents(long(siblings), long(parents))


@deep_cases("512", "2", "17", "200")
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 17, slow(33), slow(64), slow(65), slow(200), slow(512)])
def test_fields_are_the_reference(num_nodes: int, poison_empty: None):
    chain = DraftTree.chain(torch.zeros((2, min(num_nodes, 65)), dtype=torch.int64, device=DEVICE))
    for tree in (random_tree(3, num_nodes, seed=num_nodes), chain):
        want = DraftTree.from_parents(tree.tokens, tree.parents)
        depth = int(tree.depth.max())
        for bound in (num_nodes - 1, depth, 100) if num_nodes <= 65 else (depth,):
            got = tree_fields(tree.parents, max_depth=bound)
            for one, other in zip(got, (want.depth, want.ancestors), strict=True):
                torch.testing.assert_close(one, other)
    assert bool(want.ancestors[0, -1].all())


def test_a_tree_of_more_nodes_than_an_integer_has_bits(poison_empty: None):
    """A root with 63 leaves, and after the last of them a chain of 36: selected, described, and walked to its end."""
    parents = [-1] * 63 + list(range(62, 98))
    scores = [-1.0] * 62 + [-0.5] * 37
    tokens = torch.arange(1, 100, device=DEVICE)[None]
    inputs = long([0]), Candidates(tokens, torch.tensor([scores], device=DEVICE), long([parents]))
    trees = [select(*inputs, num_nodes=100, num_levels=37) for select in (select_tree, reference_select_tree)]
    for tree in trees:
        tree.check()
        assert tree.parents.tolist() == [[-1] + [0] * 63 + list(range(63, 99))]
        assert tree.depth[0, 99] == 37 and tree.ancestors[0, 99].nonzero().flatten().tolist() == [0, *range(63, 100)]
        drawn = long([[63] * 63 + list(range(64, 101))])
        walk = reference_accept(tree, drawn)
        assert walk.length.tolist() == [38] and walk.path[0, :38].tolist() == [0, *range(63, 100)]
