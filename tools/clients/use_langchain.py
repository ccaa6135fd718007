"""LangChain: langchain-openai's ChatOpenAI."""

from typing import Literal

from checks import QUESTION, Answer, run
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def count(number: Literal[7, 8]) -> str:
    """Say a number."""
    return str(number)


def model_of(url: str, model: str, **options: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key="none", model=model, max_retries=0, max_tokens=60, **options)


def chat(url: str, model: str) -> None:
    assert model_of(url, model).invoke(QUESTION).content


def stream(url: str, model: str) -> None:
    assert "".join(str(chunk.content) for chunk in model_of(url, model).stream(QUESTION))


def tools(url: str, model: str) -> None:
    assert model_of(url, model).bind_tools([count], tool_choice="required").invoke(QUESTION).tool_calls


def structured(url: str, model: str) -> None:
    for method in ("json_schema", "function_calling"):
        made = model_of(url, model).with_structured_output(Answer, method=method).invoke(QUESTION)
        assert isinstance(made, Answer), method


def responses(url: str, model: str) -> None:
    assert model_of(url, model, use_responses_api=True).invoke(QUESTION).content


run(chat=chat, stream=stream, tools=tools, structured=structured, responses=responses)
