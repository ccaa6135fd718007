"""What a caller holds of a submitted request: what is new, the whole output, and the way out.

    read()              what is new since the last read, or None; never steps the engine
    for delta in handle     the same, stepping the engine while nothing is new
    output()            all of it, stepping the engine until the request has ended

It knows a request's tokens and nothing of slots. Invariant: every token is in one delta, whichever thread reads it, and
the last delta carries the output.
"""

import threading
from collections.abc import Callable, Iterator

from specdec.request import GenerationOutput, Request, RequestStats, StreamDelta


class Handle:
    """One submitted request; `Engine.submit` makes it. Letting go of it does not abort the request.

    An error in a step is raised to whoever stepped; the request goes on with the next step, as if that one had not
    begun.
    """

    def __init__(self, request: Request, advance: Callable[[Request], None], abort: Callable[[int], None]) -> None:
        self._request = request
        self._advance = advance
        self._abort = abort
        self._lock = threading.Lock()
        self._sent = 0  # tokens handed out
        self._read_all = False  # the last delta too

    @property
    def id(self) -> int:
        """What `Engine.abort` takes; ids of an engine go up in order of arrival."""
        return self._request.number

    @property
    def finished(self) -> bool:
        """The request has ended. There may still be something to read."""
        return self._request.finished

    @property
    def finish_reason(self) -> str:
        """One of "stop", "length" and "abort"; empty while it goes on."""
        return self._request.finish_reason

    @property
    def num_output(self) -> int:
        """Tokens so far, read or not."""
        return self._request.num_output

    @property
    def stats(self) -> RequestStats:
        """What speculation has done for it so far."""
        return self._request.stats

    def read(self) -> StreamDelta | None:
        """What is new since the last read, the output with the last of it; None: nothing."""
        with self._lock:
            request = self._request
            finished = request.finished  # before the tokens: another thread may add some now
            if self._read_all or not (finished or request.num_output > self._sent):
                return None
            tokens, drafted, logprobs = request.output_ids, request.drafted, request.logprobs
            text = request.detokenizer.stream(tokens, request.params.stop_strings, finished=finished)
            new = slice(self._sent, len(tokens))
            self._sent, self._read_all = len(tokens), finished
            output = request.output() if finished else None
            return StreamDelta(text, tokens[new], drafted[new], output, None if logprobs is None else logprobs[new])

    def __iter__(self) -> Iterator[StreamDelta]:
        return self

    def __next__(self) -> StreamDelta:
        while (delta := self.read()) is None:
            if self._read_all:
                raise StopIteration
            self._advance(self._request)
        return delta

    def output(self) -> GenerationOutput:
        """The whole output, once it has ended; takes nothing from what `read` hands out."""
        while not self._request.finished:
            self._advance(self._request)
        return self._request.output()

    def abort(self) -> None:
        """End it as it is: see `Engine.abort`."""
        self._abort(self.id)
