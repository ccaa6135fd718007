"""Scoring over HTTP: `echo` with `logprobs` in OpenAI's legacy completions, and vLLM's `prompt_logprobs`.

What lm-evaluation-harness sends, and what it reads of the answer.
"""

import json
from typing import Any

import httpx
import pytest

from specdec import Engine, SamplingParams
from specdec.sampling.log_probs import TokenLogprob
from specdec.serving.openai.logprob_shapes import echoed_logprobs, text_offsets, vllm_prompt_logprobs

from served_engine import bundled_engine, served_url

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
CONTEXT, ENDINGS = "Tom has 3 apples and", (" buys 5 more.", " 2 boys")
HARNESS = {"model": "tiny-gemma4", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


engine, url = bundled_engine(prefill_chunk=16), served_url()


def scored(engine: Engine, prompt: str | list[int], asked: int = 1) -> list[TokenLogprob | None]:
    [out] = engine.generate([prompt], SamplingParams(max_new_tokens=0, prompt_logprobs=asked))
    assert out.prompt_logprobs is not None
    return out.prompt_logprobs


def harness_reads(choice: dict[str, Any], context_len: int) -> tuple[float, bool]:
    """`LocalCompletionsAPI.parse_logprobs` of lm-evaluation-harness 0.4: (log-likelihood, is it greedy)."""
    values = choice["logprobs"]["token_logprobs"][context_len:-1]
    tops = choice["logprobs"]["top_logprobs"][context_len:-1]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "token-ids"])
def test_multiple_choice_as_lm_evaluation_harness_asks(as_ids, url, engine):
    """One request for all endings of a question; 400 before echo went with logprobs."""
    texts = [CONTEXT + ending for ending in ENDINGS]
    ids = [engine.encode(text) for text in texts]
    context_len = len(engine.encode(CONTEXT))
    answer = httpx.post(f"{url}/v1/completions", json=HARNESS | {"prompt": ids if as_ids else texts})
    assert answer.status_code == 200, answer.text
    for choice, text, tokens in zip(answer.json()["choices"], texts, ids, strict=True):
        found = choice["logprobs"]
        assert choice["text"].startswith(text)
        assert {len(found[name]) for name in found} == {len(tokens) + 1}
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert "".join(found["tokens"]) == "<bos>" + choice["text"]
        pieces = zip(found["tokens"][1:], found["text_offset"][1:], strict=True)
        assert all(choice["text"].startswith(token, at) for token, at in pieces)
        ours = scored(engine, tokens)
        total, greedy = harness_reads(choice, context_len)
        assert total == pytest.approx(sum(one.logprob for one in ours[context_len:] if one), abs=1e-3)
        assert greedy is all(one.token_id in one.top for one in ours[context_len:] if one)


def test_a_greedy_continuation_is_said_to_be_greedy(url, engine):
    prompt = engine.encode(CONTEXT)
    [out] = engine.generate([prompt], SamplingParams(max_new_tokens=6, ignore_eos=True))
    answer = httpx.post(f"{url}/v1/completions", json=HARNESS | {"prompt": [prompt + out.token_ids]}).json()
    assert harness_reads(answer["choices"][0], len(prompt))[1]


def test_without_echo_a_request_needs_a_token(url):
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": CONTEXT, "max_tokens": 0})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("token", [1 << 40, 2048, -1])
def test_an_id_outside_the_vocabulary_is_refused_whether_it_is_echoed_or_not(token, url):
    answers = [httpx.post(f"{url}/v1/completions", json={"prompt": [5, token], "echo": echo}) for echo in (False, True)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].json() == answers[1].json()
    assert f"prompt 0 holds token id {token}, outside the vocabulary" in answers[0].text


def test_prompt_logprobs_as_vllm_has_them(url, engine):
    """With each choice of a completion, once in a chat; not in streams."""
    ours = scored(engine, CONTEXT, 2)
    body = {"prompt": CONTEXT, "max_tokens": 2, "prompt_logprobs": 2}
    [choice] = httpx.post(f"{url}/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"] is None and choice["prompt_logprobs"][0] is None
    for entry, one in zip(choice["prompt_logprobs"][1:], ours[1:], strict=True):
        assert set(entry) == {str(token) for token in (one.token_id, *one.top)}
        assert entry[str(one.token_id)]["logprob"] == pytest.approx(one.logprob, abs=1e-4)
        assert entry[str(one.token_id)]["decoded_token"] == engine.tokenizer.decode([one.token_id])
        ranks = [entry[str(token)]["rank"] for token in one.top]
        assert ranks == [1, 2]
    chat = {"messages": [{"role": "user", "content": CONTEXT}], "max_tokens": 2, "prompt_logprobs": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=chat).json()
    assert [len(entry) for entry in answer["prompt_logprobs"][1:]] == [1] * (answer["usage"]["prompt_tokens"] - 1)
    for change, said in (({"stream": True}, "without stream"), ({"prompt_logprobs": 21}, "from 0 to 20")):
        refused = httpx.post(f"{url}/v1/chat/completions", json=chat | change)
        assert refused.status_code == 400 and said in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "prompt_logprobs"


# where tokens stand in a text


@pytest.mark.parametrize(
    ("tokens", "text", "offsets"),
    [
        (["Tom", " has", " ", "3"], "Tom has 3", [0, 3, 7, 8]),
        (["<bos>", "Tom", "<eos>", " has"], "Tom has", [0, 0, 3, 3]),
        (["a", "\ufffd", "\ufffd", "b"], "a\u00e9b", [0, 1, 1, 2]),
        (["\ufffd", "\ufffd", "\ufffd", "\ufffd", "x"], "\u00e9\u00e8x", [0, 0, 0, 0, 2]),
        (["Hello", "world"], "Hello world", [0, 5]),  # a tokenizer that leaves out the space of one token alone
        (["\ufffd", "x"], "\ufffdx", [0, 1]),
        (["a", "", "b"], "ab", [0, 1, 1]),
        (["zz", "b"], "ab", [0, 0]),
        ([], "", []),
    ],
    ids=["words", "special", "two-bytes", "two-characters", "space", "replacement", "empty", "unknown", "none"],
)
def test_offsets_by_eye(tokens, text, offsets):
    assert text_offsets(tokens, text) == offsets


class Letters:
    """Decodes 0 and 1 to parts of characters, the others to letters."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join("\ufffd" if token < 2 else chr(95 + token) for token in ids)


def test_tokens_with_the_same_text_share_the_highest_logprob():
    """Else the harness takes a token that is the likeliest for one that is not."""
    scores = [None, TokenLogprob(0, -0.5, {0: -0.5, 1: -1.5}), TokenLogprob(1, -3.0, {0: -0.5, 2: -1.0})]
    found = echoed_logprobs(Letters(), [2, 0, 1], "a\u00e9", scores, 2)
    assert found["top_logprobs"] == [None, {"\ufffd": -0.5}, {"\ufffd": -0.5, "a": -1.0}]
    assert found["token_logprobs"] == [None, -0.5, -3.0]
    entries = vllm_prompt_logprobs(Letters(), scores, 1)
    assert entries[2] == {
        "1": {"logprob": -3.0, "rank": None, "decoded_token": "\ufffd"},
        "0": {"logprob": -0.5, "rank": 1, "decoded_token": "\ufffd"},
    }
    assert json.dumps(echoed_logprobs(Letters(), [2, 0], "a", [None, TokenLogprob(0, float("-inf"), {})], 0))
