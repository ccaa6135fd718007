"""What answers look like, for `/openapi.json`, as a table of their fields; tests hold real answers against these.

A field that has a type alone is always there; one of (type, None) is there when the request asks for it. A type in
quotes is made of other answers of this file.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def _answer(name: str, doc: str | None = None, /, **fields: Any) -> Any:
    return create_model(name, __base__=Answer, __doc__=doc, __module__=__name__, **fields)


_KINDS = Literal["invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"]
_ERROR_DOC = "param: the field of the body that is at fault. code: of this kind of error, for programs."
ErrorDetail = _answer("ErrorDetail", _ERROR_DOC, message=str, type=_KINDS, param=str | None, code=str | None)
Error = _answer("Error", error=ErrorDetail)
Health = _answer("Health", status=Literal["ok", "unavailable"], reason=(str | None, None))
Version = _answer("Version", version=str)
ModelCard = _answer("ModelCard", id=str, object=Literal["model"], created=int, owned_by=str, max_model_len=int)
ModelList = _answer("ModelList", object=Literal["list"], data="list[ModelCard]")
Tokenized = _answer("Tokenized", count=int, max_model_len=int, tokens=list[int], token_strs=list[str] | None)
Detokenized = _answer("Detokenized", prompt=str)

PromptTokensDetails = _answer("PromptTokensDetails", cached_tokens=int)
Usage = _answer(
    "Usage",
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), int),
    prompt_tokens_details=PromptTokensDetails | None,
)
SpeculationFigures = _answer(
    "SpeculationFigures",
    "What drafts did for all samples together: figures of `RequestStats`, which answers take by these names; and "
    "drafts_off: why the server's newest round had no draft, empty where it had one.",
    rounds=int,
    drafted_rounds=int,
    acceptance_length=float,
    accepted_per_position=list[float],
    drafted_counts=list[int],
    drafts_off=str,
    **{f"{part}_seconds": float for part in ("prefill", "draft", "verify", "other", "queue", "first_token")},
)

_LIKELIHOOD = {"token": str, "logprob": float, "bytes": list[int] | None}
Likelihood = _answer("Likelihood", **_LIKELIHOOD)
TokenLikelihood = _answer("TokenLikelihood", **_LIKELIHOOD, top_logprobs="list[Likelihood]")
ChatLogprobs = _answer("ChatLogprobs", content="list[TokenLikelihood]", refusal=None)
CompletionLogprobs = _answer(
    "CompletionLogprobs",
    tokens=list[str],
    token_logprobs=list[float | None],
    top_logprobs=list[dict[str, float] | None],
    text_offset=list[int],
)
_RANK_DOC = "rank: 1 for the likeliest; null beyond those asked for."
RankedLikelihood = _answer("RankedLikelihood", _RANK_DOC, logprob=float, rank=int | None, decoded_token=str)
_OF_PROMPT = {
    "prompt_logprobs": ("list[dict[str, RankedLikelihood] | None] | None", None),
    "prompt_token_ids": (list[int] | None, None),
}

CalledFunctionAnswer = _answer("CalledFunctionAnswer", name=str, arguments=str)
ToolCallAnswer = _answer("ToolCallAnswer", id=str, type=Literal["function"], function=CalledFunctionAnswer)
MessageAnswer = _answer(
    "MessageAnswer",
    role=Literal["assistant"],
    content=str | None,
    refusal=None,
    tool_calls=("list[ToolCallAnswer] | None", None),
    reasoning_content=(str | None, None),
)
_CHOICE = {"index": int, "token_ids": (list[int] | None, None), "drafted": (list[tuple[str, bool]] | None, None)}
ChatChoice = _answer(
    "ChatChoice",
    **_CHOICE,
    message=MessageAnswer,
    finish_reason=Literal["stop", "length", "tool_calls"],
    logprobs=ChatLogprobs | None,
)
CompletionChoice = _answer(
    "CompletionChoice",
    **_CHOICE,
    text=str,
    finish_reason=Literal["stop", "length"],
    logprobs=CompletionLogprobs | None,
    **_OF_PROMPT,
)
_HEAD = {
    **dict.fromkeys(("id", "model", "system_fingerprint"), str),
    "created": int,
    "usage": Usage,
    "speculation": (SpeculationFigures | None, None),
}
ChatCompletion = _answer(
    "ChatCompletion", **_HEAD, object=Literal["chat.completion"], choices="list[ChatChoice]", **_OF_PROMPT
)
Completion = _answer("Completion", **_HEAD, object=Literal["text_completion"], choices="list[CompletionChoice]")

OutputText = _answer(
    "OutputText",
    type=Literal["output_text", "reasoning_text"],
    text=str,
    annotations=(list[Any] | None, None),
    logprobs=("list[TokenLikelihood] | None", None),
)
_ITEM = {"id": str, "status": Literal["completed", "incomplete"]}
OutputMessage = _answer(
    "OutputMessage", **_ITEM, type=Literal["message"], role=Literal["assistant"], content="list[OutputText]"
)
OutputReasoning = _answer(
    "OutputReasoning", **_ITEM, type=Literal["reasoning"], summary=list[Any], content="list[OutputText]"
)
OutputCall = _answer("OutputCall", **_ITEM, type=Literal["function_call"], call_id=str, name=str, arguments=str)
OutputTokensDetails = _answer("OutputTokensDetails", reasoning_tokens=int)
ResponseUsage = _answer(
    "ResponseUsage",
    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), int),
    input_tokens_details=PromptTokensDetails,
    output_tokens_details=OutputTokensDetails,
)
ResponseAnswer = _answer(
    "ResponseAnswer",
    "As OpenAI's; `instructions`, `tools`, `tool_choice`, `text` and `metadata` are those of the request.",
    **dict.fromkeys(("id", "model", "service_tier"), str),
    **dict.fromkeys(("instructions", "previous_response_id", "user"), str | None),
    **dict.fromkeys(("max_output_tokens", "max_tool_calls"), int | None),
    **dict.fromkeys(("temperature", "top_p"), float),
    **dict.fromkeys(("parallel_tool_calls", "store"), bool),
    **dict.fromkeys(("text", "metadata"), dict[str, Any]),
    object=Literal["response"],
    created_at=int,
    status=Literal["completed", "incomplete"],
    background=Literal[False],
    error=None,
    incomplete_details=dict[str, str] | None,
    output="list[OutputMessage | OutputReasoning | OutputCall]",
    reasoning=dict[str, str | None],
    tool_choice=str | dict[str, Any],
    tools=list[dict[str, Any]],
    top_logprobs=int,
    truncation=Literal["disabled"],
    usage=ResponseUsage,
)
InputItems = _answer(
    "InputItems",
    "The newest first.",
    object=Literal["list"],
    data=list[dict[str, Any]],
    first_id=str,
    last_id=str,
    has_more=Literal[False],
)
DeletedResponse = _answer("DeletedResponse", id=str, object=Literal["response"], deleted=Literal[True])
