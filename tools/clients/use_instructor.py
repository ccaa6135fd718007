"""instructor, in the modes that go through tools and through a schema."""

import instructor
import openai
from checks import QUESTION, Answer, run


def ask(url: str, model: str, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)
    made = client.chat.completions.create(
        model=model,
        response_model=Answer,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=60,
        max_retries=0,
    )
    assert made.number in (7, 8)


def tools(url: str, model: str) -> None:
    ask(url, model, instructor.Mode.TOOLS)


def structured(url: str, model: str) -> None:
    ask(url, model, instructor.Mode.JSON_SCHEMA)


run(tools=tools, structured=structured)
