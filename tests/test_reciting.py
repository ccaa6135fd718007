"""The reciting server: it says what it is given, whole and streamed, in deltas that the drafts cut."""

import httpx
import pytest
from reciting import reciting

TEXTS = [
    "Yes.",
    "<think>Let me 😀 see.</think>\n\nIt é is.",
    'I look.<tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call>',
]


@pytest.fixture(scope="module")
def reciter():
    with reciting(TEXTS, tool_parser="none") as reciter:
        yield reciter


def asked(reciter, text, **more):
    body = {"messages": [{"role": "user", "content": text}], "logprobs": True} | more
    answer = httpx.post(f"{reciter.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_an_answer_is_the_text_that_the_prompt_names(number, reciter):
    [choice] = asked(reciter, f"Please recite {number}").json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXTS[number], "stop")
    scores = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert len(set(scores)) > len(scores) / 2  # the model's own


def test_another_seed_cuts_the_same_text_into_other_deltas(reciter):
    seen = set()
    for reciter.seed in range(3):
        lines = asked(reciter, "recite 2", stream=True, return_token_ids=True).text.splitlines()
        chunks = [httpx.Response(200, text=line[6:]).json() for line in lines if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == TEXTS[2]
        seen.add(tuple(len(choice.get("token_ids") or ()) for choice in choices))
    assert len(seen) == 3 and max(map(max, seen)) > 5


def test_requests_that_name_no_text_are_answered_in_turn(reciter):
    reciter.answer_next("One.", "Two.")
    said = [asked(reciter, "Go on.").json()["choices"][0]["message"]["content"] for _ in range(2)]
    assert said == ["One.", "Two."] and "Go on." in reciter.prompts[-1]
