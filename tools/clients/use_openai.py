"""OpenAI's own client in Python."""

import json
from typing import Any

import openai
from checks import NUMBER, QUESTION, run
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"type": "function", "function": {"name": "answer", "parameters": NUMBER}}]


class Answer(BaseModel):
    right: bool


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def chat(url: str, model: str) -> None:
    made = client_of(url).chat.completions.create(model=model, messages=MESSAGES, max_tokens=12)
    assert made.choices[0].message.content


def stream(url: str, model: str) -> None:
    chunks = client_of(url).chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    *_, last = chunks
    assert last.usage and last.usage.completion_tokens


def tools(url: str, model: str) -> None:
    made = client_of(url).chat.completions.create(
        model=model, messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    [call] = made.choices[0].message.tool_calls or []
    assert call.type == "function" and json.loads(call.function.arguments)["number"] in (7, 8)


def parse(url: str, model: str) -> None:
    made = client_of(url).chat.completions.parse(model=model, messages=MESSAGES, response_format=Answer)
    assert made.choices[0].message.parsed is not None


def responses(url: str, model: str) -> None:
    client = client_of(url)
    with client.responses.stream(model=model, input=QUESTION, max_output_tokens=100) as events:
        assert sum(event.type == "response.output_text.delta" for event in events)
        first = events.get_final_response()
    assert client.responses.create(model=model, input="And 2 more?", previous_response_id=first.id).output


def completions(url: str, model: str) -> None:
    assert client_of(url).completions.create(model=model, prompt=QUESTION[:20], max_tokens=8).choices[0].text


run(chat=chat, stream=stream, tools=tools, structured=parse, responses=responses, completions=completions)
