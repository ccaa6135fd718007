"""Figures for comparing engines, from request statistics: acceptance and token times.

TTFT is the time from a request's submission to its first token. TPOT is the time per token after the first; its mean is
over requests, like `vllm bench serve` (TPOT) and AIPerf (ITL).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from specdec.runtime.draft_reports import vllm_figures
from specdec.runtime.request_output import RequestStats


def time_figures(requests: Sequence[RequestStats], seconds: float) -> dict[str, Any]:
    """Times in milliseconds over requests; tokens/s in total and per user. seconds: total time."""
    tpots = [one.decode_seconds / (one.output_tokens - 1) for one in requests if one.output_tokens > 1]
    return {
        "output_tokens": sum(one.output_tokens for one in requests),
        "tokens_per_second": sum(one.output_tokens for one in requests) / seconds,
        "tokens_per_second_per_user": float(np.mean([1 / tpot for tpot in tpots])) if tpots else None,
        "tpot_ms": _spread(tpots),
        "ttft_ms": _spread([one.first_token_seconds for one in requests]),
    }


def acceptance_figures(requests: Sequence[RequestStats], max_drafts: int) -> dict[str, Any]:
    """vLLM's figures over all rounds with drafts, which weight requests by tokens, and further figures.

    acceptance_length_per_request: mean over the requests that drafted. per_position: share of the rounds with drafts
    that accepted draft 1, 2, ...; conditional_per_position: the share among rounds that accepted the draft before and
    drafted this deep, exact if all drafts have the same depth. accepted_per_node: accepted drafts per verified node,
    roots excluded.
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


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    p50, p99 = np.percentile(seconds, (50, 99))
    return {"mean": 1e3 * float(np.mean(seconds)), "p50": 1e3 * float(p50), "p99": 1e3 * float(p99)}
