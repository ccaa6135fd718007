"""Bodies of requests: OpenAI's fields, vLLM's additions, and `speculation`.

Parsing is strict: an unknown field, or a value of another type, is refused with its place. Fields without effect are
accepted only if no value of them can have one (`user`). The Python API checks ranges.
"""

import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specdec.errors import shown
from specdec.serving.tools.character_reader import NAME
from specdec.settings.sampling_numbers import NUMBERS
from specdec.text.prompts import Prompt, as_prompt_list

logger = logging.getLogger(__name__)

PromptList = Annotated[list[Prompt], PlainValidator(as_prompt_list)]
"""A string, token ids, or a list of these."""
Strings = Annotated[list[str], Field(fail_fast=True)]
Nothing = Annotated[list[Any], Field(max_length=0)] | None
Unread = Annotated[Any, Field(exclude=True)]
"""Fields that clients may send back with an answer: an empty list, and anything, which no template sees."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
MAX_MESSAGES = 16384
MAX_TOOLS = 8192
MAX_STOP_MEMBERS = 1024
"""Most members of `stop`, checked before each member; `SamplingParams` then allows `specdec.config.MAX_STOPS`."""
MAX_BIASES = 4096
NULLS: dict[str, Any] = {"additionalProperties": {"type": "null"}}


def _only_bool(allowed: bool) -> BeforeValidator:
    """Accept only this bool. Even strict pydantic accepts 0 for `Literal[False]`; JSON Schema does not."""

    def check(value: Any) -> Any:
        if value is not allowed:
            raise PydanticCustomError("literal_error", "another value is expected", {"expected": str(allowed)})
        return value

    return BeforeValidator(check)


def _require_one(value: float) -> float:
    if value != 1:
        raise ValueError("1 is expected: other values belong to beam search, which this server does not have")
    return value


def at_most(count: int) -> BeforeValidator:
    """Refuse a longer list or object before its members are checked."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > count:
            raise ValueError(f"it has {len(value)} members, and {count} are allowed")
        return value

    return BeforeValidator(check)


OnlyFalse = Annotated[Literal[False], _only_bool(False)]
OnlyTrue = Annotated[Literal[True], _only_bool(True)]


def _tool_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError("1 to 128 letters, digits and any of _ . : / - are expected")
    return name


ToolName = Annotated[str, AfterValidator(_tool_name), Field(json_schema_extra={"pattern": f"^{NAME.pattern}$"})]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


def _only_known(data: dict[str, Any], known: set[str], what: str, info: ValidationInfo) -> dict[str, Any]:
    """Drop unknown fields that are null, and all if they are not to be refused ("unknown_fields" of the context). If
    they are, keep only the first, since each would be an error and there may be a million."""
    if data.keys() <= known:
        return data
    unknown = [name for name, value in data.items() if name not in known and value is not None]
    handling = (info.context or {}).get("unknown_fields", "refuse")
    if handling == "warn" and unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        logger.warning("left out of a %s: unknown %s%s", what, ", ".join(map(shown, unknown[:8])), more)
    refused = unknown[:1] if handling == "refuse" else []
    return {name: value for name, value in data.items() if name in known or name in refused}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), json_schema_extra=NULLS)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any, info: ValidationInfo) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return _only_known(data, known, cls.__name__, info) if isinstance(data, dict) else data


COPIED = {"role", "refusal", "reasoning_content", "tool_calls"}
TEXT_PART = {"type", "text", "prompt_cache_breakpoint", "annotations"} | COPIED
"""Fields of a text part. Only the first two are read: one is for OpenAI's cache, the others come back with an answer.
openai-agents for JavaScript copies an answer's own fields (COPIED) to its text part."""


def _known_part(part: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    return _only_known(part, TEXT_PART, "text part", info) if part.get("type") == "text" else part


ContentParts = Annotated[list[Annotated[dict[str, Any], AfterValidator(_known_part)]], Field(fail_fast=True)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: OnlyFalse | None = None


class Speculation(Body):
    """Draft settings of one request, within the engine's limits. They change no token."""

    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    show_drafts: bool = False


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    value: dict[str, Any] | None = None  # the schema, as huggingface_hub's client sends it
    plain_schema: dict[str, Any] | None = Field(default=None, alias="schema")  # as llama.cpp's clients send it

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        plain = self.plain_schema if self.value is None else self.value
        return plain if self.json_schema is None else self.json_schema.json_schema


class StructuredOutputs(Body):
    """Constraints of the output, named as in vLLM; at most one is given."""

    json_schema: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Strings | None = None
    json_object: bool | None = None


if TYPE_CHECKING:

    class NumberFields(Body):  # the fields that answers repeat
        temperature: float | None = None
        top_p: float | None = None

else:
    NumberFields = create_model(
        "NumberFields", __base__=Body, **{name: (number.kind | None, None) for name, number in NUMBERS.items()}
    )
"""The numbers of `SamplingParams` under the same names."""


class RequestFields(NumberFields):
    """Fields common to chats, completions and responses."""

    model: str | None = None
    seed: int | None = None
    stop: Annotated[str | Strings | None, at_most(MAX_STOP_MEMBERS)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timings_per_token: bool | None = None
    store: bool | None = None
    # accepted without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None


class SamplingFields(RequestFields):
    """Fields of chats and completions."""

    max_tokens: int | None = None
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_BIASES)] = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    speculation: bool | Speculation | None = None
    request_id: str | None = None  # whatever it says, nothing changes
    # vLLM's fields with one accepted value; other values would need features that this server lacks
    use_beam_search: OnlyFalse | None = None
    length_penalty: Annotated[float, AfterValidator(_require_one)] | None = None
    early_stopping: OnlyFalse | None = None
    skip_special_tokens: OnlyTrue | None = None
    spaces_between_special_tokens: OnlyTrue | None = None
    return_tokens_as_token_ids: OnlyFalse | None = None
    bad_words: Nothing = None
    logits_processors: None = None
    mm_processor_kwargs: None = None
    kv_transfer_params: None = None
    vllm_xargs: None = None

    @property
    def show_drafts(self) -> bool:
        return isinstance(self.speculation, Speculation) and self.speculation.show_drafts


class CalledFunction(Body):
    name: str
    arguments: str
    parsed_arguments: Unread = None  # of OpenAI's client


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int | None, Field(exclude=True)] = None


class Message(Body):
    """A message of a chat. content: a string or text parts; other content is refused with the message's number."""

    role: Literal["system", "developer", "user", "assistant", "tool", "tool_responses"]
    content: str | ContentParts | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name
    type: Annotated[Literal["text"] | None, Field(exclude=True)] = None  # some clients send the content's type too
    refusal: None = None  # this and the next three are empty in answers that a client sends back
    audio: None = None
    function_call: None = None
    annotations: Annotated[Nothing, Field(exclude=True)] = None
    parsed: Unread = None  # OpenAI's client adds it
    provider_specific_fields: Unread = None  # litellm's copy of fields it does not know


class OfFunction(Body):
    """A tool whose type is checked first: the fields of other types are not known."""

    type: Literal["function"]


class FunctionName(Body):
    name: str


class Function(FunctionName):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(OfFunction):
    function: Function


class NamedTool(OfFunction):
    function: FunctionName


class Prediction(Body):
    """A guess at the answer, for speed. It is ignored, since this server has its own drafter."""

    type: Literal["content"]
    content: str | ContentParts


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)]
Tools = Annotated[list[Tool], Field(fail_fast=True), at_most(MAX_TOOLS)]


class ChatRequest(SamplingFields):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    prediction: Prediction | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: OnlyFalse | None = None
    functions: Nothing = None
    function_call: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True), at_most(16)] | None = None

    @property
    def forced_tools(self) -> list[Function]:
        """The tools, if one of them must be called."""
        if self.tool_choice in (None, "none", "auto"):
            return []
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return [tool.function for tool in self.tools or () if name in (None, tool.function.name)]


class CompletionRequest(SamplingFields):
    prompt: PromptList
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None  # other texts would need a model that fills gaps
    add_special_tokens: OnlyTrue | None = None


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class Reasoning(Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class FunctionTool(Function, OfFunction):  # fields of the last base class come first
    """A tool in the form of responses: one object with the function's fields."""


class NamedFunction(FunctionName, OfFunction):
    """A tool's name in the form of responses."""


class ResponsesRequest(RequestFields):
    """OpenAI's fields, and the sampling parameters of chats."""

    input: Annotated[str, Field(min_length=1)] | Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: Strings | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tool_calls: int | None = None  # whatever this and the next say, nothing changes
    client_metadata: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None  # other values would change the answer
    background: OnlyFalse | None = None
    conversation: None = None
    prompt: None = None
    context_management: Nothing = None

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
