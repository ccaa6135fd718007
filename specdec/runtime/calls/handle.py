"""The caller's handle of a submitted request: new tokens, the whole output, and aborting.

    read()                  the new tokens since the last read, or None; never steps the engine
    for delta in handle     the same, stepping the engine while nothing is new
    output()                the whole output, stepping the engine until the request has ended

It knows a request's tokens and no slots. Invariant: every token is in exactly one delta, whichever thread reads it, and
the last delta carries the output. A read costs time only for new tokens, so reading a long output takes linear time.
"""

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator

from specdec.errors import SpecDecError
from specdec.runtime.request import Request
from specdec.runtime.request_output import GenerationOutput, RequestStats, StreamDelta
from specdec.sampling.log_probs import TokenLogprob


class Handle:
    """One submitted request; `Engine.submit` makes it. Dropping the handle does not abort the request.

    An error in a step is raised to the caller that ran the step; the request continues with the next step as if that
    one had not begun. The request ends with the reason "error" if its own tokenizer or grammar raised, or if an error
    names its row: then only this handle's `read`, iteration and `output` raise RequestFailedError. They raise
    RoundFailedError if steps failed repeatedly and this was the newest request. Closing the engine ends it with
    "abort".
    """

    def __init__(self, request: Request, advance: Callable[[Request], None], abort: Callable[[int], None]) -> None:
        self._request = request
        self._advance = advance
        self._abort = abort
        self._lock = threading.Lock()
        self._sent = 0  # tokens handed out
        self._read_all = False  # the last delta was read too

    @property
    def id(self) -> int:
        """Number of the request, for `Engine.abort`. Ids of an engine rise in order of arrival."""
        return self._request.id

    @property
    def finished(self) -> bool:
        """The request has ended. It may still have unread tokens."""
        return self._request.finished

    @property
    def finish_reason(self) -> str:
        """One of "stop", "length", "abort" and "error"; empty until it ends."""
        return self._request.finish_reason

    @property
    def error(self) -> SpecDecError | None:
        """The error that ended it, if it failed or its engine was closed; else None."""
        return self._request.error

    @property
    def dead_grammar(self) -> str | None:
        """The grammar that ended the request because it allows no next token; None: no grammar did."""
        return self._request.params.grammar if self._request.grammar_ended_it else None

    @property
    def num_output(self) -> int:
        """Output tokens so far, read or not."""
        return self._request.num_output

    @property
    def stats(self) -> RequestStats:
        """The request's figures so far: speculation, prefix cache, waiting."""
        return self._request.stats

    @property
    def max_drafts(self) -> int:
        """Most drafts that the request can accept in a round; 0: it does not speculate."""
        return self._request.max_drafts

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Log-probability of each prompt token, None where it is not known yet; None: the request does not ask for
        them. All are known with the first token of the output."""
        return self._request.prompt_logprobs

    def read(self) -> StreamDelta | None:
        """Tokens and text since the last read, with the output if they are the last; None: there are none."""
        with self._lock:
            request = self._request
            if request.finish_reason == "error":
                request.require_whole()
            if self._read_all or not (request.finished or request.num_output > self._sent):
                return None
            reader = copy.copy(request.detokenizer)  # an interrupted read must change nothing
            try:
                delta = request.read(self._sent, reader)
            except SpecDecError:
                self._abort(self.id)  # its text cannot be decoded any further
                raise
            request.detokenizer = reader
            self._sent, self._read_all = self._sent + len(delta.token_ids), delta.output is not None
            return delta

    def report_to(self, news: "deque[int]") -> None:
        """Append the request's id to `news` now, and whenever it gains tokens or ends."""
        self._request.updated_ids = news
        news.append(self.id)

    def __iter__(self) -> Iterator[StreamDelta]:
        return self

    def __next__(self) -> StreamDelta:
        while (delta := self.read()) is None:
            if self._read_all:
                raise StopIteration
            self._advance(self._request)
        return delta

    def output(self) -> GenerationOutput:
        """Step until the request has ended and return the whole output. `read` still returns every token."""
        while not self._request.finished:
            self._advance(self._request)
        if self._request.finish_reason == "error":
            self._request.require_whole()
        return self._request.output()

    def abort(self) -> None:
        """End the request with the tokens it has: see `Engine.abort`."""
        self._abort(self.id)
