"""LiteLLM, as an OpenAI-compatible endpoint and as hosted vLLM."""

import litellm
from checks import NUMBER, QUESTION, run

MESSAGES = [{"role": "user", "content": QUESTION}]


def ask(url: str, model: str, kind: str = "openai", **options: object):
    return litellm.completion(
        model=f"{kind}/{model}", api_base=url, api_key="none", messages=MESSAGES, max_tokens=60, **options
    )


def chat(url: str, model: str) -> None:
    assert ask(url, model).choices[0].message.content


def vllm(url: str, model: str) -> None:
    assert ask(url, model, "hosted_vllm", reasoning_effort="low").choices[0].message.content


def stream(url: str, model: str) -> None:
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(url, model, stream=True))


def tools(url: str, model: str) -> None:
    tool = {"type": "function", "function": {"name": "answer", "parameters": NUMBER}}
    assert ask(url, model, tools=[tool], tool_choice="required").choices[0].message.tool_calls


def structured(url: str, model: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER, "strict": True}}
    assert "number" in ask(url, model, response_format=schema).choices[0].message.content


def responses(url: str, model: str) -> None:
    made = litellm.responses(
        model=f"openai/{model}", api_base=url, api_key="none", input=QUESTION, max_output_tokens=20
    )
    assert made.output


run(chat=chat, hosted_vllm=vllm, stream=stream, tools=tools, structured=structured, responses=responses)
