"""Sampling: the processed distribution is that of transformers, the noise is a fixed function, and so is the output.

`test_distribution_of_a_draw` compares drawn frequencies with exact probabilities by a chi-square statistic at p = 1e-4;
seeds are fixed, so the outcome is too.
"""

import itertools
import math
import statistics

import pytest
import torch
from samplers import EDITS, sampler_of
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec import DraftTree, SamplingParams
from specdec.sampling.noise import gumbel_noise
from specdec.sampling.reference_sampler import EditInputs, past_tokens

from marks import examples, is_deep, quick, usual


def batch_of(*params, seeds=None):
    return sampler_of(params, list(range(len(params))) if seeds is None else seeds)


# the distribution after the filters


def top_n_sigma_on_paper(n):
    """Tang et al. (2024), equation 2; transformers has none. In Python's own numbers, and a loop."""

    def process(history, logits):
        kept = []
        for row in logits.tolist():
            finite = [x for x in row if x > -math.inf]
            least = max(finite) - n * statistics.pstdev(finite)
            kept.append([x if x >= least else -math.inf for x in row])
        return torch.tensor(kept)

    return process


def transformers_log_p(params, logits, history):
    """logits [..., V] of one request through HF's processors, in the order in which generate applies them."""
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.top_n_sigma > 0:
        steps.append(top_n_sigma_on_paper(params.top_n_sigma))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    rows = logits.reshape(-1, logits.shape[-1])
    return steps(torch.tensor([history] * len(rows)), rows.clone()).log_softmax(-1).view_as(logits)


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_n_sigma": 0.0},
    {"top_n_sigma": -1.0},
    {"top_n_sigma": 0.3},
    {"top_n_sigma": 1.5},
    {"top_n_sigma": 1e6},
    {"top_n_sigma": 1.2, "top_k": 5},
    {"top_n_sigma": 1.2, "top_p": 0.6, "min_p": 0.05, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"top_k": 7, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("settings", FILTERS, ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()) or "plain")
def test_filters_are_those_of_transformers(settings, temperature):
    torch.manual_seed(0)
    params = SamplingParams(temperature=temperature, **settings)
    plain = SamplingParams(temperature=0.9, top_k=3, top_p=0.5)  # a neighbour in the batch with other settings
    logits = torch.randn(2, 50, 40) * 3  # [B, K, V]
    history = torch.randint(0, 40, (2, 12))
    sampling = batch_of(params, plain)
    seen = past_tokens(EditInputs(torch.tensor([12, 5]), None, lambda: history), 40)
    got = sampling.log_weights(sampling.penalised(logits, seen)).log_softmax(-1)
    for row, one in enumerate((params, plain)):
        known = history[row, : (12, 5)[row]].tolist()
        torch.testing.assert_close(got[row], transformers_log_p(one, logits[row], known), atol=1e-5, rtol=1e-5)


def test_top_n_sigma_by_hand():
    """Logits 0 2 4 6 8, and one that a grammar has ruled out: sigma = sqrt(8) = 2.83, of which 1 and 2 are kept."""
    logits = torch.tensor([[[0.0, 2.0, 4.0, -math.inf, 6.0, 8.0]]])
    for n, kept in (
        (0, [0, 1, 2, 4, 5]),
        (-2, [0, 1, 2, 4, 5]),
        (1e-6, [5]),
        (0.7, [5]),
        (0.71, [4, 5]),
        (2, [2, 4, 5]),
    ):
        for temperature in (0.01, 1.0, 3.0):  # which scales both sides
            log_p = batch_of(SamplingParams(temperature=temperature, top_n_sigma=n)).log_weights(logits)[0, 0]
            assert torch.isfinite(log_p).nonzero()[:, 0].tolist() == kept
    flat = batch_of(SamplingParams(temperature=1.0, top_n_sigma=0.1)).log_weights(torch.full((1, 1, 7), 0.3))
    assert torch.isfinite(flat).all()  # all are the best


def test_a_row_under_top_n_sigma_has_the_same_bits_in_every_batch():
    torch.manual_seed(0)
    logits = torch.randn(3, 2, 70_001) * 3
    params = [SamplingParams(temperature=0.7, top_n_sigma=n) for n in (1.0, 2.0, 3.0)]
    together = batch_of(*params).log_weights(logits)
    for row, one in enumerate(params):
        for node in range(2):
            alone = batch_of(one).log_weights(logits[row : row + 1, node : node + 1].clone())
            assert torch.equal(alone[0, 0], together[row, node])
    assert torch.isfinite(together).sum(-1).unique().numel() == 6


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_ties_with_the_kth_token_stay_as_in_transformers(k):
    logits = torch.tensor([[[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -1.0]]])
    params = SamplingParams(temperature=1.0, top_k=k)
    got = batch_of(params).log_weights(logits).log_softmax(-1)[0, 0]
    torch.testing.assert_close(got, transformers_log_p(params, logits[0, 0], [0]))


def test_ties_at_the_border_of_the_nucleus_keep_the_lowest_ids():
    """transformers keeps as many, but which ones depends on an unstable sort."""
    logits = torch.tensor([[[0.0, 2.0, 2.0, 2.0, 2.0, 0.0]]])
    for top_p, kept in ((0.2, [1]), (0.4, [1, 2]), (0.6, [1, 2, 3]), (0.9, [1, 2, 3, 4])):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        log_p = batch_of(params).log_weights(logits)[0, 0]
        assert torch.isfinite(log_p).nonzero()[:, 0].tolist() == kept
        assert torch.isfinite(transformers_log_p(params, logits[0, 0], [0])).sum() == len(kept)


def test_penalty_counts_the_path_of_each_node():
    """root 5; 1 and 2 are children of the root, 3 a child of 1: each node knows the history and its own ancestors."""
    history, length = torch.tensor([[4, 5, 9, 9]]), torch.tensor([2])  # the 9s are after the end
    tree = DraftTree.from_parents(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, 0, 0, 1]]))
    seen = past_tokens(EditInputs(length, tree, lambda: history), 10)[0]
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [[4, 5], [4, 5, 6], [4, 5, 7], [4, 5, 6, 8]]


def test_greedy_is_the_lowest_of_equal_logits_whatever_the_neighbours():
    logits = torch.tensor([[[0.0, 7.0, 7.0]], [[0.0, 7.0, 7.0]]])
    for other in (0.0, 1.0):
        sampling = batch_of(SamplingParams(), SamplingParams(temperature=other, top_k=2))
        assert sampling.sample(logits, torch.tensor([[3], [3]]))[0].tolist() == [1]


TINY = [
    *(({"temperature": t}, 10) for t in (1e-3, 1e-10, 1e-30, 1e-38, 1e-42, 1e-60)),
    *(({"temperature": t, "top_k": 10, "top_p": 0.9, "min_p": 0.1}, 10) for t in (1e-3, 1e-30, 1e-42, 1e-60)),
    *(({"temperature": 1.0, "top_p": p}, 3) for p in (1e-3, 1e-30, 1e-60)),
]


@pytest.mark.parametrize(("settings", "spread"), TINY, ids=str)
def test_a_tiny_temperature_or_nucleus_is_the_best_token(settings, spread):
    torch.manual_seed(0)
    logits = torch.randn(1, 200, 50) * spread
    drawn = batch_of(SamplingParams(**settings)).sample(logits, torch.arange(200)[None])
    assert drawn.tolist() == logits.argmax(-1).tolist()


# the noise

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix64(x):
    """Steele, Lea, Flood (2014), on Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed, position, token):
    stream = splitmix64((splitmix64((seed + GAMMA) & MASK) + position * GAMMA) & MASK)
    bits = splitmix64((stream + (token + 1) * GAMMA) & MASK) >> 12
    return (bits + 0.5) * 2.0**-52


def test_noise_on_paper():
    seeds, positions, vocab = [0, 1, 42, (1 << 63) - 1], [0, 1, 4095, 1 << 40], 7
    noise = gumbel_noise(torch.tensor(seeds), torch.tensor([positions] * 4), vocab)
    expected = [[[-math.log(-math.log(uniform(s, p, v))) for v in range(vocab)] for p in positions] for s in seeds]
    torch.testing.assert_close(noise, torch.tensor(expected), atol=1e-6, rtol=1e-6)


def test_noise_made_ahead_is_that_of_its_positions():
    batch = batch_of(*[SamplingParams(temperature=1.0)] * 2)
    logits, positions = torch.zeros(2, 3, 50), torch.tensor([[7, 9, 8], [0, 1, 3]])
    ahead = batch.with_noise(torch.tensor([7, 0]), 4, 50)
    assert ahead.sample(logits, positions).tolist() == batch.sample(logits, positions).tolist()


def test_noise_does_not_depend_on_the_batch():
    seeds, positions = torch.arange(5), torch.arange(30).view(5, 6)
    whole = gumbel_noise(seeds, positions, 11)
    assert whole.dtype == torch.float32 and whole.shape == (5, 6, 11)
    for b, k in itertools.product(range(5), range(6)):
        one = gumbel_noise(seeds[b : b + 1], positions[b : b + 1, k : k + 1], 11)
        assert torch.equal(one[0, 0], whole[b, k])
    assert torch.equal(gumbel_noise(seeds, positions, 20)[:, :, :11], whole)  # nor on the size of the vocabulary


# the output is a function of model, prompt, parameters and seed

SETTINGS = {
    "plain": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 12},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "min-p": {"temperature": 1.1, "min_p": 0.05},
    "penalty": {"temperature": 0.9, "repetition_penalty": 1.4},
    "all": {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    "greedy-penalty": {"repetition_penalty": 1.5},
    "top-n-sigma": {"temperature": 1.5, "top_n_sigma": 1.2},
    **EDITS,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "page_size"),
    usual(((name, (1, 4)[i % 2]) for i, name in enumerate(SETTINGS)), lambda name, _: name in ("all", "sampled")),
)
def test_same_tokens_with_and_without_speculation(
    setting, page_size, make_target, make_assistant, make_engine, random_prompt, scripted, tree_script
):
    model = make_target("gemma4-e2b")
    prompts = [random_prompt(n) for n in (4, 13, 30)]
    params = [
        SamplingParams(**{"max_new_tokens": examples(9, 24), "seed": seed, **SETTINGS[name]})
        for seed, name in ((0, setting), (7, setting), (1 << 62, "every edit" if setting == "bias" else "bias"))
    ]
    alone = make_engine(model, max_batch_size=1)
    plain = [out.token_ids for out in alone.generate(prompts, params)]
    assert setting in EDITS or all(len(set(out)) > 5 for out in plain[:2])

    trees = scripted(tree_script([p + out for p, out in zip(prompts, plain, strict=True)]))
    drafters = [None, "ngram", make_assistant(model)] if is_deep() else []
    for drafter in (*drafters, make_assistant(model, ordered=True), trees):
        for batch in (1, 3) if drafter is trees and is_deep() else (2,):
            engine = make_engine(model, drafter, page_size=page_size, max_batch_size=batch, num_steps=5)
            outputs = engine.generate(prompts, params)
            assert [out.token_ids for out in outputs] == plain, f"{drafter=} {batch=}"
    accepted = sum(sum(out.stats.accepted_counts) for out in outputs)  # of the trees
    assert accepted > examples(10, 20), "speculation took part"


def test_seeds_differ_and_none_draws_one(make_target, make_engine, random_prompt):
    engine = make_engine(make_target("llama"))
    prompts = [random_prompt(9)] * 6
    params = [SamplingParams(max_new_tokens=12, temperature=1.3, seed=s) for s in (1, 1, 2, 3, None, None)]
    first, same, *others = [tuple(out.token_ids) for out in engine.generate(prompts, params)]
    assert first == same
    assert len({first, *others}) == 5


# the distribution of a draw. Noise is uncorrelated and drafts change no draw, so whole texts follow theirs too


def wilson_hilferty(df, z=3.719):
    """The quantile of the chi-square distribution with `df` degrees of freedom at p = 1e-4 (z: of the normal one)."""
    return df * (1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3


def assert_follows(counts, probabilities):
    """Pearson's statistic of counts [cells] under probabilities [cells] stays below its 1 - 1e-4 quantile."""
    counts, probabilities = counts.double(), probabilities.double()
    assert abs(probabilities.sum() - 1) < 1e-5
    assert counts[probabilities == 0].sum() == 0, "something impossible was drawn"
    expected = probabilities * counts.sum()
    rare = expected < 5
    pooled = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    keep = pooled > 0.5
    statistic = ((seen - pooled) ** 2 / pooled.clamp(min=1e-9))[keep].sum()
    df = int(keep.sum()) - 1
    assert df >= 1
    assert statistic < wilson_hilferty(df), f"chi-square {statistic:.1f} at {df} degrees of freedom"


@pytest.mark.parametrize(
    ("axis", "settings"),
    quick(
        itertools.product(
            ["seeds", "positions"], [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_n_sigma": 1.4}]
        ),
        lambda axis, settings: axis == "seeds" or not settings,
    ),
    ids=str,
)
def test_distribution_of_a_draw(settings, axis):
    torch.manual_seed(0)
    logits, draws = torch.randn(8) * 1.5, 30_000
    params = SamplingParams(temperature=0.8, **settings)
    if axis == "seeds":
        sampling = batch_of(*[params] * draws)
        drawn = sampling.sample(logits.expand(draws, 1, 8), torch.full((draws, 1), 17))
    else:
        drawn = batch_of(params).sample(logits.expand(1, draws, 8), torch.arange(draws)[None])
    assert_follows(drawn.flatten().bincount(minlength=8), transformers_log_p(params, logits, [0]).exp())
