"""What answers look like, for `/openapi.json`; tests hold real answers against these.

A field without a default is always there; one with a default is there when the request asks for it.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Answer):
    """param: the field of the body that is at fault. code: of this kind of error, for programs."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
    ]
    param: str | None
    code: str | None


class Error(Answer):
    error: ErrorDetail


class Health(Answer):
    status: Literal["ok", "unavailable"]
    reason: str | None = None


class Version(Answer):
    version: str


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


class PromptTokensDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class SpeculationFigures(Answer):
    """What drafts did for all samples together: figures of `RequestStats`, which answers take by these names."""

    rounds: int
    acceptance_length: float
    accepted_per_position: list[float]
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    queue_seconds: float
    first_token_seconds: float


class Likelihood(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLikelihood(Likelihood):
    top_logprobs: list[Likelihood]


class ChatLogprobs(Answer):
    content: list[TokenLikelihood]
    refusal: None


class RankedLikelihood(Answer):
    """rank: 1 for the likeliest; null beyond those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLikelihood] | None]
Drafted = list[tuple[str, bool]]


class CalledFunctionAnswer(Answer):
    name: str
    arguments: str


class ToolCallAnswer(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class MessageAnswer(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallAnswer] | None = None
    reasoning_content: str | None = None


class Choice(Answer):
    index: int
    token_ids: list[int] | None = None
    drafted: Drafted | None = None


class ChatChoice(Choice):
    message: MessageAnswer
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None


class Head(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    speculation: SpeculationFigures | None = None


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class OutputText(Answer):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[TokenLikelihood] | None = None


class OutputItem(Answer):
    id: str
    status: Literal["completed", "incomplete"]


class OutputMessage(OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(OutputItem):
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[OutputText]


class OutputCall(OutputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseAnswer(Answer):
    """As OpenAI's; `instructions`, `tools`, `tool_choice`, `text` and `metadata` are those of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None
    metadata: dict[str, Any]


class InputItems(Answer):
    """The newest first."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: Literal[False]


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
