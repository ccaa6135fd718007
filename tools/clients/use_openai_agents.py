"""OpenAI's agents, over responses (their default) and over chats."""

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import QUESTION, run
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def count(unit: str) -> str:
    """Say how many there are."""
    return f"8 {unit}"


def agent_of(url: str, model: str, kind: Any, **options: Any) -> Agent:
    made = kind(model=model, openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
    return Agent(name="counter", model=made, model_settings=ModelSettings(max_tokens=60), **options)


async def responses(url: str, model: str) -> None:
    assert (await Runner.run(agent_of(url, model, OpenAIResponsesModel), QUESTION)).final_output


async def chat(url: str, model: str) -> None:
    assert (await Runner.run(agent_of(url, model, OpenAIChatCompletionsModel), QUESTION)).final_output


async def stream(url: str, model: str) -> None:
    running = Runner.run_streamed(agent_of(url, model, OpenAIResponsesModel), QUESTION)
    assert [event async for event in running.stream_events()] and running.final_output


async def tools(url: str, model: str) -> None:
    made = agent_of(url, model, OpenAIResponsesModel, tools=[count], tool_use_behavior="stop_on_first_tool")
    made.model_settings = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    assert str((await Runner.run(made, QUESTION)).final_output).startswith("8 ")


run(responses=responses, chat=chat, stream=stream, tools=tools)
