"""Counts of drafts under the names of other engines, whose clients and benchmarks read them: vLLM's and llama.cpp's.

A round without drafts is no step here. Where a tree is drafted, its depth counts, not its nodes.
"""

from itertools import pairwise
from typing import Any

from specdec.runtime.request import RequestStats


def vllm_figures(stats: RequestStats, max_drafts: int) -> dict[str, Any]:
    """`metrics.speculative_decoding` of vLLM. max_drafts: drafts that a round can accept.

    acceptance_histogram[j]: rounds that accepted j drafts. The mean length is 1 + accepted / rounds, so the bonus token
    counts in every round, also in the last one of an output that ends within the drafts.
    """
    steps, accepted = stats.drafted_rounds, sum(stats.accepted_counts)
    at_least = [steps, *stats.accepted_counts, *[0] * (max_drafts + 1 - len(stats.accepted_counts))]
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / stats.draft_tokens if stats.draft_tokens else 0.0,
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(at_least)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": stats.draft_tokens,
        "num_spec_tokens": len(at_least) - 2,
    }


def llama_timings(stats: RequestStats) -> dict[str, Any]:
    """`timings` of llama.cpp's server. The prompt's time is that until the first token, without the queue."""
    prompt, predicted = stats.first_token_seconds - stats.queue_seconds, stats.decode_seconds
    read = stats.prompt_tokens - stats.cached_tokens
    return {
        "cache_n": stats.cached_tokens,
        **_pace("prompt", read, prompt),
        **_pace("predicted", stats.output_tokens, predicted),
        "draft_n": stats.draft_tokens,
        "draft_n_accepted": sum(stats.accepted_counts),
    }


def _pace(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }
