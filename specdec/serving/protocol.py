"""What requests may say: the bodies of OpenAI's API, vLLM's additions to them, and `speculation`.

Strict: an unknown field, or a value of another type, is refused with its place. A field is here because it has an
effect, or because nothing it can say has one (`user`). Ranges are checked where the Python API checks them.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from specdec.text.prompts import Prompt, as_prompt_list

Prompts = Annotated[list[Prompt], PlainValidator(as_prompt_list)]
"""A string, token ids, or a list of these."""
Nothing = Annotated[list[Any], Field(max_length=0)] | None
"""A field of answers that clients send back."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class Speculation(Body):
    """How one request speculates, within what the engine was made for; it changes no token."""

    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    show_drafts: bool = False


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """As vLLM calls them; at most one."""

    json_schema: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


class SamplingFields(Body):
    """What chats and completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    speculation: bool | Speculation | None = None
    priority: int = 0
    # whatever they say, nothing changes
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    store: Literal[False] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def show_drafts(self) -> bool:
        return isinstance(self.speculation, Speculation) and self.speculation.show_drafts


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """content: a string or text parts; what is no text is refused with the message's number."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # answers that a client sends back have these, with nothing in them
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Nothing = None


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(SamplingFields):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Literal[True] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(SamplingFields):
    prompt: Prompts
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: None = None
