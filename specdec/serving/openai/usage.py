"""What an answer says of its tokens: how many there are, their log-probabilities, and what speculation did."""

from collections.abc import Sequence
from typing import Any

from specdec.runtime.request import RequestStats
from specdec.sampling.log_probs import TokenLogprob
from specdec.serving.http.client_isolation import in_blocks
from specdec.serving.openai.protocol import SamplingFields
from specdec.serving.state import ServeState
from specdec.text.token_bytes import token_bytes, token_text

MIN_LOGPROB = -9999.0
"""JSON has no infinity."""


def usage_of(prompts: Sequence[Sequence[int]], stats: Sequence[RequestStats], state: ServeState) -> dict[str, Any]:
    """Of all samples, those of a prompt together: a prompt counts once, with the cache hits of its first sample, in
    whole blocks."""
    prompt_len = sum(map(len, prompts))
    completion = sum(one.output_tokens for one in stats)
    page_size = state.engine.config.page_size
    cached = sum(in_blocks(one.cached_tokens, page_size) for one in stats[:: len(stats) // len(prompts)])
    return {
        "prompt_tokens": prompt_len,
        "completion_tokens": completion,
        "total_tokens": prompt_len + completion,
        "prompt_tokens_details": {"cached_tokens": cached} if state.settings.show_cached_tokens else None,
    }


def speculation_of(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """What drafts did for all samples together."""
    total = RequestStats()
    for one in stats:
        total.add(one)
    return {
        "rounds": total.rounds,
        "acceptance_length": total.acceptance_length,
        "accepted_per_position": total.accepted_per_position,
        "prefill_seconds": total.prefill_seconds,
        "draft_seconds": total.draft_seconds,
        "verify_seconds": total.verify_seconds,
        "other_seconds": total.other_seconds,
        "queue_seconds": total.queue_seconds,
        "first_token_seconds": total.first_token_seconds,
    }


def totals(
    body: SamplingFields, prompts: Sequence[Sequence[int]], stats: Sequence[RequestStats], state: ServeState
) -> dict[str, Any]:
    """What an answer says of all its samples: usage, and what speculation did if the request wants it."""
    return {"usage": usage_of(prompts, stats, state)} | (
        {"speculation": speculation_of(stats)} if body.show_drafts else {}
    )


def so_far(body: SamplingFields, prompt: Sequence[int], stats: RequestStats, state: ServeState) -> dict[str, Any]:
    """Of one sample, what a chunk says in addition to its choice, if the request asks for it."""
    fields: dict[str, Any] = {"usage": usage_of([prompt], [stats], state)} if body.continuous_usage else {}
    return fields | ({"speculation": speculation_of([stats])} if body.show_drafts else {})


def chat_logprobs(tokenizer: Any, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The shape of chats."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(token_bytes(tokenizer, token))}

    content = [
        entry(one.token_id, one.logprob) | {"top_logprobs": [entry(*each) for each in one.top.items()]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Any, logprobs: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
    """The shape of completions, and where the text goes on. offset: of the first token in it."""
    tokens = [token_text(tokenizer, one.token_id) for one in logprobs]
    offsets = [offset]
    for text in tokens:
        offsets.append(offsets[-1] + len(text))
    shape = {
        "tokens": tokens,
        "token_logprobs": [max(one.logprob, MIN_LOGPROB) for one in logprobs],
        "top_logprobs": [top_logprobs(tokenizer, text, one) for text, one in zip(tokens, logprobs, strict=True)],
        "text_offset": offsets[:-1],
    }
    return shape, offsets[-1]


def top_logprobs(tokenizer: Any, text: str, one: TokenLogprob, count: int | None = None) -> dict[str, float]:
    """A token's own log-probability and those of the `count` likeliest (None: all), by their text; of tokens with the
    same text, such as parts of characters, the highest."""
    top = {text: max(one.logprob, MIN_LOGPROB)}
    for token, value in list(one.top.items())[:count]:
        other = token_text(tokenizer, token)
        top[other] = max(value, top.get(other, MIN_LOGPROB))
    return top
