"""POST /v1/completions: continues texts or token ids, whole or streamed."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from specdec.config import SamplingParams
from specdec.runtime.request_output import GenerationOutput, StreamDelta
from specdec.sampling.log_probs import TokenLogprob
from specdec.serving.http.bodies import BodyRoute
from specdec.serving.http.faults import refused
from specdec.serving.openai import answer_models as answers
from specdec.serving.openai.logprob_shapes import Scores, completion_logprobs, echoed_logprobs
from specdec.serving.openai.protocol import CompletionRequest
from specdec.serving.openai.sampling_fields import sampling_params, truncate_prompt
from specdec.serving.openai.text_answer import TextAnswer, whole_delta
from specdec.serving.state import ServeState, StateDep
from specdec.serving.tools.answer_events import Text
from specdec.serving.tools.answer_parser import AnswerReader
from specdec.text.detokenize import token_text

router = APIRouter(route_class=BodyRoute)
DEFAULT_MAX_TOKENS = 16
"""Default tokens of an answer, as in OpenAI's API."""


@router.post("/v1/completions", response_model=answers.Completion, responses=answers.ASKING | answers.STREAMED)
async def completions(body: CompletionRequest, state: StateDep) -> Response:
    return await CompletionTextAnswer(body, state).respond()


class CompletionTextAnswer(TextAnswer):
    body: CompletionRequest
    chunk_kind = "text_completion"

    def __init__(self, body: CompletionRequest, state: ServeState) -> None:
        super().__init__(body, state, "cmpl", self.chunk_kind)
        self._texts: list[str | None] = []  # one per prompt; None if only its ids are known

    @cached_property
    def echoes(self) -> list[str]:
        """The text that precedes each prompt's answers. Made once the ids were checked: others may be too many, or
        outside the vocabulary."""
        if not self.body.echo:
            return [""] * len(self.prompts)
        pairs = zip(self._texts, self.prompts, strict=True)
        return [self.engine.decode(ids) if text is None else text for text, ids in pairs]

    async def read_request(self) -> SamplingParams:
        body = self.body
        params = await self.engine.off_loop(self._make_params)
        self.engine.require_places(max(1, len(body.prompt)) * params.n)
        await self._read_prompts(params)
        if body.max_tokens is None:  # the default never exceeds the room left
            room = min(map(self.engine.most_new_tokens, map(len, self.prompts)))
            params = replace(params, max_new_tokens=min(params.max_new_tokens, max(room, params.min_tokens)))
        return params

    def make_reader(self) -> AnswerReader:
        scored, stops = self.body.logprobs is not None, self.params.stop_strings
        return AnswerReader(self.tokenizer, stops=stops, show_drafts=self.body.show_drafts, scored=scored)

    def _make_params(self) -> SamplingParams:
        body = self.body
        if body.best_of not in (None, self.n):
            message = f"best_of={body.best_of}: all n={self.n} samples are returned; leave it out"
            raise refused("best_of", message)
        max_new_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        echoed = body.logprobs if body.echo else None
        if body.echo and max_new_tokens == 0 and echoed is None:
            echoed = 0  # a request for no tokens scores its prompt
        return sampling_params(body, self.state, max_new_tokens, body.logprobs, echoed=echoed)

    async def _read_prompts(self, params: SamplingParams) -> None:
        if not self.body.prompt:
            raise refused("prompt", "prompt=[]: at least one prompt is expected")
        for prompt in self.body.prompt:
            ids = await self.engine.encode(prompt) if isinstance(prompt, str) else list(prompt)
            whole, ids = len(ids), truncate_prompt(self.body, self.engine, ids, params.max_new_tokens)
            self.prompts.append(ids)
            self._texts.append(prompt if isinstance(prompt, str) and len(ids) == whole else None)

    def _choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        [choice] = self._delta_choices(index, whole_delta(output), first=True)
        choice["text"] = self.echoes[index // self.n] + choice["text"]
        if self.body.echo and output.logprobs is not None:
            echoed = self._echoed(index, output.prompt_logprobs or ())
            choice["logprobs"] = {name: [*echoed[name], *new] for name, new in choice["logprobs"].items()}
        return choice | self._prompt_scores(output)

    async def _opening(self, index: int) -> dict[str, Any] | None:
        if not self.body.echo:
            return None
        return {"choices": [await asyncio.to_thread(self._echo, index)]}

    def _echo(self, index: int) -> dict[str, Any]:
        """The chunk's choice that repeats the prompt."""
        echo = _text(index, self.echoes[index // self.n])
        if self.body.logprobs is not None:
            echo["logprobs"] = self._echoed(index, self.streams.handles[index].prompt_logprobs or ())
        return echo

    def _delta_choices(self, index: int, delta: StreamDelta, *, first: bool) -> list[dict[str, Any]]:
        reader = self.readers[index]
        text = "".join(event.text for event, _ in reader.read(delta) if isinstance(event, Text))
        reason = None if delta.output is None else reader.finish_reason(delta.output)
        details = self._extra_fields(index, delta) | (self._prompt_ids(index) if first else {})
        if not (text or details.get("drafted") or delta.logprobs or reason or self.body.return_token_ids):
            return []
        return [_text(index, text, reason) | details]

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        begins = self.readers[index].begins
        begins = begins[len(begins) - len(logprobs) :]
        offsets = [len(self.echoes[index // self.n]) + begin for begin in begins]
        tokens = [token_text(self.tokenizer, one.token_id) for one in logprobs]
        return completion_logprobs(self.tokenizer, tokens, logprobs, offsets)

    def _echoed(self, index: int, scores: Scores) -> dict[str, Any]:
        """Log-probabilities of the echoed prompt of choice `index`."""
        prompt, echo = self.prompts[index // self.n], self.echoes[index // self.n]
        return echoed_logprobs(self.tokenizer, prompt, echo, scores, self.body.logprobs or 0)


def _text(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}
