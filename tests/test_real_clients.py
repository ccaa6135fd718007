"""Clients that people use, against a model that recites: texts, nested models, calls with text around them, harmony.

No extra installs the clients: each test is skipped where its client is missing (docs/clients.md says how to run them).
"""

import asyncio
import datetime
import enum
import json
import re
from collections.abc import Iterable
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field
from reciting_server import HARMONY, reciting

from marks import deep_cases

MODEL = "tiny-gemma4"
QUESTION = [{"role": "user", "content": "Where to?"}]
# what the clients themselves warn about
pytestmark = pytest.mark.filterwarnings("ignore")


def needs(client):
    """Skips a test, before a server is made for it, where this package is missing."""
    return pytest.mark.skipif(find_spec(client) is None, reason=f"{client} is not installed")


class Kind(enum.Enum):
    TRAIN = "train"
    FERRY = "ferry"


class Place(BaseModel):
    """A place."""

    city: str = Field(description="Its name.")
    postcode: str | None = None  # looks like a number
    inside: "Place | None" = None


class Leg(BaseModel):
    start: Place
    end: Place
    kind: Kind
    minutes: int | None = None


class Trip(BaseModel):
    """A trip, as pydantic writes nested models: with $defs, references and unions."""

    title: str
    day: datetime.date
    legs: list[Leg]
    home: Place
    prices: dict[str, float] = {}
    rating: Literal[1, 2, 3] | None = None


ULM = Place(city="Ulm", postcode="89073")
TRIP = Trip(
    title='To "Rømø" 👋\n</tool_call>',
    day=datetime.date(2026, 11, 26),
    legs=[Leg(start=ULM, end=Place(city="Rømø", inside=Place(city="Tønder")), kind=Kind.FERRY, minutes=90)],
    home=ULM,
    prices={"ferry": 12.5},
    rating=3,
)
ARGUMENTS = TRIP.model_dump(mode="json")


def call_of(name, arguments):
    """A call as a grammar makes a model write it."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


@pytest.fixture(scope="module")
def reciter():
    with reciting() as reciter:
        yield reciter


@contextmanager
def official(reciter):
    with openai.OpenAI(base_url=f"{reciter.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def official_async(reciter):
    return openai.AsyncOpenAI(base_url=f"{reciter.url}/v1", api_key="none", max_retries=0)


# a nested model as the tool that must be called


@needs("instructor")
@pytest.mark.parametrize("way", ["tool", "tool, streamed", "schema"])
def test_instructor_gets_a_nested_model(way, reciter):
    import instructor

    asked = {"response_model": Trip, "model": MODEL, "messages": QUESTION, "max_retries": 0}
    if way == "schema":
        mode, said = instructor.Mode.JSON_SCHEMA, json.dumps(ARGUMENTS, ensure_ascii=False)
    else:
        mode, said = instructor.Mode.TOOLS, call_of("PartialTrip" if "streamed" in way else "Trip", ARGUMENTS)
        asked["strict"] = False
    reciter.answer_next(said)
    with official(reciter) as client:
        made = instructor.from_openai(client, mode=mode).chat.completions
        trip = [*made.create_partial(**asked)][-1] if "streamed" in way else made.create(**asked)
    assert trip.model_dump(mode="json") == ARGUMENTS


def test_the_official_client_parses_a_model(reciter):
    reciter.answer_next(json.dumps(ULM.model_dump()))
    with official(reciter) as client:
        made = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Place)
        assert made.choices[0].message.parsed == ULM


@needs("instructor")
def test_instructor_gets_two_models_that_define_the_same_names(reciter):
    import instructor

    calls = call_of("Place", ULM.model_dump()), call_of("Trip", ARGUMENTS)
    reciter.answer_next("\n".join(f"<tool_call>{call}</tool_call>" for call in calls))
    with official(reciter) as client:
        made = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS).chat.completions
        found = made.create(response_model=Iterable[Trip | Place], model=MODEL, messages=QUESTION)
        assert [each.model_dump(mode="json") for each in found] == [ULM.model_dump(), ARGUMENTS]


@pytest.fixture(scope="module")
def langchain(reciter):
    """langchain(responses=False): a model of LangChain's; all of them share one connection."""
    from langchain_openai import ChatOpenAI

    made = []

    def make(responses=False):
        model = ChatOpenAI(
            base_url=f"{reciter.url}/v1", api_key="none", model=MODEL, max_retries=0, use_responses_api=responses
        )
        made.append(model)
        return model

    yield make
    for model in made:
        model.root_client.close()


@deep_cases("function_calling-responses", "json_schema-chat")
@needs("langchain_openai")
@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_gets_a_nested_model(method, responses, langchain, reciter):
    by_tool = method == "function_calling"
    reciter.answer_next(call_of("Trip", ARGUMENTS) if by_tool else json.dumps(ARGUMENTS, ensure_ascii=False))
    strict = None if by_tool else False  # a strict schema has no default values, and no open objects
    assert langchain(responses).with_structured_output(Trip, method=method, strict=strict).invoke("Where to?") == TRIP


@needs("langchain_openai")
def test_langchain_streams_a_call_of_a_nested_model(langchain, reciter):
    reciter.answer_next(call_of("Trip", ARGUMENTS))
    whole = None
    for chunk in langchain().bind_tools([Trip], tool_choice="Trip").stream("Where to?"):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("Trip", ARGUMENTS)]


@needs("langchain_openai")
@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain_gets_a_text_whole_and_streamed(responses, langchain, reciter):
    reciter.answer_next(*["By ferry, at noon."] * 2)
    model = langchain(responses)
    whole, streamed = model.invoke("Where to?").text, "".join(chunk.text for chunk in model.stream("Where to?"))
    assert whole == streamed == "By ferry, at noon."


@deep_cases("whole-OpenAIResponsesModel", "streamed-OpenAIChatModel")
@needs("pydantic_ai")
@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_pydantic_ai_gets_a_nested_model(stream, kind, reciter):
    from pydantic_ai import Agent
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run():
        async with official_async(reciter) as client:
            model = getattr(models, kind)(MODEL, provider=OpenAIProvider(openai_client=client))
            agent = Agent(model, output_type=Trip, retries=0)
            if not stream:
                return (await agent.run("Where to?")).output
            async with agent.run_stream("Where to?") as answer:
                return await answer.get_output()

    reciter.answer_next(call_of("final_result", ARGUMENTS))
    assert asyncio.run(run()) == TRIP


@needs("litellm")
@pytest.mark.parametrize("kind", ["openai", "hosted_vllm"])
def test_litellm_gets_texts_calls_and_models(kind, reciter):
    import litellm

    server = {"api_base": f"{reciter.url}/v1", "api_key": "none"}

    def ask(said, **options):
        reciter.answer_next(said)
        return litellm.completion(f"{kind}/{MODEL}", messages=QUESTION, **server, **options)

    assert ask("By ferry.").choices[0].message.content == "By ferry."
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask("By ferry.", stream=True)) == "By ferry."
    tool = {"type": "function", "function": {"name": "Place", "parameters": Place.model_json_schema()}}
    [call] = ask(call_of("Place", ULM.model_dump()), tools=[tool], tool_choice="required").choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == ULM.model_dump()
    made = ask(ULM.model_dump_json(), response_format=Place).choices[0].message.content
    assert Place.model_validate_json(made) == ULM
    reciter.answer_next("By ferry.")
    answer = litellm.responses(input="Where to?", model=f"{kind}/{MODEL}", **server)
    assert answer.output[-1].content[0].text == "By ferry."


@needs("llama_index")
def test_llama_index_gets_texts_and_models(reciter):
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike

    class Minutes(BaseModel):
        """How long it takes."""

        number: int

    server = {"api_base": f"{reciter.url}/v1", "api_key": "none", "model": MODEL, "context_window": 3500}
    chat = OpenAILike(**server, is_chat_model=True, is_function_calling_model=True)
    reciter.answer_next("By ferry.", "By train.", call_of("Minutes", {"number": 8}), "By bus.")
    assert chat.complete("Where to?").text == "By ferry."
    assert "".join(part.delta or "" for part in chat.stream_complete("Where to?")) == "By train."
    assert chat.structured_predict(Minutes, PromptTemplate("How long?")).number == 8
    assert OpenAILike(**server, is_chat_model=False).complete("Where to?").text == "By bus."


# a call, and text before and after it


async def converse(reciter, turns, stream, kind="OpenAIResponsesModel"):
    """(results of openai-agents, turn by turn; what its tool was called with)"""
    import agents

    agents.set_tracing_disabled(True)
    lookups = []

    @agents.function_tool
    def look_up(place: Place, kinds: list[Kind]) -> str:
        """Look a place up."""
        lookups.append((place, kinds))
        return f"{place.city}: 8 degrees"

    async with official_async(reciter) as client:
        model = getattr(agents, kind)(model=MODEL, openai_client=client)
        agent, results, given = agents.Agent(name="guide", model=model, tools=[look_up]), [], []
        for turn in turns:
            given.append({"role": "user", "content": turn})
            if stream:
                result = agents.Runner.run_streamed(agent, given)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, given)
            results.append(result)
            given = result.to_input_list()
    return results, lookups


@deep_cases("whole-1", "whole-2", "streamed-0")
@needs("agents")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_openai_agents_get_a_call_and_the_text_around_it_in_order(stream, seed, reciter):
    reciter.seed = seed
    arguments = {"place": ULM.model_dump(), "kinds": ["train", "ferry"]}
    call = f"<tool_call>\n{call_of('look_up', arguments)}\n</tool_call>"
    reciter.answer_next(f"I look it up.{call}\nOne moment, please.", "It is 8 degrees.")
    [result], lookups = asyncio.run(converse(reciter, ["How warm is Ulm?"], stream))
    assert result.final_output == "It is 8 degrees." and lookups == [(ULM, [Kind.TRAIN, Kind.FERRY])]
    first, second = (response.output for response in result.raw_responses)
    assert [item.type for item in first] == ["message", "function_call", "message"]
    assert [first[i].content[0].text.strip() for i in (0, 2)] == ["I look it up.", "One moment, please."]
    assert json.loads(first[1].arguments) == arguments and [item.type for item in second] == ["message"]
    prompt = reciter.prompts[-1]
    assert prompt.index("I look it up.") < prompt.index("89073") < prompt.index("Ulm: 8 degrees")


@needs("agents")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_openai_agents_get_a_call_over_chats(stream, reciter):
    arguments = {"place": ULM.model_dump(), "kinds": ["train"]}
    reciter.answer_next(f"<tool_call>{call_of('look_up', arguments)}</tool_call>", "It is 8 degrees.")
    asked = converse(reciter, ["How warm is Ulm?"], stream, "OpenAIChatCompletionsModel")
    [result], lookups = asyncio.run(asked)
    assert result.final_output == "It is 8 degrees." and lookups == [(ULM, [Kind.TRAIN])]


# GPT-OSS

FINAL = "<|start|>assistant<|channel|>final<|message|>"
TOLD = [
    '<|channel|>analysis<|message|>First Ulm.<|end|><|start|>assistant<|channel|>commentary to=functions.look_up '
    '<|constrain|>json<|message|>{"place": {"city": "Ulm"}, "kinds": []}<|call|>',
    # in the role that the prompt has opened
    ' to=functions.look_up<|channel|>commentary json<|message|>{"place": {"city": "Rom"}, "kinds": ["ferry"]}<|call|>',
    f"<|channel|>analysis<|message|>Both are 8.<|end|>{FINAL}Both are at 8 degrees.<|return|>",
    "<|channel|>final<|message|>You are welcome.<|return|>",
    f"<|channel|>analysis<|message|>They leave.<|end|>{FINAL}Good *bye*.<|return|>",
]  # fmt: skip
TURNS = ["Which is warmer, Ulm or Rom?", "Thank you.", "Bye!"]
SAID = ["Both are at 8 degrees.", "You are welcome.", "Good *bye*."]
CALLS = [{"place": {"city": "Ulm"}, "kinds": []}, {"place": {"city": "Rom"}, "kinds": ["ferry"]}]


@pytest.fixture(scope="module")
def gpt_oss():
    with reciting(template=HARMONY, ends=["<|call|>", "<|return|>"], tool_parser="auto") as reciter:
        yield reciter


def check_prompts(prompts):
    """What the model read: its thought before calls of a turn that goes on, no thoughts of turns that are over."""
    first = "<|start|>assistant<|channel|>analysis<|message|>First Ulm.<|end|><|start|>assistant to=functions.look_up"
    calls = [
        re.findall(r"to=functions.look_up<\|channel\|>commentary json<\|message\|>(.*?)<\|call\|>", p) for p in prompts
    ]
    assert [[json.loads(call) for call in each] for each in calls] == [[], CALLS[:1], *[CALLS] * 3]
    assert [first in prompt for prompt in prompts] == [False, True, True, False, False]
    assert not any("Both are 8." in prompt or "assistantfinal" in prompt for prompt in prompts)
    assert all(f"<|channel|>final<|message|>{SAID[0]}<|end|>" in prompt for prompt in prompts[3:])


@needs("agents")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_gpt_oss_conversation_through_openai_agents(stream, gpt_oss):
    gpt_oss.prompts = []
    gpt_oss.answer_next(*TOLD)
    results, lookups = asyncio.run(converse(gpt_oss, TURNS, stream))
    assert [result.final_output for result in results] == SAID
    assert lookups == [(Place(city="Ulm"), []), (Place(city="Rom"), [Kind.FERRY])]
    check_prompts(gpt_oss.prompts)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_gpt_oss_conversation_through_the_official_client(stream, gpt_oss):
    gpt_oss.prompts = []
    gpt_oss.answer_next(*TOLD)
    parameters = {"type": "object", "properties": {"place": {"type": "object"}, "kinds": {"type": "array"}}}
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": parameters}}]
    messages, finals, thoughts = [], [], []
    with official(gpt_oss) as client:

        def ask():
            asked = {"model": MODEL, "messages": messages, "tools": tools}
            if not stream:
                return client.chat.completions.create(**asked).choices[0].message.model_dump(exclude_none=True)
            with client.chat.completions.stream(**asked) as events:
                thought = ""
                for event in events:
                    if event.type == "chunk":
                        deltas = [choice.delta for choice in event.chunk.choices]
                        thought += "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
                message = events.get_final_completion().choices[0].message.model_dump(exclude_none=True)
            for call in message.get("tool_calls") or ():
                call["function"].pop("parsed_arguments", None)
                call.pop("index", None)
            message.pop("parsed", None)
            return message | ({"reasoning_content": thought} if thought else {})

        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            while True:
                messages.append(ask())
                thoughts.append(messages[-1].get("reasoning_content"))
                calls = messages[-1].get("tool_calls")
                if not calls:
                    break
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": "8 degrees"} for call in calls]
            finals.append(messages[-1]["content"])
    assert finals == SAID
    assert thoughts == ["First Ulm.", None, "Both are 8.", None, "They leave."]
    check_prompts(gpt_oss.prompts)


def test_gpt_oss_without_tools_says_only_its_final_message(gpt_oss):
    gpt_oss.answer_next(TOLD[2], TOLD[2])
    with official(gpt_oss) as client:
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "Which is warmer?"}]}
        [choice] = client.chat.completions.create(**asked).choices
        assert (choice.message.content, choice.message.reasoning_content) == (SAID[0], "Both are 8.")
        assert client.responses.create(model=MODEL, input="Which is warmer?").output_text == SAID[0]
