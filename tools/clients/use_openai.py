"""The official client: `parse`. The rest of it is in tests/test_server.py and tests/test_responses.py."""

import openai
from checks import QUESTION, Answer, run


def structured(url: str, model: str) -> None:
    client, messages = (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0),
        [{"role": "user", "content": QUESTION}],
    )
    made = client.chat.completions.parse(model=model, messages=messages, response_format=Answer)
    assert made.choices[0].message.parsed is not None


run(structured=structured)
