"""Sampling and the centroid head, at the vocabulary of Gemma 4. Floors are the bytes of the logits."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from bench.device import DEVICE, ON_CPU  # isort: skip - before triton
import numpy as np
import torch

from bench.clock import bandwidth_row, graph_seconds, timed_row
from bench.report import Row
from specdec import SamplingParams
from specdec.draft_models.centroid_head import CentroidHead, centroid_best, centroid_sample, reference_centroid_logits
from specdec.sampling.kernel_sampler import best_tokens, sample
from specdec.sampling.reference_sampler import ReferenceSampler
from specdec.sampling.row_scores import LogitRows
from specdec.sampling.sampling_table import ParamVectors, SamplerFeatures, SamplingTable

VOCAB = 1000 if ON_CPU else 262_144
DTYPE = torch.float16 if ON_CPU else torch.bfloat16  # bfloat16 is not interpreted
SETTINGS = {
    "greedy": SamplingParams(),
    "T 1": SamplingParams(temperature=1.0),
    "T 1, top-k 64, top-p .95": SamplingParams(temperature=1.0, top_k=64, top_p=0.95),
    "T .7, top-p .9": SamplingParams(temperature=0.7, top_p=0.9),
    "T 1, min-p .05": SamplingParams(temperature=1.0, min_p=0.05),
    "T 1, top-n-sigma 1": SamplingParams(temperature=1.0, top_n_sigma=1.0),
}
FILTERS = {
    "temperature": (0.0, 0.6, 1.5),
    "top_k": (0, 1, 50, 5000),
    "top_p": (1.0, 0.95, 0.3, 1e-6),
    "min_p": (0.0, 0.1),
    "top_n_sigma": (0.0, 1.5),
}
KINDS = ("zipf", "normal", "flat")
"""Logits: as a language model has them, P falling as rank^-1.3; normal; flat: a nucleus of most of the vocabulary."""


def logits_of(kind: str, rows: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    noise = torch.randn(rows, 1, VOCAB, device=DEVICE)
    if kind != "zipf":
        return ((3 if kind == "normal" else 1) * noise).to(dtype)
    rank = torch.stack([torch.randperm(VOCAB, device=DEVICE) for _ in range(rows)])[:, None] + 1.0
    return (15 - 1.3 * rank.log() + 0.3 * noise).to(dtype)


def samplers_of(settings: Sequence[SamplingParams]) -> tuple[ParamVectors, ReferenceSampler]:
    rows = np.arange(len(settings))
    table = SamplingTable(len(settings), DEVICE)
    table.load(rows, [(each, 100 + i) for i, each in enumerate(settings)])
    slow = ReferenceSampler(*table.row_params(torch.from_numpy(rows).to(DEVICE), SamplerFeatures.from_params(settings)))
    return slow.params, slow


def check_rows() -> Iterator[Row]:
    """Tokens of `ReferenceSampler`, every setting and their mixture."""
    mixed = [SamplingParams(**dict(zip(FILTERS, each, strict=True))) for each in itertools.product(*FILTERS.values())]
    for kind, dtype in itertools.product(KINDS, (DTYPE, torch.float32)):
        differing: list[SamplingParams] = []
        for first in range(0, len(mixed), 32):
            some = mixed[first : first + 32]
            torch.manual_seed(first)
            logits = logits_of(kind, len(some), dtype)
            positions = torch.randint(0, 10_000, (len(some), 1), device=DEVICE)
            fast, slow = samplers_of(some)
            wrong = (sample(LogitRows(logits, positions, fast)) != slow.sample(logits, positions))[:, 0]
            differing += [some[row] for row in wrong.nonzero()[:, 0].tolist()]
        found = f"{len(differing)} of {len(mixed)} tokens differ{': ' if differing else ''}"
        ok = len(differing) <= (0 if ON_CPU else 1)
        yield Row(f"sampling: {kind}, {dtype}", found + "; ".join(map(str, differing[:3])), ok=ok)
    torch.manual_seed(0)
    logits, positions = logits_of("zipf", 6), torch.arange(6, device=DEVICE)[:, None]
    fast, slow = samplers_of([SamplingParams(temperature=t) for t in (0.0, 1.0)] * 3)
    best = best_tokens(LogitRows(logits, positions, fast), 4)
    expected = slow.log_scores(logits, positions).topk(4, dim=-1)
    error = float((best.scores - expected.values).abs().max())
    yield Row("sampling: 4 best, log-probabilities", f"{error:.1e}", ok=error < 1e-4)


def times_rows(rows: Sequence[int]) -> Iterator[Row]:
    yield bandwidth_row()
    for (name, setting), kind, count in itertools.product(SETTINGS.items(), KINDS, rows):
        if kind != "zipf" and name != "T .7, top-p .9":
            continue
        torch.manual_seed(count)
        logits, positions = logits_of(kind, count), torch.arange(count, device=DEVICE)[:, None]
        fast, slow = samplers_of([setting] * count)
        ours, peer = partial(sample, logits, positions, fast), partial(slow.sample, logits, positions)
        yield _timed(f"sample: {name}, {kind}, {count} rows", ours, logits.nbytes, peer if count in (8, 40) else None)
    for count in (8, 40):
        logits, positions = logits_of("zipf", count), torch.arange(count, device=DEVICE)[:, None]
        fast, slow = samplers_of([SETTINGS["T 1"]] * count)
        peer = lambda x=logits, p=positions, s=slow: s.log_scores(x, p).topk(4, dim=-1)  # noqa: E731
        yield _timed(
            f"4 best, T 1, {count} rows", partial(best_tokens, logits, positions, fast, 4), logits.nbytes, peer
        )


def _timed(name: str, call: Any, num_bytes: float, peer: Any) -> Row:
    us = graph_seconds([call] * 8) * 1e6  # of one call the launch of the graph would be most
    return timed_row(name, us, num_bytes, None if peer is None else graph_seconds([peer] * 4) * 1e6)


def centroid_head() -> CentroidHead:
    """The head of the E2B and E4B assistants: hidden 256, 2,048 centroids of 128 tokens, 32 opened."""
    count, cluster, width, top_k = (20, 50, 32, 5) if ON_CPU else (2048, VOCAB // 2048, 256, 32)
    torch.manual_seed(0)
    centroids, weight = (torch.randn(n, width, device=DEVICE).to(DTYPE) for n in (count, count * cluster))
    return CentroidHead(centroids, torch.randperm(count * cluster, device=DEVICE).view(count, cluster), weight, top_k)


def centroid_check_rows() -> Iterator[Row]:
    head, settings = centroid_head(), list(SETTINGS.values()) * 4
    fast, slow = samplers_of(settings)
    hidden = (torch.randn(len(settings), 2, head.centroids.shape[1], device=DEVICE) * 0.2).to(DTYPE)
    positions = torch.arange(2 * len(settings), device=DEVICE).view(-1, 2)
    expected = slow.sample(reference_centroid_logits(hidden, head), positions)
    differ = int((centroid_sample(hidden, positions, fast, head) != expected).sum())
    # sums in another order round some logits otherwise, and then a draw is another
    yield Row("centroid: tokens of the dense path", f"{differ} of {expected.numel()} differ", ok=differ <= 2)


def centroid_times_rows() -> Iterator[Row]:
    head = centroid_head()
    width = head.centroids.shape[1]
    for rows, name in itertools.product((1, 8, 32, 128), ("greedy", "T 1")):
        hidden = (torch.randn(rows, 1, width, device=DEVICE) * 0.2).to(DTYPE)
        positions = torch.arange(rows, device=DEVICE)[:, None]
        num_bytes = head.centroids.nbytes + rows * head.num_listed * (2 * width + 8)
        fast, slow = samplers_of([SETTINGS[name]] * rows)
        peer = lambda h=hidden, p=positions, s=slow: s.sample(reference_centroid_logits(h, head), p)  # noqa: E731
        yield _timed(
            f"centroid: {name}, {rows} rows", partial(centroid_sample, hidden, positions, fast, head), num_bytes, peer
        )
        if rows == 8 and name == "greedy":
            yield _timed(
                "centroid: 4 best, 8 rows", partial(centroid_best, hidden, positions, fast, head, 4), num_bytes, None
            )
