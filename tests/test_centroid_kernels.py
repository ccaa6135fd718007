"""The ordered-embedding head without a row of the vocabulary: equal to the dense form and `ReferenceSampler`."""

import pytest
import torch
from samplers import sampler_of

from specdec import SamplingParams
from specdec.draft_models.centroid_head import (
    LOW_BITS,
    CentroidHead,
    centroid_best,
    centroid_sample,
    reference_centroid_best,
    reference_centroid_logits,
    reference_centroid_sample,
    select_kernel,
)
from specdec.gpu.triton_shim import triton

from marks import slow, usual_cases

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SETTINGS = [
    {"temperature": 0.0},
    *({"temperature": t} for t in (0.6, 1.3)),
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 6, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 10**6, "top_p": 0.4},
    {"temperature": 2.0, "min_p": 0.2},
    *({"temperature": 1.5, "top_n_sigma": n} for n in (0.5, 1.5)),
    {"temperature": 1.5, "top_n_sigma": 1.0, "top_k": 6, "top_p": 0.8},
]


pytestmark = pytest.mark.usefixtures("kernels_run")


def batch_of(settings):
    sampler = sampler_of([SamplingParams(**s) for s in settings], list(range(5, 5 + len(settings))), DEVICE)
    return sampler.params, sampler


def head_of(num_centroids, cluster, width, top_k, dtype=torch.float32):
    torch.manual_seed(num_centroids)
    vocab = num_centroids * cluster
    return CentroidHead(
        torch.randn(num_centroids, width, device=DEVICE).to(dtype),
        torch.randperm(vocab, device=DEVICE).view(num_centroids, cluster),
        torch.randn(vocab, width, device=DEVICE).to(dtype) * 0.5,
        top_k,
    )


@pytest.mark.slow
def test_tokens_are_those_of_the_assistants_dense_path(make_target, make_assistant, poison_empty):
    """96 tokens in 12 centroids, 3 opened: transformers' own head, then the sampler over the whole vocabulary."""
    assistant = make_assistant(make_target("gemma4-e2b"), ordered=True).to(DEVICE)
    ordered = assistant.masked_embedding
    head = CentroidHead(
        ordered.centroids.weight,
        ordered.token_ordering.view(ordered.num_centroids, -1),
        assistant.lm_head.weight,
        ordered.centroid_intermediate_top_k,
    )
    params, batch = batch_of(SETTINGS)
    torch.manual_seed(0)
    hidden = torch.randn(len(SETTINGS), 3, 24, device=DEVICE)
    positions = torch.randint(0, 900, hidden.shape[:2], device=DEVICE)
    with torch.no_grad():
        logits = ordered(hidden, assistant.lm_head.weight)
        logits = logits.masked_fill(logits == logits.min(), -torch.inf)  # what is outside, below all that is scored
        expected = batch.sample(logits, positions)
        assert centroid_sample(hidden, positions, params, head).tolist() == expected.tolist()
        torch.testing.assert_close(reference_centroid_logits(hidden, head), logits)
        best = centroid_best(hidden, positions, params, head, 4)
        scores = batch.log_scores(logits, positions).sort(dim=-1, descending=True, stable=True)
    torch.testing.assert_close(best.scores, scores.values[..., :4], atol=2e-5, rtol=1e-5)
    assert torch.equal(best.tokens, scores.indices[..., :4])


@pytest.mark.parametrize("sizes", [(5, 3, 7, 2), slow((20, 9, 33, 20)), (3, 130, 16, 1)], ids=str)
def test_odd_sizes(sizes, poison_empty):
    head = head_of(*sizes)
    params, _ = batch_of(SETTINGS)
    hidden = torch.randn(len(SETTINGS), 2, sizes[2], device=DEVICE)
    positions = torch.randint(0, 900, hidden.shape[:2], device=DEVICE)
    expected = reference_centroid_sample(hidden, positions, params, head)
    assert centroid_sample(hidden, positions, params, head).tolist() == expected.tolist()


@usual_cases(
    *("1-1-torch.float32", "5-2-torch.float16", "20-20-torch.bfloat16", "300-299-torch.float32"),
    "2048-32-torch.float16",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_centroids", "top_k"), [(1, 1), (5, 2), (20, 20), (300, 299), (2048, 32)])
def test_the_best_are_selected_whatever_their_scores(num_centroids, top_k, dtype, poison_empty):
    """Rows of every size of number, of one number, of few, of none but -inf, and of zeros of both signs."""
    torch.manual_seed(top_k)
    rows = [torch.randn(num_centroids) * scale for scale in (1e-6, 1.0, 1e4)]
    rows += [torch.full((num_centroids,), value) for value in (-2.5, -torch.inf)]
    rows += [torch.randint(-1, 2, (num_centroids,)).float(), -0.0 * (torch.arange(num_centroids) % 3)]
    rows += [torch.where(torch.arange(num_centroids) % 2 == 0, -torch.inf, torch.randn(num_centroids))]
    scores = torch.stack(rows).to(DEVICE, dtype)
    opened = torch.full((len(rows), top_k), -1, dtype=torch.int32, device=DEVICE)
    select_kernel[(len(rows),)](
        *(scores, opened, num_centroids, top_k),
        LOW_BITS=LOW_BITS[dtype],
        CENTROIDS=triton.next_power_of_2(num_centroids),
        PDL=False,
    )
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    assert opened.sort(dim=-1).values.tolist() == expected.sort(dim=-1).values.tolist()


def test_equal_centroids_open_the_lower_number(poison_empty):
    """Centroids 1, 2 and 4 are equal and best; two are opened."""
    width, cluster = 4, 2
    centroids = torch.zeros(5, width, device=DEVICE)
    centroids[[1, 2, 4], 0] = 1.0
    weight = torch.zeros(10, width, device=DEVICE)
    weight[:, 0] = torch.arange(10.0)
    head = CentroidHead(centroids, torch.arange(10, device=DEVICE).view(5, cluster), weight, 2)
    params, _ = batch_of(SETTINGS[:1])
    hidden = torch.tensor([[[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]], device=DEVICE)
    positions = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    # the negated row likes centroids 0 and 3, and of their tokens the least
    assert centroid_sample(hidden, positions, params, head).tolist() == [[5, 0]]
    best = centroid_best(hidden, positions, params, head, 4)
    assert best.tokens.tolist() == [[[5, 4, 3, 2], [0, 1, 6, 7]]]
    expected = reference_centroid_best(hidden, positions, params, head, 4)
    torch.testing.assert_close(best, expected, atol=2e-6, rtol=1e-5)
