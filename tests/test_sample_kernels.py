"""Sampling without a sort: the tokens of `ReferenceSampler`, whatever the parameters, ties and cut of the vocabulary.

Small cuts make a vocabulary of some hundred tokens span many tiles, and lists overflow.
"""

import itertools

import pytest
import torch
from samplers import sampler_of

from specdec import DraftTree, SamplingParams
from specdec.gpu.triton_shim import tl, triton
from specdec.sampling.choose_candidate import _keep_best
from specdec.sampling.collect_candidates import DEFAULT_VOCAB_SPLIT, VocabSplit
from specdec.sampling.grammars.token_rules import token_bits
from specdec.sampling.kernel_sampler import KernelSampler, best_tokens, path_tokens, sample
from specdec.sampling.noise import NOISE_ERROR, exact_noise, gumbel_noise, noise_bound, noise_stream
from specdec.sampling.reference_sampler import EditInputs, ReferenceSampler, past_tokens
from specdec.sampling.row_scores import LogitRows, SeenTokens
from specdec.sampling.sampling_table import ParamVectors
from specdec.sampling.softcap import _cheap_tanh, reference_softcap, softcap
from specdec.sampling.token_bitmaps import mark_seen

from marks import deep, deep_cases, examples, slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF = float("inf")
CUTS = {
    "listed": VocabSplit(tile=256, group=8, capacity=512, listed=64),
    "many tiles": VocabSplit(tile=64, group=4, capacity=96, listed=32),
    "overflows": VocabSplit(tile=64, group=4, capacity=8, listed=8),
}


# the interpreter's numpy says when float32 reaches infinity, which it should
pytestmark = [
    pytest.mark.usefixtures("kernels_run"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def batch_of(params, seeds=None):
    """Parameters for the code under test and for `ReferenceSampler`."""
    seeds = list(range(7, 7 + len(params))) if seeds is None else seeds
    sampler = sampler_of(params, seeds, DEVICE)
    return sampler.params, sampler


SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.2},
    *({"temperature": t} for t in (1e-42, 0.7, 1.0, 30.0)),
    *({"temperature": 1.0, "top_k": k} for k in (1, 2, 7, 50, 149, 150, 151, 10**6)),
    *({"temperature": 0.8, "top_p": p} for p in (1e-60, 1e-3, 0.3, 0.9, 0.999)),
    *({"temperature": 1.2, "min_p": p} for p in (1e-30, 0.02, 0.5, 1.0)),
    *({"temperature": 1.1, "top_n_sigma": n} for n in (-1.0, 1e-9, 0.7, 2.0, 100.0)),
    {"temperature": 1.4, "top_n_sigma": 1.0, "top_k": 40},
    {"temperature": 1.4, "top_n_sigma": 2.5, "top_k": 4},
    {"temperature": 1.4, "top_n_sigma": 1.5, "top_p": 0.6},
    {"temperature": 1.4, "top_n_sigma": 2.0, "top_k": 30, "top_p": 0.9, "min_p": 0.1},
    *(
        {"temperature": 1.5, "top_k": k, "top_p": p, "min_p": m}
        for k, p, m in itertools.product((5, 60), (0.4, 0.95), (0.0, 0.1))
    ),
]


def wrong_draws(settings, logits, vocab_split=DEFAULT_VOCAB_SPLIT):
    """Settings of the rows of which a token is not that of `ReferenceSampler`, and both."""
    positions = torch.randint(0, 5000, logits.shape[:2], device=DEVICE)
    fast, slow = batch_of([SamplingParams(**one) for one in settings])
    got, expected = (
        sample(LogitRows(logits, positions, fast), vocab_split).tolist(),
        slow.sample(logits, positions).tolist(),
    )
    return {str(s): (g, e) for s, g, e in zip(settings, got, expected, strict=True) if g != e}


def logits_of(kind, batch, nodes, vocab, dtype=torch.float32):
    x = torch.randn(batch, nodes, vocab) * 3
    if kind == "ties":
        x = x.round()
    elif kind == "flat":
        x = torch.zeros_like(x)
    elif kind == "masked":  # as a grammar leaves it
        x[torch.rand_like(x) < 0.9] = -INF
        x[..., 3] = 0.0
    elif kind == "ascending":
        x = x.sort(-1).values
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        *(deep("random", "many tiles"), deep("ties", "many tiles"), ("masked", "many tiles")),
        *(deep("ascending", "many tiles"), slow("random", "listed"), slow("flat", "listed"), slow("ties", "overflows")),
    ],
)
def test_tokens_are_those_of_the_sorted_sampler(kind, cut, poison_empty):
    """Every setting in one batch: the rows do not meet."""
    torch.manual_seed(len(kind))
    assert wrong_draws(SETTINGS, logits_of(kind, len(SETTINGS), 1, 150), CUTS[cut]) == {}


@deep_cases("2-torch.float32", "300-torch.float16")
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        *(slow(1, torch.float32), slow(2, torch.float32), (65, torch.float32), slow(257, torch.float32)),
        *(slow(300, torch.float16), pytest.param(300, torch.bfloat16, marks=pytest.mark.gpu)),
    ],
    ids=str,
)
def test_a_vocabulary_of_any_size_and_dtype(vocab, dtype, poison_empty):
    """Rows are a view of a wider buffer. In 16 bits hundreds of logits are equal."""
    torch.manual_seed(vocab)
    settings = SETTINGS[::5]
    logits = logits_of("random", len(settings), 2, vocab + 30, dtype)[..., 17 : 17 + vocab]
    assert wrong_draws(settings, logits, CUTS["many tiles"]) == {}


def test_ties_at_the_border_of_the_nucleus_keep_the_lowest_ids():
    logits = torch.tensor([[[0.0, 2.0, 2.0, 2.0, 2.0, 0.0]]], device=DEVICE)
    position = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    for top_p, kept in ((0.2, [1]), (0.4, [1, 2]), (0.6, [1, 2, 3]), (0.9, [1, 2, 3, 4]), (0.95, [0, 1, 2, 3, 4])):
        fast, _ = batch_of([SamplingParams(temperature=1.0, top_p=top_p)])
        best = best_tokens(LogitRows(logits, position, fast), 6)
        assert sorted(best.tokens[best.scores > -INF].tolist()) == kept


def test_a_nucleus_is_a_share_of_the_whole_row_and_not_of_its_list(poison_empty):
    """The list has half of the row's mass here: 3 of 10 of that would be half as many tokens."""
    torch.manual_seed(0)
    logits = torch.randn(1, 1, 200, device=DEVICE)
    fast, slow = batch_of([SamplingParams(temperature=1.0, top_p=0.3)])
    kept = int((slow.log_weights(logits) > -INF).sum())
    cut = VocabSplit(tile=64, group=16, capacity=150, listed=64)
    rows = LogitRows(logits, torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), fast)
    best = best_tokens(rows, 60, cut)
    assert 5 < kept < 60 and int((best.scores > -INF).sum()) == kept
    settings = [{"temperature": 1.0, "top_p": 0.99, "top_k": k} for k in (0, 200)] * 4
    assert wrong_draws(settings, torch.randn(8, 1, 200, device=DEVICE), cut) == {}


def test_a_row_whose_list_overflows_keeps_what_top_n_sigma_keeps():
    torch.manual_seed(0)
    settings = [{"temperature": 1.4, "top_n_sigma": 1.0, "top_k": 60}] * 16
    assert wrong_draws(settings, torch.randn(16, 2, 150, device=DEVICE), CUTS["overflows"]) == {}


@pytest.mark.parametrize(
    ("k", "kind"),
    [(5, "masked"), deep(1, "random"), slow(3, "ties"), deep(5, "ties"), deep(3, "random"), deep(1, "masked")],
)
def test_best_tokens_are_the_best_of_log_scores(kind, k, poison_empty):
    torch.manual_seed(k)
    settings = SETTINGS[::3]
    params = [SamplingParams(**s) for s in settings]
    logits = logits_of(kind, len(params), 1, 130)
    positions = torch.arange(len(params), device=DEVICE)[:, None]
    fast, slow = batch_of(params)
    best = best_tokens(LogitRows(logits, positions, fast), k, CUTS["many tiles"])
    expected = slow.log_scores(logits, positions)
    ordered = expected.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(best.tokens, ordered.indices[..., :k])  # removed tokens too, lowest id first
    torch.testing.assert_close(best.scores, ordered.values[..., :k], atol=2e-5, rtol=2e-5)
    reference = slow.best(logits, positions, k)
    assert torch.equal(reference.tokens, best.tokens)
    torch.testing.assert_close(reference.scores, best.scores, atol=2e-5, rtol=2e-5)


def test_the_softcap_rounds_as_the_model_does(poison_empty):
    """In half precision capped logits tie, and a tie goes to the lower id: the cap may not be left out of an argmax."""
    logits = (torch.arange(64.0).view(1, 1, 64) * 4).to(DEVICE, torch.float16)
    capped = torch.tanh(logits / 30) * 30
    assert (capped == capped.max()).sum() > 3
    position = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    fast, _ = batch_of([SamplingParams()])
    for cut in (
        DEFAULT_VOCAB_SPLIT,
        VocabSplit(tile=8, group=4),
    ):  # the first of the largest lies tiles before the largest logit
        assert sample(LogitRows(logits, position, fast, 30.0), cut).tolist() == capped.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_penalty_is_of_capped_logits_and_of_a_nodes_own_token_too(dtype, poison_empty):
    """40 and 35 are 26.1 and 24.7 under a cap of 30, and the first 23.7 after a penalty; of 36.4 it would be 40's."""
    logits = torch.zeros(1, 1, 64, dtype=dtype, device=DEVICE)
    logits[..., 0], logits[..., 1] = 40, 35
    position = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    fast, _ = batch_of([SamplingParams(repetition_penalty=1.1)])
    had, nothing = (torch.tensor([[word, 0]], dtype=torch.int32, device=DEVICE) for word in (1, 0))  # token 0, or none
    itself, blank = (torch.full((1, 1, 1), token, device=DEVICE) for token in (0, -1))
    for cut in (DEFAULT_VOCAB_SPLIT, VocabSplit(tile=8, group=4)):
        for seen, want in (
            (SeenTokens(had, blank), 1),
            (SeenTokens(nothing, itself), 1),
            (SeenTokens(nothing, blank), 0),
        ):
            assert sample(LogitRows(logits, position, fast, 30.0, seen), cut).tolist() == [[want]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_softcap_of_16_bits_keeps_the_order_of_logits(dtype):
    """All logits in one group: the best of a group is capped, not the whole group."""
    numbers = every_number(dtype)[:-1].sort().values
    numbers = numbers[(numbers == 0) | (numbers.abs() > 1e-30)]  # the interpreter's round oddly below
    for cap in (30.0, 50.0, 0.3):
        steps = softcap(numbers.clone(), cap).float().diff()
        assert bool((steps >= 0).all())


def test_a_program_may_list_several_tiles(monkeypatch, poison_empty):
    torch.manual_seed(5)
    params = [SamplingParams(**settings) for settings in SETTINGS[:: examples(10, 3)]]
    logits = torch.randn(len(params), 2, 300, device=DEVICE)
    positions = torch.arange(2 * len(params), device=DEVICE).view(-1, 2)
    fast, _ = batch_of(params)
    rows = LogitRows(logits, positions, fast)
    want = sample(rows, CUTS["many tiles"]), best_tokens(rows, 3)
    monkeypatch.setattr("specdec.sampling.collect_candidates.COLLECTORS", 1)
    got = sample(rows, CUTS["many tiles"]), best_tokens(rows, 3)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1].tokens, want[1].tokens)


def test_of_equal_tokens_the_lowest_are_best_in_whatever_order_they_are_listed(monkeypatch, poison_empty):
    """Two programs list tiles of 64 in turn, so 130 and 140 come before 70 and 100, as any order may on a GPU."""
    monkeypatch.setattr("specdec.sampling.collect_candidates.COLLECTORS", 2)
    logits = torch.full((1, 1, 200), -1.0, device=DEVICE)
    logits[..., [70, 100, 130, 140]] = 0.0
    fast, _ = batch_of([SamplingParams(temperature=0.0)])
    rows = LogitRows(logits, torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), fast)
    assert best_tokens(rows, 2, VocabSplit(tile=64, group=4, capacity=96, listed=2)).tokens.tolist() == [[[70, 100]]]


@pytest.mark.parametrize("cut", ["many tiles", slow("overflows")])
def test_penalty_along_each_nodes_own_path(cut, poison_empty):
    """root 5; 6 and 7 are its children, 8 a child of 6: every node knows the history and its own ancestors."""
    torch.manual_seed(1)
    vocab = 70
    history = torch.randint(0, vocab, (3, 9), device=DEVICE)
    length = torch.tensor([9, 4, 1], device=DEVICE)
    tree = DraftTree.from_parents(
        torch.tensor([[5, 6, 7, 8]] * 3, device=DEVICE), torch.tensor([[-1, 0, 0, 1]] * 3, device=DEVICE)
    )
    row = torch.tensor([2, 0, 3], device=DEVICE)
    bits = torch.zeros(4, -(-vocab // 32), dtype=torch.int32, device=DEVICE)
    mark_seen(bits, row, history, length)
    for at, tokens, count in zip(row.tolist(), history.tolist(), length.tolist(), strict=True):
        assert bits[at].tolist() == token_bits(set(tokens[:count]), 3).tolist()
    assert bits[1].tolist() == [0, 0, 0]
    params = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(temperature=1.0, repetition_penalty=0.6, top_k=9),
        SamplingParams(temperature=0.7, repetition_penalty=1.0),
    ]
    logits = torch.randn(3, 4, vocab, device=DEVICE) * 2
    positions = torch.arange(12, device=DEVICE).view(3, 4)
    fast, slow = batch_of(params)
    seen = SeenTokens(bits[row], path_tokens(tree.tokens, tree.ancestors))
    penalised = slow.penalised(logits, past_tokens(EditInputs(length, tree, lambda: history), vocab))
    expected = slow.sample(penalised, positions)
    assert sample(LogitRows(logits, positions, fast, None, seen), CUTS[cut]).tolist() == expected.tolist()
    assert expected.tolist() != slow.sample(logits, positions).tolist()


@triton.jit
def _noise_kernel(p_seed, p_position, p_exact, p_near, num_tokens, BLOCK: tl.constexpr):
    stream = noise_stream(tl.load(p_seed), tl.load(p_position))
    o_token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_exact + o_token, exact_noise(stream, o_token), mask=o_token < num_tokens)
    tl.store(p_near + o_token, noise_bound(stream, o_token), mask=o_token < num_tokens)


@pytest.mark.parametrize(("seed", "position"), [slow(0, 0), slow(5, 77), ((1 << 63) - 1, 1 << 40)])
def test_noise_is_the_samplers_and_its_bound_is_near(seed, position, poison_empty):
    seeds, positions = torch.tensor([seed], device=DEVICE), torch.tensor([position], device=DEVICE)
    exact, near = torch.empty(70_000, device=DEVICE), torch.empty(70_000, device=DEVICE)
    _noise_kernel[(triton.cdiv(70_000, 1024),)](seeds, positions, exact, near, 70_000, BLOCK=1024)
    assert torch.equal(exact, gumbel_noise(seeds, positions[None], 70_000)[0, 0])
    assert (exact - near).abs().max() < NOISE_ERROR.value / 8


@triton.jit
def _keep_best_kernel(p_seed, p_position, p_near, p_score, p_best):
    o_token, b_best_id = tl.arange(0, 4), tl.full([2], 0x7FFFFFFF, tl.int32)
    b_best = tl.where(tl.arange(0, 2) < 1, -float("inf"), float("inf"))
    b_near, b_score, seed = tl.load(p_near + o_token), tl.load(p_score + o_token), tl.load(p_seed)
    stream = noise_stream(seed, tl.load(p_position))
    _best, b_best_id = _keep_best(b_near, b_score, o_token, b_best, b_best_id, stream, seed > 0, 2)
    tl.store(p_best, tl.min(b_best_id))


def test_exact_noise_decides_between_tokens_whose_bounds_are_in_another_order():
    seed, position = torch.tensor([3], device=DEVICE), torch.tensor([9], device=DEVICE)
    exact = torch.tensor([0.0, 3e-5, -1e-5, -1.0], device=DEVICE)
    near = torch.tensor([4e-5, -2e-5, 1e-5, -1.0], device=DEVICE)  # within NOISE_ERROR
    best = torch.empty(1, dtype=torch.int32, device=DEVICE)
    _keep_best_kernel[(1,)](seed, position, near, exact - gumbel_noise(seed, position[None], 4)[0, 0], best)
    assert best.tolist() == [1]


@pytest.mark.parametrize("with_tree", [False, True], ids=["first", "tree"])
def test_an_engine_samples_with_the_kernel_sampler(with_tree):
    """`KernelSampler` in the place of `ReferenceSampler`: draws with penalties along each node's path, and children."""
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=0.9, top_k=9, repetition_penalty=0.7),
        SamplingParams(temperature=1.0, top_p=0.8),
    ]
    generator = torch.Generator().manual_seed(3)
    history = torch.randint(0, 70, (3, 6), generator=generator).to(DEVICE)
    tree = DraftTree.from_parents(history[:, :4], torch.tensor([[-1, 0, 0, 2]] * 3, device=DEVICE))
    length, bits = torch.tensor([6, 2, 4], device=DEVICE), torch.zeros(3, 3, dtype=torch.int32, device=DEVICE)
    mark_seen(bits, torch.arange(3, device=DEVICE), history, length)
    inputs = EditInputs(length, tree if with_tree else None, lambda: history, seen=bits)
    logits = (torch.randn(3, 4 if with_tree else 1, 70, generator=generator) * 3).to(DEVICE)
    positions = torch.arange(12, device=DEVICE).view(3, 4)[:, : logits.shape[1]]
    drawn, children = [], []
    for kind in (ReferenceSampler, KernelSampler):
        batch = sampler_of(params, [41, 44, 40], DEVICE, kind).with_noise(positions[:, 0], 5, 70)
        drawn.append(batch.draw(logits, positions, inputs))
        children.append(batch.best(logits, positions, 3))
    assert torch.equal(*drawn)
    left = children[0].scores > -INF  # by the filters; among the others any will do
    assert left.any(-1).all() and torch.equal(children[0].tokens[left], children[1].tokens[left])
    torch.testing.assert_close(children[0].scores, children[1].scores, atol=1e-4, rtol=1e-4)


# the softcap of logits, bit for bit


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """All numbers that 16 bits can say, and one that is none."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.cat([x[~x.isnan()], torch.tensor([torch.nan], dtype=dtype)]).to(DEVICE)


@deep_cases("30.0-torch.bfloat16", "50.0-torch.float16", "1.0-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("cap", [30.0, 50.0, 1.0])
def test_softcap_has_the_bits_of_torchs_operators(cap: float, dtype: torch.dtype):
    x = every_number(dtype)
    # of a subnormal float16 a product with the reciprocal, which is what a GPU makes, is another number now and then
    divided = x / cap if DEVICE.type == "cuda" else (x.float() * (1 / torch.tensor(cap))).to(dtype)
    want = torch.tanh(divided) * cap
    got = softcap(x.clone(), cap)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if DEVICE.type == "cuda":
        assert got[:-1].view(torch.int16).equal(want[:-1].view(torch.int16)), "the sign of a zero"


def test_softcap_is_done_in_place_on_any_number_of_logits(seeded):
    x = torch.randn(3, 7, 211, device=DEVICE) * 40  # 4431: two programs and a rest
    want = reference_softcap(x, 30.0)
    assert softcap(x, 30.0) is x
    torch.testing.assert_close(x, want, rtol=1e-6, atol=1e-6)
    assert softcap(x[:0], 30.0).shape == (0, 7, 211)


@triton.jit
def _tanh_kernel(p_x: tl.tensor, p_y: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr) -> None:
    o_x = tl.arange(0, BLOCK)
    tl.store(p_y + o_x, _cheap_tanh(tl.load(p_x + o_x, mask=o_x < numel, other=0.0)), mask=o_x < numel)


def test_a_cheap_tangent_of_a_bfloat16_rounds_as_the_exact_one_does():
    """Its error is below 2e-6, and no tangent lies closer than 8e-6 to where rounding changes."""
    x = every_number(torch.bfloat16).float()
    y = torch.empty_like(x)
    _tanh_kernel[(1,)](x, y, len(x), BLOCK=1 << 16)
    assert y[-1].isnan() and y[x == 0].eq(0).all() and y[x == torch.inf].eq(1).all()
    x, y = x[(x != 0) & ~x.isnan()], y[(x != 0) & ~x.isnan()]
    exact = torch.tanh(x.double())
    assert ((y - exact) / exact).abs().max() < 2e-6
    exact = exact[(exact.abs() < 1) & (x.abs() > 1e-30)]  # where a bfloat16 has all of its 8 bits
    digits = torch.frexp(exact).mantissa.abs() * 2**8
    to_halfway = (digits % 1 - 0.5).abs() / digits
    assert 8e-6 < to_halfway.min() < 9e-6


def test_a_row_does_not_depend_on_other_rows(poison_empty):
    torch.manual_seed(2)
    params = [SamplingParams(**settings) for settings in SETTINGS[1 :: examples(8, 4)]]
    logits = logits_of("ties", len(params), 1, 200)
    positions = torch.arange(len(params), device=DEVICE)[:, None]
    fast, _ = batch_of(params)
    together = best_tokens(LogitRows(logits, positions, fast), 3, CUTS["many tiles"])
    for i in range(len(params)):
        one = ParamVectors(*(p[:, i : i + 1].contiguous() for p in fast))
        alone = best_tokens(LogitRows(logits[i : i + 1], positions[i : i + 1], one), 3, CUTS["many tiles"])
        assert torch.equal(alone.tokens[0], together.tokens[i])
        assert torch.equal(alone.scores[0], together.scores[i])
