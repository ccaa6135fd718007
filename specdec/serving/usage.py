"""What an answer says of its tokens: usage, why it ended, log-probabilities, and what speculation did."""

from collections.abc import Sequence
from typing import Any

from specdec.errors import SpecDecError
from specdec.request import GenerationOutput, RequestStats, StreamDelta, TokenLogprob
from specdec.text.detokenize import Detokenizer

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


def usage_of(prompts: Sequence[Sequence[int]], stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Of all samples, those of a prompt together: a prompt counts once, with the cache hits of its first sample."""
    prompt_len = sum(map(len, prompts))
    completion = sum(one.output_tokens for one in stats)
    cached = sum(one.cached_tokens for one in stats[:: len(stats) // len(prompts)])
    return {
        "prompt_tokens": prompt_len,
        "completion_tokens": completion,
        "total_tokens": prompt_len + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finish_reason(output: GenerationOutput) -> str:
    """ "stop" or "length". Raises SpecDecError for a request that somebody else ended."""
    if output.finish_reason == "abort":
        raise SpecDecError("this answer was ended before its end; the server is stopping")
    return output.finish_reason


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


class DraftColours:
    """The text of one sample in pieces, each with whether it came out of accepted drafts; joined they are the text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._reader = Detokenizer(tokenizer)
        self._stops = stops
        self._ids: list[int] = []

    def read(self, delta: StreamDelta) -> list[list[Any]]:
        """[[text, drafted], ...] of the tokens of this delta, as far as their text is settled."""
        pieces: list[list[Any]] = []
        last = len(delta.token_ids) - 1
        for place, (token, drafted) in enumerate(zip(delta.token_ids, delta.drafted, strict=True)):
            self._ids.append(token)
            finished = delta.output is not None and place == last
            text = self._reader.stream(self._ids, self._stops, finished=finished)
            if text and pieces and pieces[-1][1] == drafted:
                pieces[-1][0] += text
            elif text:
                pieces.append([text, drafted])
        return pieces


def chat_logprobs(tokenizer: Any, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The shape of chats."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(text.encode())}

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
    tops = []
    for text, one in zip(tokens, logprobs, strict=True):
        top = {token_text(tokenizer, token): max(value, LEAST_LOGPROB) for token, value in one.top.items()}
        tops.append({text: max(one.logprob, LEAST_LOGPROB)} | top)
    shape = {
        "tokens": tokens,
        "token_logprobs": [max(one.logprob, LEAST_LOGPROB) for one in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets[:-1],
    }
    return shape, offsets[-1]


def token_text(tokenizer: Any, token: int) -> str:
    """One token by itself, special ones written out."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return text
