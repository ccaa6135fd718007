"""POST /v1/completions: texts or token ids continued as they are, whole or as they come."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from specdec.config import SamplingParams
from specdec.errors import ConfigError
from specdec.runtime.request import GenerationOutput
from specdec.serving.http.bodies import BodyRoute
from specdec.serving.http.events import EventStream, json_response, off_loop, while_connected
from specdec.serving.http.faults import ApiError
from specdec.serving.openai.prompt_logprobs import Scores, echoed_logprobs, joined, vllm_prompt_logprobs
from specdec.serving.openai.protocol import CompletionRequest
from specdec.serving.openai.reply import Reply, ReplyFormat
from specdec.serving.openai.sampling_fields import blaming, sampling_params, shortened
from specdec.serving.openai.usage import completion_logprobs, so_far, totals
from specdec.serving.state import ServeState, State
from specdec.serving.streams import Streams

router = APIRouter(route_class=BodyRoute)
MAX_TOKENS = 16
"""Where a request says nothing: OpenAI's."""


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request, state: State) -> Response:
    try:
        return await while_connected(request.receive, Completion(body, state).answer())
    except ConfigError as error:
        raise blaming(error, body) from error


class Completion:
    """One request. Choice number i is sample i % n of prompt i // n."""

    def __init__(self, body: CompletionRequest, state: ServeState) -> None:
        self.body = body
        self.state = state
        self.engine = state.engine
        self.settings = state.settings
        self.tokenizer = state.tokenizer
        self.prompts: list[list[int]] = []
        self.echoes: list[str] = []  # of each prompt; empty without `echo`
        self.n = 1 if body.n is None else body.n
        self.head = state.head("cmpl", "text_completion", body.model)

    async def answer(self) -> Response:
        """The response, whole or begun."""
        params = await asyncio.to_thread(self._params)
        self.engine.require_places(max(1, len(self.body.prompt)) * params.n)
        await self._read_prompts(params)
        reply_format = ReplyFormat(self.tokenizer, params.stop_strings, self.body.show_drafts)
        streams = await self.engine.submit(self.prompts, params, priority=self.body.priority)
        if self.body.stream:
            return EventStream(streams, self._events(streams, reply_format))
        async with streams:
            outputs = await streams.outputs()
            return await asyncio.to_thread(lambda: json_response(self._whole(outputs, reply_format)))

    def _params(self) -> SamplingParams:
        body = self.body
        if body.best_of not in (None, self.n):
            raise ApiError(
                400, f"best_of={body.best_of}: all n={self.n} samples are returned; leave it out", param="best_of"
            )
        max_new_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
        echoed = body.logprobs if body.echo else None
        if body.echo and max_new_tokens == 0 and echoed is None:
            echoed = 0  # what asks for no token has its prompt scored
        client = self.state.client
        return sampling_params(
            body, self.engine, self.settings, max_new_tokens, body.logprobs, echoed=echoed, client=client
        )

    async def _read_prompts(self, params: SamplingParams) -> None:
        if not self.body.prompt:
            raise ApiError(400, "prompt=[]: at least one prompt is expected", param="prompt")
        for prompt in self.body.prompt:
            ids = await self.engine.encode(prompt) if isinstance(prompt, str) else list(prompt)
            whole, ids = len(ids), shortened(self.body, self.engine, ids, params.max_new_tokens)
            self.prompts.append(ids)
            if not self.body.echo:
                self.echoes.append("")
            else:
                self.echoes.append(prompt if isinstance(prompt, str) and len(ids) == whole else self.engine.decode(ids))

    def _whole(self, outputs: list[GenerationOutput], reply_format: ReplyFormat) -> dict[str, Any]:
        answer = self.head | {"choices": [self._choice(i, output, reply_format) for i, output in enumerate(outputs)]}
        return answer | totals(self.body, self.prompts, [output.stats for output in outputs], self.state)

    def _choice(self, index: int, output: GenerationOutput, reply_format: ReplyFormat) -> dict[str, Any]:
        reply = Reply(reply_format)
        said = reply.read_whole(output)
        echo = self.echoes[index // self.n]
        choice = _choice(index, echo + said.content, reply.finish_reason(output))
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": self.prompts[index // self.n], "token_ids": output.token_ids}
        if output.logprobs is not None:
            choice["logprobs"], _ = completion_logprobs(self.tokenizer, output.logprobs, len(echo))
            if self.body.echo:
                choice["logprobs"] = joined(self._echoed(index, output.prompt_logprobs or ()), choice["logprobs"])
        if self.body.prompt_logprobs is not None:
            scores = output.prompt_logprobs or ()
            choice["prompt_logprobs"] = vllm_prompt_logprobs(self.tokenizer, scores, self.body.prompt_logprobs)
        if said.drafted is not None:
            choice["drafted"] = said.drafted
        return choice

    def _echoed(self, index: int, scores: Scores) -> dict[str, Any]:
        """Log-probabilities of the prompt of choice `index`, as it is echoed."""
        prompt, echo = self.prompts[index // self.n], self.echoes[index // self.n]
        return echoed_logprobs(self.tokenizer, prompt, echo, scores, self.body.logprobs or 0)

    async def _events(self, streams: Streams, reply_format: ReplyFormat) -> AsyncIterator[dict[str, Any]]:
        """Chunks: the prompt if `echo` asks for it, what follows it, why that ends; then usage."""
        head = self.head | ({"usage": None} if self.body.include_usage else {})
        replies = [Reply(reply_format) for _ in streams.samples]
        count = len(replies)
        offsets, begun = [len(self.echoes[index // self.n]) for index in range(count)], set[int]()
        scored = self.body.echo and self.body.logprobs is not None
        for index in range(count if self.body.echo and not scored else 0):
            yield head | {"choices": [_choice(index, self.echoes[index // self.n])]}
        echoed: set[int] = set()
        async for index, delta in streams:
            if scored and index not in echoed:  # its prompt's scores are known with the first delta, not before
                echoed.add(index)
                scores = streams.samples[index].handle.prompt_logprobs or ()
                logprobs = await self.engine.off_loop(partial(self._echoed, index, scores))
                yield head | {"choices": [_choice(index, self.echoes[index // self.n]) | {"logprobs": logprobs}]}
            said = await off_loop(len(delta.token_ids), partial(replies[index].read, delta))
            reason = None if delta.output is None else replies[index].finish_reason(delta.output)
            if not (said.content or delta.logprobs or reason or self.body.return_token_ids):
                continue
            choice = _choice(index, said.content, reason)
            if self.body.return_token_ids:
                choice["token_ids"] = delta.token_ids
                if index not in begun:
                    begun.add(index)
                    choice["prompt_token_ids"] = self.prompts[index // self.n]
            if delta.logprobs is not None:
                read = partial(completion_logprobs, self.tokenizer, delta.logprobs, offsets[index])
                choice["logprobs"], offsets[index] = await off_loop(len(delta.logprobs), read)
            if said.drafted is not None:
                choice["drafted"] = said.drafted
            prompt = self.prompts[index // self.n]
            yield head | {"choices": [choice]} | so_far(self.body, prompt, streams.stats(index), self.state)
        if self.body.include_usage or self.body.show_drafts:
            stats = [streams.stats(index) for index in range(count)]
            yield head | {"choices": []} | totals(self.body, self.prompts, stats, self.state)


def _choice(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}
