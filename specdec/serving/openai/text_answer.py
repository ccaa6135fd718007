"""A chat or completion, answered whole or streamed: the common part of both routes and of responses.

read       parameters and prompts, which are submitted: a stream and a reader for each sample
whole      one choice per sample, then usage
streamed   an opening of each choice, its deltas, then usage. As in vLLM's server, the opening is sent with the first
           delta, since clients take the first chunk for the first token
"""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from fastapi.responses import Response

from specdec import __version__
from specdec.config import SamplingParams
from specdec.errors import CapacityError, ConfigError
from specdec.runtime.drafts.draft_reports import vllm_figures
from specdec.runtime.request_output import GenerationOutput, RequestStats, StreamDelta
from specdec.sampling.log_probs import TokenLogprob
from specdec.serving.engine_thread import Streams
from specdec.serving.http.clients import in_whole_blocks
from specdec.serving.http.events import EventStream, JsonResponse, off_loop
from specdec.serving.openai.answer_models import SpeculationFigures
from specdec.serving.openai.logprob_shapes import vllm_prompt_logprobs
from specdec.serving.openai.protocol import SamplingFields, StreamOptions
from specdec.serving.openai.sampling_fields import with_client_names
from specdec.serving.state import ServeState
from specdec.serving.tools.answer_parser import AnswerReader


class TextAnswer(ABC):
    """One request. Choice number i is sample i % n of prompt i // n."""

    chunk_kind: str
    events: type[EventStream] = EventStream
    renamed: Mapping[str, str] = {}
    """Fields of the body whose name in the request differs, with that name."""

    def __init__(self, body: SamplingFields, state: ServeState, prefix: str, kind: str) -> None:
        self.body = body
        self.state = state
        self.engine = state.engine
        self.settings = state.settings
        self.tokenizer = state.tokenizer
        self.n = 1 if body.n is None else body.n
        self.prompts: list[list[int]] = []
        self.params: SamplingParams  # once the request was read
        self.streams: Streams  # once submitted
        self.head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": state.model_name(body.model),
            "system_fingerprint": f"specdec-{__version__}",
        }

    async def respond(self) -> Response:
        try:
            self.params = await self.read_request()
            self.streams = await self.engine.submit(self.prompts, self.params, priority=self.body.priority or 0)
            if self.body.stream:
                return self.events(self.streams, self._events())
            async with self.streams:
                outputs = await self.streams.outputs()
                return await asyncio.to_thread(lambda: JsonResponse(self._whole_answer(outputs)))
        except (ConfigError, CapacityError) as error:
            raise with_client_names(error, self.body, self.renamed) from error

    @cached_property
    def readers(self) -> list[AnswerReader]:
        """The reader of each choice. Making them takes time, so a whole answer's are made on another thread."""
        return [self.make_reader() for _ in self.streams.handles]

    @abstractmethod
    async def read_request(self) -> SamplingParams:
        """Set `prompts`, and return the parameters of all."""

    @abstractmethod
    def make_reader(self) -> AnswerReader:
        """Make the reader of one choice."""

    @abstractmethod
    def _choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        """A choice of a whole answer."""

    @abstractmethod
    async def _opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that precedes a choice's first delta, without the head."""

    @abstractmethod
    def _delta_choices(self, index: int, delta: StreamDelta, *, first: bool) -> list[dict[str, Any]]:
        """The choices of one delta's chunks. first: is it the first delta of this choice?"""

    def _end_choices(self, index: int, delta: StreamDelta) -> list[dict[str, Any]]:
        """The choices of further chunks, after those of the last delta: they may raise."""
        return []

    @abstractmethod
    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities of a choice's next tokens, which its reader has just read."""

    def _extra_fields(self, index: int, delta: StreamDelta) -> dict[str, Any]:
        """The requested fields of a choice (or its chunk) besides the text."""
        scores = delta.logprobs
        details: dict[str, Any] = {"logprobs": None if scores is None else self._logprobs(index, scores)}
        if self.body.return_token_ids:
            details["token_ids"] = delta.token_ids
        if (drafted := self.readers[index].colours(delta)) is not None:
            details["drafted"] = drafted
        return details

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[index // self.n]} if self.body.return_token_ids else {}

    def _prompt_scores(self, output: GenerationOutput) -> dict[str, Any]:
        if (count := self.body.prompt_logprobs) is None:
            return {}
        return {"prompt_logprobs": vllm_prompt_logprobs(self.tokenizer, output.prompt_logprobs or (), count)}

    def _whole_answer(self, outputs: list[GenerationOutput]) -> dict[str, Any]:
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return self.head | {"choices": choices} | self._totals()

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        usage, going_on = self.body.stream_options or StreamOptions(), len(self.readers)
        head = self.head | {"object": self.chunk_kind} | ({"usage": None} if usage.include_usage else {})
        totals_follow = usage.include_usage or self.body.show_drafts
        so_far = partial(self._usage_and_drafts, usage=bool(usage.include_usage and usage.continuous_usage_stats))
        unopened = set(range(len(self.readers)))
        async for index, delta in self.streams:
            first = index in unopened
            unopened.discard(index)
            if first and (opening := await self._opening(index)) is not None:
                yield head | opening | so_far([index])
            makers = [partial(self._delta_choices, index, delta, first=first)]
            if delta.output is not None:
                makers.append(partial(self._end_choices, index, delta))
            for make_choices in makers:
                for choice in await off_loop(len(delta.token_ids), make_choices):
                    going_on -= choice["finish_reason"] is not None
                    last = {} if going_on or totals_follow else self._draft_counts()
                    yield head | {"choices": [choice], **so_far([index]), **last}
        if totals_follow:
            yield head | {"choices": []} | self._totals()

    def _totals(self) -> dict[str, Any]:
        return self._usage_and_drafts(range(len(self.streams.handles)), usage=True) | self._draft_counts()

    def _usage_and_drafts(self, samples: Sequence[int], *, usage: bool) -> dict[str, Any]:
        """Usage of these samples, and the effect of speculation if requested."""
        if not (usage or self.body.show_drafts):
            return {}
        stats = [self.streams.handles[index].stats for index in samples]
        prompts = [self.prompts[number] for number in dict.fromkeys(index // self.n for index in samples)]
        found = {"usage": self._usage(prompts, stats)} if usage else {}
        if self.body.show_drafts:
            total = RequestStats.total(stats)
            figures = {name: getattr(total, name) for name in SpeculationFigures.model_fields if name != "drafts_off"}
            found["speculation"] = figures | {"drafts_off": self.engine.drafts_off}
        return found

    def _draft_counts(self) -> dict[str, Any]:
        """Draft counts of all samples in the fields of vLLM and llama.cpp."""
        handles, wanted = self.streams.handles, self.settings.draft_figures
        total, max_drafts = RequestStats.total([handle.stats for handle in handles]), handles[0].max_drafts
        found: dict[str, Any] = {}
        if wanted != "none" and max_drafts:
            found["metrics"] = {"speculative_decoding": vllm_figures(total, max_drafts)}
        if wanted == "all" or self.body.timings_per_token:
            found["timings"] = llama_timings(total)
        return found

    def _usage(self, prompts: Sequence[Sequence[int]], stats: Sequence[RequestStats]) -> dict[str, Any]:
        """Token counts of samples. A prompt counts once, with its first sample's cache hits in whole blocks."""
        prompt_len, completion = sum(map(len, prompts)), sum(one.output_tokens for one in stats)
        page_size, firsts = self.engine.config.page_size, stats[:: len(stats) // len(prompts)]
        cached = sum(in_whole_blocks(one.cached_tokens, page_size) for one in firsts)
        return {
            "prompt_tokens": prompt_len,
            "completion_tokens": completion,
            "total_tokens": prompt_len + completion,
            "prompt_tokens_details": {"cached_tokens": cached} if self.settings.show_cached_tokens else None,
        }


def whole_delta(output: GenerationOutput) -> StreamDelta:
    return StreamDelta(output.text, output.token_ids, output.drafted, output, output.logprobs)


def llama_timings(stats: RequestStats) -> dict[str, Any]:
    """`timings` of llama.cpp's server. The prompt's time ends with the first token and excludes the queue."""
    prompt, predicted = stats.first_token_seconds - stats.queue_seconds, stats.decode_seconds
    read = stats.prompt_tokens - stats.cached_tokens
    return {
        "cache_n": stats.cached_tokens,
        **_phase_timings("prompt", read, prompt),
        **_phase_timings("predicted", stats.output_tokens, predicted),
        "draft_n": stats.draft_tokens,
        "draft_n_accepted": sum(stats.accepted_counts),
    }


def _phase_timings(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }
