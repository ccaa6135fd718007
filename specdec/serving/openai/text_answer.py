"""A chat or completion, answered whole or streamed: the common part of both routes and of responses.

submit     parameters and prompts -> the streams of the samples, and the readers of replies
whole      one choice per sample, then usage
streamed   an opening of each choice, its deltas, then usage. As in vLLM's server, the opening is sent with the first
           delta, since clients take the first chunk for the first token
"""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi.responses import Response

from specdec import __version__
from specdec.errors import ConfigError
from specdec.runtime.drafts.draft_reports import llama_timings, vllm_figures
from specdec.runtime.request_output import GenerationOutput, RequestStats, StreamDelta
from specdec.sampling.log_probs import TokenLogprob
from specdec.serving.http.clients import in_whole_blocks
from specdec.serving.http.events import EventStream, JsonResponse
from specdec.serving.openai.answer_models import SpeculationFigures
from specdec.serving.openai.logprob_shapes import vllm_prompt_logprobs
from specdec.serving.openai.protocol import SamplingFields
from specdec.serving.openai.reply import MakeReply, Reply
from specdec.serving.openai.sampling_fields import naming_field
from specdec.serving.state import ServeState
from specdec.serving.streams import Streams


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
        self.max_drafts = 0  # per round and sample, known once submitted
        self.head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": state.model_name(body.model),
            "system_fingerprint": f"specdec-{__version__}",
        }

    async def respond(self) -> Response:
        """Make the response, whole or as a stream."""
        try:
            return await self._answer()
        except ConfigError as error:
            raise naming_field(error, self.body, self.renamed) from error

    @abstractmethod
    async def submit(self) -> tuple[Streams, MakeReply]:
        """Read the prompts and submit them. Returns the samples' streams, and the maker of reply readers."""

    @abstractmethod
    def _choice(self, index: int, output: GenerationOutput, reply: Reply) -> dict[str, Any]:
        """A choice of a whole answer."""

    @abstractmethod
    def _opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that precedes a choice's first delta, without the head."""

    @abstractmethod
    def _grown(
        self, index: int, delta: StreamDelta, reply: Reply, streams: Streams, *, first: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """The chunks of one delta, without the head. first: is it the first delta of this choice?"""

    @abstractmethod
    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob], reply: Reply) -> dict[str, Any]:
        """Log-probabilities of a choice's next tokens, which the reply has just read."""

    def _details(self, index: int, delta: StreamDelta, reply: Reply) -> dict[str, Any]:
        """The requested fields of a choice (or its chunk) besides the text."""
        scores = delta.logprobs
        details: dict[str, Any] = {"logprobs": None if scores is None else self._logprobs(index, scores, reply)}
        if self.body.return_token_ids:
            details["token_ids"] = delta.token_ids
        if (drafted := reply.colours(delta)) is not None:
            details["drafted"] = drafted
        return details

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[index // self.n]} if self.body.return_token_ids else {}

    def _prompt_scores(self, output: GenerationOutput) -> dict[str, Any]:
        if (count := self.body.prompt_logprobs) is None:
            return {}
        return {"prompt_logprobs": vllm_prompt_logprobs(self.tokenizer, output.prompt_logprobs or (), count)}

    async def _answer(self) -> Response:
        streams, make_reply = await self.submit()
        self.max_drafts = streams.samples[0].handle.max_drafts
        if self.body.stream:
            return self.events(streams, self._events(streams, make_reply))
        async with streams:
            outputs = await streams.outputs()
            return await asyncio.to_thread(lambda: JsonResponse(self._whole(outputs, make_reply)))

    def _whole(self, outputs: list[GenerationOutput], make_reply: MakeReply) -> dict[str, Any]:
        choices = [self._choice(index, output, make_reply()) for index, output in enumerate(outputs)]
        return self.head | {"choices": choices} | self._totals([output.stats for output in outputs])

    async def _events(self, streams: Streams, make_reply: MakeReply) -> AsyncIterator[dict[str, Any]]:
        head = self.head | {"object": self.chunk_kind} | ({"usage": None} if self.body.usage.include_usage else {})
        replies = [make_reply() for _ in streams.samples]
        totals_follow, going_on = self.body.usage.include_usage or self.body.show_drafts, len(replies)
        unopened = set(range(len(replies)))
        async for index, delta in streams:
            first = index in unopened
            unopened.discard(index)
            if first and (opening := self._opening(index)) is not None:
                yield head | opening | self._so_far(index, streams.stats(index))
            async for chunk in self._grown(index, delta, replies[index], streams, first=first):
                going_on -= any(choice["finish_reason"] is not None for choice in chunk["choices"])
                last = {} if going_on or totals_follow else self._figures(_all_stats(streams))
                yield head | chunk | self._so_far(index, streams.stats(index)) | last
        if totals_follow:
            yield head | {"choices": []} | self._totals(_all_stats(streams))

    def _totals(self, stats: Sequence[RequestStats]) -> dict[str, Any]:
        """Usage of all samples, and the effect of speculation if requested."""
        usage = {"usage": usage_of(self.prompts, stats, self.state)}
        return usage | self._speculation(stats) | self._figures(stats)

    def _figures(self, stats: Sequence[RequestStats]) -> dict[str, Any]:
        """Draft counts in the fields of vLLM and llama.cpp."""
        total, wanted = RequestStats.total(stats), self.settings.draft_figures
        found: dict[str, Any] = {}
        if wanted != "none" and self.max_drafts:
            found["metrics"] = {"speculative_decoding": vllm_figures(total, self.max_drafts)}
        if wanted == "all" or self.body.timings_per_token:
            found["timings"] = llama_timings(total)
        return found

    def _so_far(self, index: int, stats: RequestStats) -> dict[str, Any]:
        """Usage and speculation figures of a chunk's sample, if requested."""
        prompt = self.prompts[index // self.n]
        wanted = self.body.usage.include_usage and self.body.usage.continuous_usage_stats
        usage = {"usage": usage_of([prompt], [stats], self.state)} if wanted else {}
        return usage | self._speculation([stats])

    def _speculation(self, stats: Sequence[RequestStats]) -> dict[str, Any]:
        if not self.body.show_drafts:
            return {}
        total = RequestStats.total(stats)
        figures = {name: getattr(total, name) for name in SpeculationFigures.model_fields if name != "drafts_off"}
        return {"speculation": figures | {"drafts_off": self.state.engine.drafts_off}}


def _all_stats(streams: Streams) -> list[RequestStats]:
    return [streams.stats(index) for index in range(len(streams.samples))]


def usage_of(prompts: Sequence[Sequence[int]], stats: Sequence[RequestStats], state: ServeState) -> dict[str, Any]:
    """Token counts of all samples. A prompt counts once, with its first sample's cache hits in whole blocks."""
    prompt_len = sum(map(len, prompts))
    completion = sum(one.output_tokens for one in stats)
    page_size = state.engine.config.page_size
    cached = sum(in_whole_blocks(one.cached_tokens, page_size) for one in stats[:: len(stats) // len(prompts)])
    return {
        "prompt_tokens": prompt_len,
        "completion_tokens": completion,
        "total_tokens": prompt_len + completion,
        "prompt_tokens_details": {"cached_tokens": cached} if state.settings.show_cached_tokens else None,
    }
