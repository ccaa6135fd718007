"""A request and its state in the engine."""

import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from specdec.config import SamplingParams, SpecConfig
from specdec.errors import RequestFailedError, SpecDecError, error_summary, is_fault
from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.prompts.prompt_scores import PromptLogProbs
from specdec.runtime.request_output import GenerationOutput, RequestStats, RowTotals, StreamDelta
from specdec.sampling.grammars.grammar import GrammarState
from specdec.sampling.log_probs import TokenLogprob
from specdec.text.detokenize import Detokenizer, TokenView
from specdec.text.stop_strings import StopStrings

logger = logging.getLogger(__name__)


class RequestState(Enum):
    """State of a request in the scheduler; whether it is finished is `Request.finished`."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


class RequestProgress(NamedTuple):
    """Progress of a request. It is replaced as a whole, so a step either applies to the request fully or not at all.

    num_tokens: prompt and output.
    stats: its figures, except those of the rounds that `row_totals` counts in `row`.
    row_totals: None if no round was settled since the request got its row, or if the output ended within a round.
    reader: decodes the output so far, for stop strings.
    grammar_state: state of its grammar and token rules; None: every token is allowed from here on.
    """

    num_tokens: int
    finish_reason: str
    stats: RequestStats
    reader: Detokenizer
    grammar_state: GrammarState | None
    row_totals: RowTotals | None = None
    row: int = -1


@dataclass(slots=True, eq=False)
class Request:
    """One request. `tokens` are prompt and output; while it decodes, all but the last have K/V.

    After an interrupted step, lists may be longer than `settled`; only the settled part counts.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    detokenizer: Detokenizer
    end_tokens: frozenset[int]
    spec: SpecConfig | None = None  # its draft settings; None: it does not speculate
    first_grammar_state: InitVar[GrammarState | None] = None
    scores: PromptLogProbs | None = None  # log-probabilities of its prompt, shared by its samples; None: not asked for
    id: int = -1  # assigned by the engine in order of arrival
    priority: int = 0  # lower is served first
    times_overtaken: int = 0  # later requests that were admitted while it waited
    state: RequestState = RequestState.WAITING
    row: int = -1
    row_epoch: int = 0  # incremented when the row is lost; results launched under an older one are ignored
    failed_at: int = field(default=-1, init=False)  # tokens reached when a step last raised: see `StepFaults`
    submit_time: float = field(default_factory=time.perf_counter)
    key: IntArray | None = field(default=None, init=False)  # key of its tokens in the prefix cache
    awaited_request: int = field(default=-1, init=False)  # number of the request whose prefix it waits for
    awaited_prefix_len: int = field(default=0, init=False)  # length of that prefix
    max_total_len: int = field(init=False)  # its length if only max_new_tokens ends it
    max_drafts: int = field(init=False)  # most drafts that it can accept in a round
    stops: StopStrings = field(init=False)  # made once, since every round reads them
    error: SpecDecError | None = field(default=None, init=False)  # the error that ended it, if one did
    updated_ids: deque[int] | None = field(default=None, init=False)  # gets its number whenever it gains tokens or ends
    settled: RequestProgress = field(init=False)
    _tokens: list[int] = field(init=False)
    _drafted: list[bool] = field(default_factory=list, init=False)  # as far as the newest round of several tokens
    _logprobs: list[TokenLogprob] = field(default_factory=list, init=False)

    def __post_init__(self, first_grammar_state: GrammarState | None) -> None:
        self._tokens = list(self.prompt)
        self.max_total_len = len(self.prompt) + self.params.max_new_tokens
        self.max_drafts = 0 if self.spec is None else self.spec.depth
        self.stops = self.params.stop_strings
        stats = RequestStats(prompt_tokens=len(self.prompt))
        reader = copy.copy(self.detokenizer)
        self.settled = RequestProgress(len(self.prompt), "", stats, reader, first_grammar_state)

    @property
    def finish_reason(self) -> str:
        """One of "stop", "length", "abort" and "error"; empty until it ends."""
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
    def remaining(self) -> int:
        return self.max_total_len - self.settled.num_tokens

    @property
    def drafted(self) -> list[bool]:
        """Whether each output token came out of an accepted draft."""
        return self._drafted_in(0, self.num_output)

    def _drafted_in(self, start: int, end: int) -> list[bool]:
        flags = self._drafted[start:end]
        return flags + [False] * (end - start - len(flags))

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Log-probability of each output token; None: the request does not ask for them."""
        return None if self.params.logprobs is None else self._logprobs[: self.num_output]

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Log-probability of each prompt token, None where unknown; None: the request does not ask for them."""
        if self.scores is None:
            return None
        scored = zip(self.prompt, self.scores.entries(), strict=True)
        return [None if entry is None else TokenLogprob(token, *entry) for token, entry in scored]

    @property
    def stats(self) -> RequestStats:
        """Its figures so far; a copy, once rounds in its present row have been settled."""
        _, _, stats, _, _, row_totals, row = self.settled
        if row_totals is None:
            return stats
        stats = stats.copy()
        stats.add(row_totals.of_row(row))
        stats.decode_seconds = row_totals.settled_at - self.submit_time - stats.first_token_seconds
        return stats

    @property
    def has_fixed_draft(self) -> bool:
        """Did the request fix its draft, even if another one would pay more?"""
        return self.spec is not None and not self.spec.adaptive

    @property
    def grammar_state(self) -> GrammarState | None:
        """State of its grammar and token rules after the newest token; None: every token is allowed."""
        return self.settled.grammar_state

    @property
    def grammar_ended_it(self) -> bool:
        """Did it end because its grammar allows no next token? An aborted request keeps its place in the grammar."""
        return self.finish_reason == "abort" and self.params.grammar is not None and self.settled.grammar_state is None

    @property
    def forced(self) -> tuple[int, ...]:
        """Next tokens that its grammar forces, at most one fewer than the tokens it may still get."""
        state, remaining = self.grammar_state, self.remaining
        return () if state is None or remaining < 2 else state.forced[: remaining - 1]

    @property
    def prefill_target(self) -> int:
        """Tokens whose K/V prefill must make: the prompt, or after a preemption all but the newest token."""
        return len(self.prompt) if self.num_output == 0 else self.settled.num_tokens - 1

    @property
    def max_cached(self) -> int:
        """Upper bound on the tokens whose K/V it may adopt from the prefix cache: it must compute the last token's
        state, and the states for its prompt's scores."""
        if self.scores is None or self.scores.complete:
            return self.prefill_target - 1
        return self.scores.known - 1

    def assign_row(self, row: int) -> None:
        """The request gets this row. Next, its prompt is read."""
        self.row, self.state = row, RequestState.PREFILL
        if self.stats.queue_seconds == 0.0:  # the first time, not after a preemption
            self.stats.queue_seconds = time.perf_counter() - self.submit_time

    def lose_row(self) -> None:
        """It waits, without a row. Results of launches that used the old row are ignored."""
        self.settled = self.settled._replace(stats=self.stats, row_totals=None)
        self.row, self.state = -1, RequestState.WAITING
        self.row_epoch += 1

    def settle(
        self,
        emitted: Sequence[int],
        logprobs: Sequence[TokenLogprob] = (),
        row_totals: RowTotals | None = None,
        num_drafts: int = 0,
        num_forced: int = 0,
    ) -> None:
        """Append emitted tokens until a stop condition. The last of `emitted` is not a draft.

        row_totals: after this round, for a request that takes all tokens; None: the token comes after a prompt.
        num_drafts: depth of the drafts that it could accept. num_forced: how many first tokens the grammar forced.
        """
        start, _, stats, reader, state, _, _ = self.settled
        tokens, stops, max_total_len = self._tokens, self.stops, self.max_total_len
        if len(tokens) > start:  # left over from an interrupted step
            kept = start - len(self.prompt)
            del tokens[start:], self._drafted[kept:], self._logprobs[kept:]
        if stops:
            reader = copy.copy(reader)  # the settled reader must not advance yet
        finish_reason, taken, called = "", 0, "grammar"
        if start >= max_total_len:  # only its prompt was to be scored
            finish_reason, emitted = "length", ()
        try:
            if state is not None and state.fault is not None:  # raised while these tokens' masks were computed
                raise state.fault
            for token in emitted:
                called = "grammar"
                if state is not None and (state := state.after(token)) is None:
                    logger.warning("request %d ends here: its grammar allows no next token", self.id)
                    finish_reason = "abort"
                    break
                taken += 1
                tokens.append(token)
                called = "tokenizer"
                if token in self.end_tokens or (stops and self._found_stop(reader)):
                    finish_reason = "stop"
                    break
                if start + taken >= max_total_len:
                    finish_reason = "length"
                    break
        except BaseException as error:
            if not is_fault(error):
                raise
            self.fail(called, error)
            return
        if len(emitted) > 1:
            earlier = [False] * (start - len(self.prompt) - len(self._drafted))
            self._drafted += earlier + [num_forced < i < len(emitted) for i in range(1, taken + 1)]
        if logprobs:
            self._logprobs += logprobs[:taken]
        if row_totals is None or taken < len(emitted):
            stats, row_totals = self._stats_after(row_totals, taken, num_drafts, num_forced), None
        if state is not None and state.free:
            state = None
        now = start + taken, finish_reason, stats, reader, state, row_totals, self.row
        self.settled = tuple.__new__(RequestProgress, now)  # the constructor takes twice as long
        if self.updated_ids is not None:
            self.updated_ids.append(self.id)

    def _found_stop(self, reader: Detokenizer) -> bool:
        return reader.find_stop(TokenView(self._tokens, len(self.prompt), len(self._tokens)), self.stops)

    def _stats_after(self, row_totals: RowTotals | None, taken: int, num_drafts: int, num_forced: int) -> RequestStats:
        """The request's figures after the token drawn at the end of a prefill, or after a round of which it took only
        the first `taken` tokens."""
        stats, seconds = self.stats.copy(), time.perf_counter() - self.submit_time
        if self.num_output == 0:
            stats.first_token_seconds = seconds
        stats.decode_seconds = seconds - stats.first_token_seconds
        stats.output_tokens += taken
        if row_totals is None:
            return stats
        stats.add(row_totals.of_last_round(taken, num_drafts, num_forced))
        return stats

    def fail(self, called: str, error: BaseException) -> None:
        """End it after an error in its "grammar" or "tokenizer" (`called`)."""
        logger.warning("request %d ends here: its %s raised an error", self.id, called, exc_info=error)
        self.end("error", _failed(called, error))

    def end(self, finish_reason: str, error: SpecDecError | None = None) -> None:
        """End it with the tokens it has, unless it has ended."""
        if not self.finished:
            self.error = error
            self.settled = self.settled._replace(finish_reason=finish_reason)
        if self.updated_ids is not None:
            self.updated_ids.append(self.id)

    def require_whole(self) -> None:
        """Raise the error that ended it, if one did."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    def read(self, start: int, reader: Detokenizer) -> StreamDelta:
        """Its settled output from token `start` on, with the text that `reader` has not returned yet."""
        settled, first = self.settled, len(self.prompt)
        end, finished = settled.num_tokens, bool(settled.finish_reason)
        new = slice(first + start, end)
        text = _decoded(reader.stream, TokenView(self._tokens, first, end), self.stops, finished=finished)
        return StreamDelta(
            text,
            self._tokens[new],
            self._drafted_in(start, end - first),
            self.output(reader) if finished else None,
            None if self.params.logprobs is None else self._logprobs[start : end - first],
        )

    def output(self, reader: Detokenizer | None = None) -> GenerationOutput:
        """The whole output. Raises RequestFailedError if the tokenizer raises."""
        text = _decoded((reader or self.detokenizer).final_text, self.output_ids, self.stops)
        return GenerationOutput(
            prompt_token_ids=list(self.prompt),
            token_ids=self.output_ids,
            text=text,
            finish_reason=self.finish_reason,
            stats=self.stats,
            drafted=self.drafted,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


def table_rows(requests: Sequence[Request]) -> IntArray:
    """Rows of these requests, [B]."""
    return np.array([request.row for request in requests], dtype=np.int64)


def restricted(requests: Sequence[Request]) -> list[Request]:
    """The requests with a `grammar_state`: only some tokens are allowed next."""
    return [request for request in requests if request.settled.grammar_state is not None]


def _failed(called: str, error: BaseException) -> RequestFailedError:
    """Make the error without the original exception, whose frames hold tensors."""
    return RequestFailedError(f"the {called} raised an error in this request: {error_summary(error)}")


def _decoded(decode: Callable[..., str], *args: Any, **options: Any) -> str:
    """Decode tokens. Raises RequestFailedError if the tokenizer raises."""
    try:
        return decode(*args, **options)
    except BaseException as error:
        if not is_fault(error):
            raise
        raise _failed("tokenizer", error) from error
