"""Figures by which engines are compared, from the statistics of requests: acceptance, and times of tokens.

TTFT is from when a request was handed in until its first token; TPOT is the time of the tokens after it, for each, and
its mean that of the requests, as of `vllm bench serve` (TPOT) and AIPerf (ITL).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from specdec.runtime.draft_reports import vllm_figures
from specdec.runtime.request import RequestStats


def time_figures(requests: Sequence[RequestStats], seconds: float) -> dict[str, Any]:
    """Times in milliseconds, over requests; tokens/s of all together and of one user. seconds: all of them took."""
    tpots = [one.decode_seconds / (one.output_tokens - 1) for one in requests if one.output_tokens > 1]
    return {
        "output_tokens": sum(one.output_tokens for one in requests),
        "tokens_per_second": sum(one.output_tokens for one in requests) / seconds,
        "tokens_per_second_per_user": float(np.mean([1 / tpot for tpot in tpots])) if tpots else None,
        "tpot_ms": _spread(tpots),
        "ttft_ms": _spread([one.first_token_seconds for one in requests]),
    }


def acceptance_figures(requests: Sequence[RequestStats], max_drafts: int) -> dict[str, Any]:
    """vLLM's figures of all rounds with drafts, which weights them by token, and further ones.

    acceptance_length_per_request: mean over the requests that drafted. per_position: share of the rounds with drafts
    that accepted draft 1, 2, ...; conditional_per_position: of those that accepted the draft before it and drafted so
    deep, which is exact where all drafts are of one depth. accepted_per_node: of the nodes verified, without roots.
    """
    total = RequestStats.total(requests)
    lengths = [1 + sum(one.accepted_counts) / one.drafted_rounds for one in requests if one.drafted_rounds]
    shares = total.accepted_per_position
    accepted = sum(total.accepted_counts)
    return vllm_figures(total, max_drafts) | {
        "acceptance_length_per_request": sum(lengths) / len(lengths) if lengths else 1.0,
        "per_position": [count / total.drafted_rounds for count in total.accepted_counts if total.drafted_rounds],
        "conditional_per_position": [later / share if share else 0.0 for share, later in pairwise([1.0, *shares])],
        "accepted_per_node": accepted / total.draft_nodes if total.draft_nodes else 0.0,
        "verified_nodes": total.draft_nodes,
    }


def supposed_figures(requests: Sequence[RequestStats], seconds: float, length: float) -> dict[str, Any]:
    """Synthetic figures: the rounds take as long as they took, and each brings `length` tokens."""
    total = RequestStats.total(requests)
    rounds = min(seconds, total.draft_seconds + total.verify_seconds + total.other_seconds)
    needed = total.round_tokens / length / total.rounds  # rounds, as a share of those there were
    took = seconds + rounds * (needed - 1)
    later = sum(one.output_tokens - 1 for one in requests)
    return {
        "synthetic": f"acceptance length supposed to be {length:g}, not measured; rounds take the measured time",
        "mean_acceptance_length": length,
        "tokens_per_second": total.output_tokens / took,
        "tpot_ms": 1e3 * needed * total.decode_seconds / max(1, later),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    p50, p99 = np.percentile(seconds, (50, 99))
    return {"mean": 1e3 * float(np.mean(seconds)), "p50": 1e3 * float(p50), "p99": 1e3 * float(p99)}
