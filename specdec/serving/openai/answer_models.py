"""Models of answers, for `/openapi.json`. Routes name them as response models but return finished JSON, so answers are
not validated at run time; tests validate real answers. A field with a default is present only if a request asks for it.
"""

from typing import Any, Literal

from specdec.serving.http.faults import REFUSED, Answer, refusals
from specdec.serving.openai.protocol import CalledFunction


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


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ChatUsage(Usage):
    completion_tokens_details: OutputTokensDetails


class SpeculativeDecoding(Answer):
    """vLLM's figures of drafts, over all samples (`vllm_figures`)."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class Metrics(Answer):
    speculative_decoding: SpeculativeDecoding


class Timings(Answer):
    """llama.cpp's timings, over all samples (`llama_timings`)."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class WithFigures(Answer):
    metrics: Metrics | None = None
    timings: Timings | None = None


class SpeculationFigures(Answer):
    """Effect of drafts, over all samples: figures of `RequestStats` under the same names. drafts_off: why the server's
    newest round had no draft; empty if it had one."""

    rounds: int
    drafted_rounds: int
    acceptance_length: float
    accepted_per_position: list[float]
    drafted_counts: list[int]
    drafts_off: str
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


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLikelihood(Answer):
    """Log-probability of a token, with its rank. rank: 1 for the likeliest; null beyond the requested number."""

    logprob: float
    rank: int | None
    decoded_token: str


class PromptScores(Answer):
    prompt_logprobs: list[dict[str, RankedLikelihood] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ToolCallAnswer(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class MessageAnswer(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallAnswer] | None = None
    reasoning_content: str | None = None


class Choice(Answer):
    index: int
    token_ids: list[int] | None = None
    drafted: list[tuple[str, bool]] | None = None


class ChatChoice(Choice):
    message: MessageAnswer
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice, PromptScores):
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: CompletionLogprobs | None


class Generated(WithFigures):
    id: str
    model: str
    system_fingerprint: str
    created: int
    usage: Usage
    speculation: SpeculationFigures | None = None


class ChatCompletion(Generated, PromptScores):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: ChatUsage


class Completion(Generated):
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


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails


class Response(WithFigures):
    """A response in OpenAI's shape. `instructions`, `tools`, `tool_choice`, `text` and `metadata` repeat the
    request's."""

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
    metadata: dict[str, Any]
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


class InputItems(Answer):
    """A page of a response's input items: at most `limit` of those that follow the item `after`, the newest first
    unless `order` is "asc". Without `limit` and `after` it has all items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


ASKING = refusals(*(status for status in REFUSED if status != 401))
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
