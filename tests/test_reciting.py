"""The reciting server cuts one text into other deltas by another seed. That it recites, all tests that use it show."""

import httpx
from reciting import reciting

TEXT = 'I look.<tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call>'


def test_another_seed_cuts_the_same_text_into_other_deltas():
    seen = set()
    body = {"messages": [{"role": "user", "content": "recite 0"}], "stream": True, "return_token_ids": True}
    with reciting([TEXT], tool_parser="none") as reciter:
        for reciter.seed in range(3):
            answer = httpx.post(f"{reciter.url}/v1/chat/completions", json=body, timeout=60)
            chunks = [httpx.Response(200, text=line[6:]).json() for line in answer.text.splitlines() if "{" in line]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert "".join(choice["delta"].get("content") or "" for choice in choices) == TEXT
            seen.add(tuple(len(choice.get("token_ids") or ()) for choice in choices))
    assert len(seen) == 3 and max(map(max, seen)) > 5
