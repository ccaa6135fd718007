"""Shapes of log-probabilities in answers: for chats, for completions, and vLLM's `prompt_logprobs`.

It knows token ids, texts and numbers, but no request. Decoding a long prompt token by token is slow, so functions for
prompts are called on another thread than the event loop's.
"""

from collections.abc import Sequence
from typing import Any

from specdec.sampling.log_probs import TokenLogprob
from specdec.text.detokenize import REPLACEMENT, token_bytes, token_text

MIN_LOGPROB = -9999.0
"""JSON has no infinity."""
Scores = Sequence[TokenLogprob | None]
"""One entry per prompt token; None for the first."""


def chat_logprobs(tokenizer: Any, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities in the shape for chats."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(token_bytes(tokenizer, token))}

    content = [
        entry(one.token_id, one.logprob) | {"top_logprobs": [entry(*each) for each in one.top.items()]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def echoed_logprobs(tokenizer: Any, ids: Sequence[int], text: str, scores: Scores, count: int) -> dict[str, Any]:
    """The shape for completions, for a prompt `ids` that is echoed as `text`, with `count` alternatives per token."""
    tokens = [token_text(tokenizer, token) for token in ids]
    return completion_logprobs(tokenizer, tokens, scores, text_offsets(tokens, text), count)


def completion_logprobs(
    tokenizer: Any, tokens: Sequence[str], scores: Scores, offsets: list[int], count: int | None = None
) -> dict[str, Any]:
    """Log-probabilities in the shape for completions. tokens: the text of each. offsets: the index of its first
    character in the whole text. count: alternatives per token; None: all."""

    def top(text: str, one: TokenLogprob) -> dict[str, float]:
        """Log-probabilities by text. Tokens with the same text, such as parts of characters, share the highest."""
        found = {text: max(one.logprob, MIN_LOGPROB)}
        for token, value in list(one.top.items())[:count]:
            other = token_text(tokenizer, token)
            found[other] = max(value, found.get(other, MIN_LOGPROB))
        return found

    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else max(one.logprob, MIN_LOGPROB) for one in scores],
        "top_logprobs": [None if one is None else top(token, one) for token, one in zip(tokens, scores, strict=True)],
        "text_offset": offsets,
    }


def text_offsets(tokens: Sequence[str], text: str) -> list[int]:
    """Offsets of tokens in the whole text, given the text of each token alone.

    Tokens that are not in the text (special tokens) take no room. Parts of a character have the character's offset; the
    next token shows where it ends.
    """
    offsets, at, parts = [], 0, 0  # parts: tokens since `at` that are parts of a character
    for token in tokens:
        shifts = range(1, parts + 1) if parts else (0, 1)
        shift = next((shift for shift in shifts if token and text.startswith(token, at + shift)), None)
        if shift == 1 and not parts and text[at] != " ":  # decoding a token alone drops only a space
            shift = None
        if shift is None:
            offsets.append(at)
            parts += REPLACEMENT in token
            continue
        offsets.append(at + shift if parts else at)
        at, parts = at + shift + len(token), 0
    return offsets


def vllm_prompt_logprobs(tokenizer: Any, scores: Scores, count: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token except the first, entries by token id for itself and the `count`
    likeliest.

    rank: 1 for the likeliest; None for a token that is not among the `count` likeliest.
    """

    def entry(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": token_text(tokenizer, token)}

    def entries(one: TokenLogprob) -> dict[str, Any]:
        best = enumerate(list(one.top.items())[:count], start=1)
        return {str(one.token_id): entry(one.token_id, one.logprob, None)} | {
            str(token): entry(token, value, rank) for rank, (token, value) in best
        }

    return [None if one is None else entries(one) for one in scores]
