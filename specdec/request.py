"""A request on its way through the engine, and what the user gets back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from specdec.config import SamplingParams
from specdec.text.detokenize import Detokenizer


class TokenLogprob(NamedTuple):
    """Log-probability of an emitted token under the unmodified logits, and of the most likely alternatives."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class RequestStats:
    """What speculation did for one request, or (summed) for many.

    `accepted_counts[i]`: rounds in which draft i + 1 was emitted. Seconds are a request's share of its batch's time.
    """

    rounds: int = 0
    round_tokens: int = 0
    accepted_counts: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target forward after prefill, the bonus included (0 before the first round)."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Share of rounds in which each draft position was accepted."""
        return [count / self.rounds for count in self.accepted_counts] if self.rounds else []

    def record_round(self, emitted: int, accepted: int, num_drafts: int) -> None:
        """A verify emitted that many tokens, the first `accepted` of them out of drafts `num_drafts` deep."""
        self.rounds += 1
        self.round_tokens += emitted
        self.accepted_counts += [0] * (max(num_drafts, accepted) - len(self.accepted_counts))
        for i in range(accepted):
            self.accepted_counts[i] += 1

    def add(self, other: "RequestStats", sign: int = 1) -> None:
        """Sum another request's figures into this one (`sign=-1` takes them out again)."""
        longest = max(len(self.accepted_counts), len(other.accepted_counts))
        mine, theirs = (
            counts + [0] * (longest - len(counts)) for counts in (self.accepted_counts, other.accepted_counts)
        )
        self.accepted_counts = [a + sign * b for a, b in zip(mine, theirs, strict=True)]
        for name in ("rounds", "round_tokens", "prompt_tokens", "output_tokens", "preemptions"):
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))
        for name in ("prefill_seconds", "draft_seconds", "verify_seconds", "other_seconds"):
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """One finished request.

    token_ids end with the stop token if there was one, or with the token that completes a stop string; `text` has
    special tokens removed and ends before a stop string.
    finish_reason: "stop" (an end token or string), "length" (max_new_tokens), "abort" (the consumer went away).
    drafted: per token, whether it came out of an accepted draft.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: RequestStats
    drafted: list[bool]
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What one round added to a streamed request; `output` comes with the last one."""

    text: str
    token_ids: list[int]
    drafted: list[bool]
    output: GenerationOutput | None = None

    @property
    def finish_reason(self) -> str | None:
        return self.output.finish_reason if self.output else None


class RequestState(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one request. `tokens` are prompt and output; all but the last have K/V while it decodes."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    detokenizer: Detokenizer
    end_tokens: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    row: int = -1
    finish_reason: str = ""
    stats: RequestStats = field(default_factory=RequestStats)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.stats.prompt_tokens = len(self.prompt)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def prefill_target(self) -> int:
        """Tokens whose K/V prefill must make: the prompt, or after a preemption all but the newest token."""
        return len(self.prompt) if self.num_output == 0 else len(self.tokens) - 1

    def append(self, tokens: Sequence[int]) -> int:
        """Take emitted tokens until a stop condition; the last one given is no draft. Returns how many were taken."""
        for taken, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            self.drafted.append(taken < len(tokens))
            self.stats.output_tokens += 1
            if self._stops(token):
                self.state = RequestState.FINISHED
                return taken
        return len(tokens)

    def _stops(self, token: int) -> bool:
        stops = self.params.stop_strings
        if token in self.end_tokens or (stops and self.detokenizer.find_stop(self.tokens, stops, len(self.prompt))):
            self.finish_reason = "stop"
        elif self.num_output >= self.params.max_new_tokens:
            self.finish_reason = "length"
        return bool(self.finish_reason)

    def output(self) -> GenerationOutput:
        return GenerationOutput(
            prompt_token_ids=list(self.prompt),
            token_ids=self.output_ids,
            text=self.detokenizer.final_text(self.output_ids, self.params.stop_strings),
            finish_reason=self.finish_reason,
            stats=self.stats,
            drafted=list(self.drafted),
            logprobs=list(self.logprobs) if self.params.logprobs is not None else None,
        )
