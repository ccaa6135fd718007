"""A request on its way through the engine, and what the user gets back."""

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from specdec.config import SamplingParams, SpecConfig
from specdec.kvcache.mirror import IntArray
from specdec.text.detokenize import Detokenizer
from specdec.text.grammar import Place

logger = logging.getLogger(__name__)


class TokenLogprob(NamedTuple):
    """Log-probability of an emitted token under the unmodified logits, and of the most likely alternatives."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class RequestStats:
    """What speculation did for one request, or (summed) for many.

    `accepted_counts[i]`: rounds in which draft i + 1 was emitted. `drafted_rounds`: those that had drafts, and
    `draft_tokens`: how deep these were, summed. `forced_tokens`: those that a grammar left no choice for, and that
    stood in the place of drafts in `forced_rounds`. `cached_tokens`: prompt tokens whose K/V came out of the prefix
    cache. Seconds are a request's share of its batch's time; but queue and first_token are from when it was
    handed in until it had a row, and its first token.
    """

    rounds: int = 0
    round_tokens: int = 0
    drafted_rounds: int = 0
    draft_tokens: int = 0
    accepted_counts: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    forced_tokens: int = 0
    forced_rounds: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target forward after prefill, the bonus included (0 before the first round)."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Share of the rounds with drafts in which each draft position was accepted."""
        drafted = self.rounds - self.forced_rounds
        return [count / drafted for count in self.accepted_counts] if drafted else []

    def copy(self) -> "RequestStats":
        """These figures alone. Every round makes one for every request, so not by `replace`, which takes long."""
        twin = RequestStats(*_FIGURES(self))
        twin.accepted_counts = list(twin.accepted_counts)
        return twin

    def record_round(self, emitted: int, accepted: int, num_drafts: int) -> None:
        """A verify emitted that many tokens, the first `accepted` of them out of drafts `num_drafts` deep."""
        self.rounds += 1
        self.round_tokens += emitted
        self.drafted_rounds += num_drafts > 0
        self.draft_tokens += num_drafts
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
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))


_NAMES = tuple(each.name for each in fields(RequestStats))
_FIGURES = attrgetter(*_NAMES)
_SUMS = tuple(name for name in _NAMES if name != "accepted_counts")


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
    """What rounds added to a streamed request since the last delta; `output` comes with the last one.

    logprobs: of its tokens, if the request asks for them.
    """

    text: str
    token_ids: list[int]
    drafted: list[bool]
    output: GenerationOutput | None = None
    logprobs: list[TokenLogprob] | None = None

    @property
    def finish_reason(self) -> str | None:
        return self.output.finish_reason if self.output else None


class RequestState(Enum):
    """Where the scheduler has a request; whether it is finished is `Request.finished`."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


class Settled(NamedTuple):
    """How far a request has come, replaced as a whole: a step either happened to it or did not.

    num_tokens: prompt and output. reader: the output's text so far, where stop strings are looked for. place: in its
    grammar, None: it has none.
    """

    num_tokens: int
    finish_reason: str
    stats: RequestStats
    reader: Detokenizer
    place: Place | None


@dataclass(slots=True, eq=False)
class Request:
    """One request. Prompt and output are its tokens; all but the last have K/V while it decodes.

    Lists may run ahead of `settled` when a step was interrupted; only what is settled counts.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    detokenizer: Detokenizer
    end_tokens: frozenset[int]
    draft: SpecConfig | None = None  # how it speculates; None: not at all
    begins: InitVar[Place | None] = None  # in its grammar
    number: int = -1  # in order of arrival, from the engine
    priority: int = 0  # lower ones first
    passed: int = 0  # how often one that came later was admitted while it waited
    state: RequestState = RequestState.WAITING
    row: int = -1
    tenure: int = 0  # rows it has had and lost: what was launched under another is not its any more
    handed_in: float = field(default_factory=time.perf_counter)
    key: IntArray | None = field(default=None, init=False)  # of its tokens in the prefix cache
    awaited: int = field(default=-1, init=False)  # number of the request that makes a part of its prompt
    settled: Settled = field(init=False)
    _tokens: list[int] = field(init=False)
    _drafted: list[bool] = field(default_factory=list, init=False)
    _logprobs: list[TokenLogprob] = field(default_factory=list, init=False)

    def __post_init__(self, begins: Place | None) -> None:
        self._tokens = list(self.prompt)
        stats = RequestStats(prompt_tokens=len(self.prompt))
        self.settled = Settled(len(self.prompt), "", stats, copy.copy(self.detokenizer), begins)

    @property
    def finish_reason(self) -> str:
        """One of "stop", "length" and "abort"; empty while it goes on."""
        return self.settled.finish_reason

    @property
    def finished(self) -> bool:
        return bool(self.settled.finish_reason)

    @property
    def tokens(self) -> list[int]:
        return self._tokens[: self.settled.num_tokens]

    @property
    def output_ids(self) -> list[int]:
        return self._tokens[len(self.prompt) : self.settled.num_tokens]

    @property
    def num_output(self) -> int:
        return self.settled.num_tokens - len(self.prompt)

    @property
    def drafted(self) -> list[bool]:
        """Of each output token, whether it came out of an accepted draft."""
        return self._drafted[: self.num_output]

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Of each output token; None: nobody asked."""
        return None if self.params.logprobs is None else self._logprobs[: self.num_output]

    @property
    def stats(self) -> RequestStats:
        return self.settled.stats

    @property
    def max_drafts(self) -> int:
        """Most drafts that it accepts in a round."""
        return 0 if self.draft is None else self.draft.depth

    @property
    def place(self) -> Place | None:
        """In its grammar, behind the newest token; None: it has none."""
        return self.settled.place

    @property
    def forced(self) -> tuple[int, ...]:
        """Tokens that must come next, as many as a round can bring beside one more."""
        place, to_go = self.settled.place, self.params.max_new_tokens - self.num_output
        return () if place is None or to_go < 2 else place.forced[: to_go - 1]

    @property
    def prefill_target(self) -> int:
        """Tokens whose K/V prefill must make: the prompt, or after a preemption all but the newest token."""
        return len(self.prompt) if self.num_output == 0 else self.settled.num_tokens - 1

    def seat(self, row: int) -> None:
        """It has this row now, and its prompt is to be read."""
        self.row, self.state = row, RequestState.PREFILL
        if self.stats.queue_seconds == 0.0:  # the first time, not behind a preemption
            self.stats.queue_seconds = time.perf_counter() - self.handed_in

    def settle(
        self,
        emitted: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        stats: RequestStats,
        *,
        num_drafts: int | None = None,
        num_forced: int = 0,
    ) -> None:
        """Take emitted tokens until a stop condition; the last one given is no draft.

        stats: its figures so far (a copy, changed here); num_drafts: how deep the drafts of this round were, None for
        the token behind a prompt; num_forced: so many of the first were no drafts, but the grammar's.
        """
        start, _, _, reader, place = self.settled
        prompt_len, tokens, stops = len(self.prompt), self._tokens, self.params.stop_strings
        kept, longest = start - prompt_len, prompt_len + self.params.max_new_tokens
        del tokens[start:], self._drafted[kept:], self._logprobs[kept:]  # of a step that was interrupted
        if stops:
            reader = copy.copy(reader)  # that of what is settled does not move
        finish_reason, taken = "", 0
        for token in emitted:
            if place is not None and (place := place.after(token)) is None:
                logger.warning("request %d ends here: its grammar cannot go on with any token", self.number)
                finish_reason = "abort"
                break
            taken += 1
            tokens.append(token)
            self._drafted.append(num_forced < taken < len(emitted))
            if token in self.end_tokens or (stops and reader.find_stop(tokens, stops, prompt_len)):
                finish_reason = "stop"
                break
            if len(tokens) >= longest:
                finish_reason = "length"
                break
        self._logprobs += logprobs[:taken]
        if kept == 0:
            stats.first_token_seconds = time.perf_counter() - self.handed_in
        stats.output_tokens += taken
        if num_drafts is not None:
            drafts = (0, 0) if num_forced else (min(taken, len(emitted) - 1), num_drafts)
            stats.record_round(taken, *drafts)
            stats.forced_tokens += min(taken, num_forced)
            stats.forced_rounds += num_forced > 0
        self.settled = Settled(start + taken, finish_reason, stats, reader, place)

    def abort(self) -> None:
        """End it as it is, if it has not ended."""
        if not self.finished:
            self.settled = self.settled._replace(finish_reason="abort")

    def output(self) -> GenerationOutput:
        return GenerationOutput(
            prompt_token_ids=list(self.prompt),
            token_ids=self.output_ids,
            text=self.detokenizer.final_text(self.output_ids, self.params.stop_strings),
            finish_reason=self.finish_reason,
            stats=self.stats,
            drafted=self.drafted,
            logprobs=self.logprobs,
        )
