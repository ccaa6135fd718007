"""Pydantic AI: agents over chats and over responses."""

from typing import Literal

from checks import QUESTION, run
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or a small model adds fields until it is cut off
    number: Literal[7, 8]


def agent_of(url: str, model: str, kind: type = OpenAIChatModel, **options: object) -> Agent:
    made = kind(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(made, model_settings={"max_tokens": 60}, **options)


def chat(url: str, model: str) -> None:
    assert agent_of(url, model).run_sync(QUESTION).output


async def stream(url: str, model: str) -> None:
    async with agent_of(url, model).run_stream(QUESTION) as answer:
        assert "".join([text async for text in answer.stream_text(delta=True)])


def structured(url: str, model: str) -> None:
    assert agent_of(url, model, output_type=Answer).run_sync(QUESTION).output.number in (7, 8)


def responses(url: str, model: str) -> None:
    assert agent_of(url, model, OpenAIResponsesModel).run_sync(QUESTION).output


run(chat=chat, stream=stream, structured=structured, responses=responses)
