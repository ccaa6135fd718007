"""An engine for asyncio: one thread steps it, and any number of tasks on any event loops read new tokens.

async for delta in engine.stream(prompt, params): ...          leaving the loop, or the task, aborts
outputs = await engine.generate(prompts, params)               all samples of each prompt together
async with await engine.submit(prompts, params) as streams:    several samples at once: (index, delta)
"""

import asyncio
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from os import PathLike
from typing import Any, NoReturn, TypeVar

from torch import nn
from transformers import PreTrainedModel

from specdec.config import SamplingParams
from specdec.draft_models.base import Drafter
from specdec.engine import Engine
from specdec.errors import ENGINE_CLOSED, SpecDecError, StoppingError
from specdec.models.weight_storage import weights_in_words
from specdec.runtime.calls.arguments import known_keywords, params_for, require_one_request, require_type
from specdec.runtime.engine_stats import EngineStats
from specdec.runtime.request_output import GenerationOutput, StreamDelta
from specdec.serving.admission import Admission, TextBound
from specdec.serving.engine_thread import MAX_FAILED_ROUNDS, EngineThread, Observer, OpenSample, Streams
from specdec.serving.fair_pool import CLIENT, FairPool, wait_for
from specdec.settings.declared_fields import require_int, require_number
from specdec.text.prompts import Prompt, as_prompt_list, text_ids

T = TypeVar("T")
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
"""Parameters for all prompts, or one for each."""
INTAKE_THREADS = 4
"""Number of threads that read prompts, and of threads that compile grammars."""
INTAKE_SECONDS = 30.0


class AsyncEngine:
    """Serves an engine to asyncio callers: an existing one, or its own (`from_pretrained`).

    max_waiting: how many requests may wait in addition to the running ones (`max_batch_size`); further ones get
    QueueFullError. intake_seconds: time limit for reading a prompt or compiling a grammar. per_client: most open
    samples of one client; 0: no limit.

    If rounds fail twice without progress, their newest request fails with RoundFailedError, and the others continue. A
    fork of the process cannot use the engine.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 256,
        intake_seconds: float = INTAKE_SECONDS,
        per_client: int = 0,
    ) -> None:
        require_type("engine", engine, Engine)
        require_int("max_waiting", max_waiting, 0, 1 << 30)
        require_int("per_client", per_client, 0, 1 << 30)
        require_number("intake_seconds", intake_seconds, 0.0, open_low=True)
        self.engine = engine
        self.config, self.spec = engine.config, engine.spec
        self.tokenizer: Any = engine.tokenizer
        self.drafter: Drafter | None = engine.drafter
        self.max_model_len: int = engine.max_model_len  # tokens of a prompt plus its output
        self.vocab_size: int = engine.target.vocab_size
        self.kv_bytes: int = engine.kv_bytes  # of all K/V pools together
        self.weights: str = weights_in_words(engine.target.model)
        self.most_new_tokens, self.decode = engine.most_new_tokens, engine.decode  # on the caller's thread
        self._owns_engine = False
        self._closing = False
        self._pid = os.getpid()
        self._admission = Admission(engine.config.max_batch_size, max_waiting, per_client)
        self._thread = EngineThread(engine, [self._admission])
        self._intake_seconds = intake_seconds
        self._bound = TextBound(engine.tokenizer, engine.max_model_len)
        # separate pools, so that slow grammars delay no prompt
        self._prompts = FairPool(INTAKE_THREADS, "specdec-prompts")
        self._grammars = FairPool(INTAKE_THREADS, "specdec-grammars")
        self._finalizer = weakref.finalize(self, _stop, self._thread, (self._prompts, self._grammars), self._pid)

    @classmethod
    def from_pretrained(
        cls,
        target: str | PathLike[str] | PreTrainedModel | nn.Module,
        drafter: str | PathLike[str] | nn.Module | Drafter | None = None,
        *,
        max_waiting: int = 256,
        **options: Any,
    ) -> "AsyncEngine":
        """Serve the engine that `Engine.from_pretrained` makes; `close` closes it too. Blocks while it loads."""
        require_int("max_waiting", max_waiting, 0, 1 << 30)
        served = cls(Engine.from_pretrained(target, drafter, **options), max_waiting=max_waiting)
        served._owns_engine = True
        return served

    @known_keywords
    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[StreamDelta]:
        """Continue one prompt, yielding new tokens; the last delta carries the whole output.

        Leaving the loop early, or cancelling the task, aborts the request and frees its slots within a round. Bad
        input raises at the first delta.
        """
        require_one_request(prompt, params, "a stream")

        async def deltas() -> AsyncIterator[StreamDelta]:
            async with await self.submit([prompt], params, priority=priority) as streams:
                async for _, delta in streams:
                    yield delta

        return deltas()

    @known_keywords
    async def generate(self, prompts: Prompts, params: Params = None, *, priority: int = 0) -> list[GenerationOutput]:
        """Continue every prompt; results as those of `Engine.generate`. Cancelling the task aborts them."""
        async with await self.submit(prompts, params, priority=priority) as streams:
            return await streams.outputs()

    @known_keywords
    async def submit(self, prompts: Prompts, params: Params = None, *, priority: int = 0) -> Streams:
        """Submit prompts: all samples of each together, as in `generate`. Either all are submitted or none.

        Raises the errors of `Engine.submit_many`, and QueueFullError.
        """
        self._require_open()
        many = as_prompt_list(prompts)
        each = params_for(params, len(many))
        count = sum(one.n for one in each)
        client = CLIENT.get()
        streams = Streams(self._thread, client)
        self._admission.take_places(count, client)

        def submit_on_worker() -> None:
            # on another thread: tokenizing a long prompt here would block the event loop
            for prompt in many:
                if isinstance(prompt, str):
                    self._bound.require(prompt)
            streams.handles = self.engine.submit_many(many, each, priority=priority)
            streams.submitted = time.perf_counter()
            self._thread.watch(streams)

        def give_back(done: Future[None]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._admission.give_back(count, client)

        pool = self._grammars if any(one.grammar is not None for one in each) else self._prompts
        submitted = pool.submit(submit_on_worker)
        submitted.add_done_callback(give_back)
        try:
            await wait_for(submitted, self._intake_seconds)
        except BaseException:
            submitted.add_done_callback(lambda _: streams.abort())
            raise
        return streams

    async def chat_prompt(
        self,
        chat: str | Sequence[Mapping[str, Any]],
        /,
        *,
        special_tokens_in_content: str = "allow",
        **template_kwargs: Any,
    ) -> list[int]:
        """`Engine.chat_prompt`, on another thread. A text that is too long in any tokenisation is refused first."""
        handling = special_tokens_in_content
        return await self.off_loop(partial(self.read_chat, chat, special_tokens_in_content=handling, **template_kwargs))

    def read_chat(
        self,
        chat: str | Sequence[Mapping[str, Any]],
        /,
        *,
        special_tokens_in_content: str = "allow",
        **template_kwargs: Any,
    ) -> list[int]:
        """`chat_prompt` on the calling thread."""
        self._bound.require(chat, template_kwargs)
        return self.engine.chat_prompt(chat, special_tokens_in_content=special_tokens_in_content, **template_kwargs)

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """`Engine.encode`, on another thread like `chat_prompt`. special_tokens: include those that the tokenizer
        adds."""

        def read() -> list[int]:
            self._bound.require(text)
            return self.engine.encode(text) if special_tokens else text_ids(self.tokenizer, text, special_tokens=False)

        return await self.off_loop(read)

    @property
    def drafts_off(self) -> str:
        """`Engine.drafts_off`."""
        return self.engine.drafts_off

    async def stats(self) -> EngineStats:
        """`Engine.stats`, read between two steps."""
        return await asyncio.to_thread(self.engine.stats)

    def observe(self, observer: Observer) -> None:
        """Notify this observer of new tokens and ended requests from now on."""
        self._thread.observers.append(observer)

    async def off_loop(self, function: Callable[[], T]) -> T:
        """Call a function on another thread, so that it does not block the loop."""
        self._require_open()
        return await wait_for(self._prompts.submit(function), self._intake_seconds)

    def require_places(self, count: int) -> None:
        """Raise the error that `submit` would raise for `count` samples now, before a long prompt is read."""
        self._admission.require(count, CLIENT.get())

    @property
    def open_requests(self) -> int:
        """Number of requests that run or wait."""
        return self._admission.num_open

    @property
    def samples(self) -> list[OpenSample]:
        """The samples that have not ended."""
        return self._thread.open

    @property
    def trouble(self) -> str | None:
        """Why it should get no more requests; None: it is healthy."""
        if self._closing or self._thread.stopped:
            return self._thread.stopped or "the engine is closing"
        if self.failing:
            return f"the last {self._thread.failed_rounds} rounds with requests failed"
        return None

    @property
    def failing(self) -> bool:
        """Do rounds fail repeatedly, without a request that finishes in between?"""
        return self._thread.failed_rounds >= MAX_FAILED_ROUNDS

    @property
    def died(self) -> str | None:
        """Why its thread has ended although the engine was not closed; None: the thread runs."""
        return None if self._closing else self._thread.stopped

    @property
    def seconds_in_step(self) -> float:
        """Seconds since the current step began; 0 if there is none."""
        began = self._thread.step_began
        return 0.0 if began is None else time.monotonic() - began

    async def close(self, timeout: float | None = 0.0) -> None:
        """Accept no more requests, let open ones run for up to `timeout` seconds (None: until they end), abort the
        rest.

        Its own engine is closed too.
        """
        self._closing = True
        if os.getpid() != self._pid:
            return
        end = None if timeout is None else time.monotonic() + timeout
        while self.samples and (end is None or time.monotonic() < end):
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self._finalizer)
        if self._owns_engine:
            self.engine.close()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise SpecDecError("an engine is not copied or pickled; make another in the process that uses it")

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise SpecDecError("this engine was made in another process, and its thread is there; make one here")
        if self._closing:
            raise StoppingError(ENGINE_CLOSED)


def _stop(thread: EngineThread, pools: Sequence[FairPool], pid: int) -> None:
    """Called when the engine is closed or garbage-collected, or the program ends. A fork does not have the threads."""
    if os.getpid() == pid:
        for pool in pools:
            pool.shutdown()
        thread.stop()
