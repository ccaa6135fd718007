"""POST /v1/responses: OpenAI's newer chat API, implemented as a chat. Stored responses can be continued."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import Response

from specdec.runtime.request_output import GenerationOutput, RequestStats, StreamDelta
from specdec.serving.http.bodies import BodyRoute
from specdec.serving.http.events import EventStream, JsonResponse, event, off_loop
from specdec.serving.http.faults import ApiError, as_api_error, refusals, refused
from specdec.serving.openai import answer_models as answers
from specdec.serving.openai.chat_completions import ChatTextAnswer
from specdec.serving.openai.logprob_shapes import chat_logprobs
from specdec.serving.openai.protocol import Reasoning, ResponsesRequest, TextFormat, TextOptions
from specdec.serving.openai.text_answer import whole_delta
from specdec.serving.responses.response_events import ResponseBuilder
from specdec.serving.responses.response_input import chat_request, messages_of
from specdec.serving.state import ServeState, StateDep, StoredResponse

router = APIRouter(route_class=BodyRoute)
UNSTORED = "its request had store=false, it was deleted, or newer ones replaced it"
ECHOED_FIELDS = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "user")


@router.post("/v1/responses", response_model=answers.Response, responses=answers.ASKING | answers.STREAMED)
async def create_response(body: ResponsesRequest, state: StateDep) -> Response:
    return await ResponseAnswer(body, state).respond()


@router.get("/v1/responses/{response_id}", response_model=answers.Response, responses=refusals(400, 404))
async def read_response(response_id: str, state: StateDep, stream: bool = False) -> JsonResponse:
    if stream:
        raise refused("stream", "stream=true: a stored response is given whole, not as events; leave it out")
    return JsonResponse(_load_stored(state, response_id).response)


@router.get("/v1/responses/{response_id}/input_items", response_model=answers.InputItems, responses=refusals(400, 404))
async def read_input_items(
    response_id: str,
    state: StateDep,
    order: Literal["asc", "desc"] = "desc",
    limit: int | None = None,
    after: str | None = None,
) -> JsonResponse:
    inputs = _load_stored(state, response_id).inputs
    items = [{"id": f"item_{index}", "type": "message"} | item for index, item in enumerate(inputs)]
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    if limit is not None and limit < 1:
        raise refused("limit", f"limit={limit}: 1 or more is expected")
    if after not in (None, *ids):
        raise refused("after", f"after={after!r:.80} is the id of none of the {len(ids)} input items")
    begin = 0 if after is None else 1 + ids.index(after)
    end = len(ids) if limit is None else begin + limit
    first, last = next(iter(ids[begin:end]), None), next(reversed(ids[begin:end]), None)
    page = {"first_id": first, "last_id": last, "has_more": end < len(ids)}
    return JsonResponse({"object": "list", "data": items[begin:end], **page})


@router.delete("/v1/responses/{response_id}", response_model=answers.DeletedResponse, responses=refusals(404))
async def delete_response(response_id: str, state: StateDep) -> JsonResponse:
    if not state.responses.delete(state.owner, response_id):
        raise _unknown(response_id)
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


class NamedEvents(EventStream):
    """Events with names and without an end mark: the last event shows that it is the last."""

    last = b""

    @staticmethod
    def encode(data: dict[str, Any]) -> bytes:
        kind = data.get("type")
        return (f"event: {kind}\n".encode() if isinstance(kind, str) else b"") + event(data)

    def failure(self, error: Exception) -> bytes:
        said = as_api_error(error).body["error"]
        code = said["code"] or "server_error"
        return self.encode({"type": "error", "code": code, "message": said["message"], "param": said["param"]})


class ResponseAnswer(ChatTextAnswer):
    """One request, answered as a chat. Raises ApiError if it cannot be served."""

    events = NamedEvents
    scored = True
    renamed: Mapping[str, str] = {
        "messages": "input",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
    }

    def __init__(self, asked: ResponsesRequest, state: ServeState) -> None:
        self.asked = asked
        self._messages: list[dict[str, Any]] = []
        if asked.previous_response_id is not None:
            self._messages += _load_stored(state, asked.previous_response_id, "previous_response_id").messages
        self._items = _resolve_references(state, asked.items)
        self._messages += messages_of(self._items)
        super().__init__(chat_request(asked, self._messages), state)
        self._builder = ResponseBuilder(self._response())

    def _whole_answer(self, outputs: list[GenerationOutput]) -> dict[str, Any]:
        self._add_delta(whole_delta(outputs[0]))
        self._end_response(outputs[0])
        return self._builder.response

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        builder = self._builder
        for each in builder.begin():
            yield each
        try:
            async for _, delta in self.streams:
                for each in await off_loop(len(delta.token_ids), partial(self._add_delta, delta)):
                    yield each
                if delta.output is not None:
                    for each in self._end_response(delta.output):
                        yield each
        except Exception as error:  # the status is sent
            said = as_api_error(error).body["error"]["message"]
            for each in builder.end("failed", None, error={"code": "server_error", "message": said}):
                yield each

    def _end_response(self, output: GenerationOutput) -> list[dict[str, Any]]:
        """End the response, and store it if the request asks for that."""
        cut = self.readers[0].finish_reason(output) == "length"
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        events = self._builder.end(
            "incomplete" if cut else "completed",
            self._response_usage(output.stats),
            **details | self._draft_counts(),
        )
        if self.asked.store is not False:
            messages = self._messages + messages_of(self._builder.output, is_answer=True)
            stored = StoredResponse(self._builder.response, self._items, messages)
            self.state.responses.put(self.state.owner, stored)
        return events

    def _add_delta(self, delta: StreamDelta) -> list[dict[str, Any]]:
        events, reader = [], self.readers[0]
        for said, tokens in reader.read(delta):
            scores = chat_logprobs(self.tokenizer, reader.scores(tokens))["content"] if self.body.logprobs else []
            events += self._builder.add(said, scores)
        return events

    def _response_usage(self, stats: RequestStats) -> dict[str, Any]:
        usage = self._usage(self.prompts, [stats])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}
            | (usage["prompt_tokens_details"] or {}),
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.readers[0].thought_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _response(self) -> dict[str, Any]:
        body, defaults = self.asked, self.settings.defaults
        text, reasoning = body.text or TextOptions(), body.reasoning or Reasoning()
        form = text.format or TextFormat()
        choice = body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.model_dump()
        tools = [{"parameters": None, "strict": None} | tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.head["model"],
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True), "verbosity": text.verbosity},
            "tool_choice": choice or "auto",
            "tools": tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": body.metadata or {},
            **{name: getattr(body, name) for name in ECHOED_FIELDS},
        }


def _resolve_references(state: ServeState, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items, with the stored item in the place of each reference. Its id says where it is (`PREFIXES`)."""
    outputs: dict[str, dict[str, dict[str, Any]]] = {}  # by the id of a response, then of an item

    def referred(place: str, item_id: Any) -> dict[str, Any]:
        response = "_".join(["resp", *str(item_id).split("_")[1:2]])
        if response not in outputs:
            stored = state.responses.get(state.owner, response)
            outputs[response] = {} if stored is None else {each["id"]: each for each in stored.response["output"]}
        found = outputs[response].get(str(item_id))
        if found is None:
            raise ApiError(404, f"{place}: no item {item_id!r:.80} is stored; {UNSTORED}", param=place)
        return found

    return [
        referred(f"input[{index}]", item.get("id")) if item.get("type") == "item_reference" else item
        for index, item in enumerate(items)
    ]


def _load_stored(state: ServeState, response_id: str, param: str = "response_id") -> StoredResponse:
    found = state.responses.get(state.owner, response_id)
    if found is None:
        raise _unknown(response_id, param)
    return found


def _unknown(response_id: str, param: str = "response_id") -> ApiError:
    code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
    return ApiError(404, f"no response {response_id!r:.80} is stored; {UNSTORED}", param=param, code=code)
