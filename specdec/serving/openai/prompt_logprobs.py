"""The log-probabilities of a prompt's tokens, as answers have them: OpenAI's completions with `echo`, and vLLM's
`prompt_logprobs`.

It knows token ids, their texts and numbers, and no request. Decoding a long prompt token by token takes long, so its
functions are called on another thread than the event loop's.
"""

from collections.abc import Sequence
from typing import Any

from specdec.sampling.log_probs import TokenLogprob
from specdec.serving.openai.usage import MIN_LOGPROB, top_logprobs
from specdec.text.detokenize import REPLACEMENT
from specdec.text.token_bytes import token_text

Scores = Sequence[TokenLogprob | None]
"""One for each token of a prompt; None for the first."""


def echoed_logprobs(tokenizer: Any, ids: Sequence[int], text: str, scores: Scores, count: int) -> dict[str, Any]:
    """The shape of completions for a prompt `ids` that is echoed as `text`, with `count` alternatives a token."""
    tokens = [token_text(tokenizer, token) for token in ids]
    offsets = text_offsets(tokens, text)
    scored = list(zip(tokens, scores, strict=True))
    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else max(one.logprob, MIN_LOGPROB) for _, one in scored],
        "top_logprobs": [None if one is None else top_logprobs(tokenizer, said, one, count) for said, one in scored],
        "text_offset": offsets,
    }


def text_offsets(tokens: Sequence[str], text: str) -> list[int]:
    """Where each token begins in the text of all, given each one's text by itself.

    What is not in the text, as special tokens are not, takes no room there. Parts of a character stand where it does;
    the next token says where it ends.
    """
    offsets, at, parts = [], 0, 0  # parts: tokens since `at` that are parts of characters
    for token in tokens:
        shifts = range(1, parts + 1) if parts else (0, 1)
        shift = next((shift for shift in shifts if token and text.startswith(token, at + shift)), None)
        if shift == 1 and not parts and text[at] != " ":  # decoding one token alone leaves out a space, and no more
            shift = None
        if shift is None:
            offsets.append(at)
            parts += REPLACEMENT in token
            continue
        offsets.append(at + shift if parts else at)
        at, parts = at + shift + len(token), 0
    return offsets


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two of the shape of completions, one after the other."""
    return {name: [*first[name], *second[name]] for name in first}


def vllm_prompt_logprobs(tokenizer: Any, scores: Scores, count: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: of each token but the first, by token id, itself and the `count` likeliest.

    rank: 1 for the likeliest; None for a token that is not among the `count` likeliest.
    """

    def entry(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {
            "logprob": max(logprob, MIN_LOGPROB),
            "rank": rank,
            "decoded_token": token_text(tokenizer, token),
        }

    listed: list[dict[str, Any] | None] = []
    for one in scores:
        if one is None:
            listed.append(None)
            continue
        best = list(one.top.items())[:count]
        entries = {str(one.token_id): entry(one.token_id, one.logprob, None)}
        entries |= {str(token): entry(token, value, rank) for rank, (token, value) in enumerate(best, start=1)}
        listed.append(entries)
    return listed
